"""The grouped linear layer in plain torch: the specification, the yardstick of the tests and the
CPU implementation. Every group is a product over all rows, those of others as zeros: no size is
read from a tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def masks(x: Tensor, ends: Tensor) -> list[Tensor]:
    """For each group, which rows of x it has, ``[..., 1]``."""
    row = torch.arange(x.shape[:-1].numel(), device=x.device).view(*x.shape[:-1], 1)
    stops = ends.cummax(0).values if len(ends) else ends
    begins = [row >= 0, *(row >= stop for stop in stops)]
    return [begin & (row < stop) for begin, stop in zip(begins, stops, strict=False)]


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x ``[..., d]`` times the weight of each row's group, ``[G, S, d]``: ``[..., S]``."""
    y = x.new_zeros((*x.shape[:-1], weight.shape[1]))
    for of_group, matrix in zip(masks(x, ends), weight, strict=True):
        y = torch.where(of_group, F.linear(x.where(of_group, 0.0), matrix), y)
    return y.contiguous()


def grouped_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    dx, dweight = torch.zeros_like(x), []
    for of_group, matrix in zip(masks(x, ends), weight, strict=True):
        own = dy.where(of_group, 0.0)
        dx = torch.where(of_group, own @ matrix, dx)
        dweight.append(as_matrix(own).mT @ as_matrix(x.where(of_group, 0.0)))
    return dx, torch.stack(dweight) if dweight else torch.zeros_like(weight)


def as_matrix(x: Tensor) -> Tensor:
    """All leading axes as one."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
