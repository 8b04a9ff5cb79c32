"""The parts that the tasks of meta-training share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
}


class Task(Protocol):
    """The interface of all tasks.

    ``problems`` draws what the batches are made from, ``shapes`` has the parameters' (the first
    axis of a matrix is its inputs; a vector starts at zero), ``batch`` draws data, and ``loss`` is
    of one problem, without the first axis.
    """

    @property
    def name(self) -> str: ...
    def problems(self, n: int, device: torch.device) -> Tensors: ...
    def shapes(self) -> list[tuple[int, ...]]: ...
    def batch(self, problems: Tensors) -> Tensors: ...
    def loss(self, params: Sequence[Tensor], batch: Tensors) -> Tensor: ...


def spread(n: int, low: float, high: float, device: torch.device, axes: int = 0) -> Tensor:
    """``[n, 1, ...]`` from ``low`` to ``high``, log-uniform."""
    drawn = torch.rand(n, *[1] * axes, device=device)
    return low * (high / low) ** drawn


def one_hot(labels: Tensor, count: int) -> Tensor:
    return (labels[..., None] == torch.arange(count, device=labels.device)).float()


def drawn_classes(n: int, batch: int, count: int, device: torch.device) -> Tensor:
    return torch.randint(count, (n, batch), device=device)


def mislabelled(labels: Tensor, count: int, share: Tensor) -> Tensor:
    """One-hot rows, a ``share`` of them of random classes."""
    other = torch.randint_like(labels, count)
    return one_hot(
        torch.where(torch.rand_like(labels, dtype=torch.float32) < share, other, labels), count
    )


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return -(targets * F.log_softmax(scores, -1)).sum(-1).mean()


def layers(x: Tensor, params: Sequence[Tensor], activation: str) -> Tensor:
    """A perceptron: weights and biases alternate."""
    for place in range(0, len(params), 2):
        x = x @ params[place] + params[place + 1]
        if place + 2 < len(params):
            x = ACTIVATIONS[activation](x)
    return x


def layer_shapes(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [shape for rows, columns in pairwise(sizes) for shape in ((rows, columns), (columns,))]


def patches(x: Tensor, stride: int) -> Tensor:
    """``[batch, places, 9 channels]`` of 3 x 3 neighbourhoods."""
    rows, columns = x.shape[-2:]
    x = F.pad(x, (1, 1, 1, 1))
    shifted = [
        x[..., i : i + rows : stride, j : j + columns : stride] for i in range(3) for j in range(3)
    ]
    return torch.cat(shifted, -3).flatten(-2).mT


def normal(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
