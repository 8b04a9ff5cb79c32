"""What benchmark cases of optimizers have in common: the shapes of models, and steps to repeat."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from fusewright_testkit import Case

Tensor = torch.Tensor
Shapes = list[tuple[int, ...]]
LR, MAX_GRAD_NORM = 1e-3, 1.0


def language_model(layers: int = 20, width: int = 2048, hidden: int = 5504) -> Shapes:
    """1.08 B parameters in 182 tensors: two norms, four projections and three products a layer."""
    layer = [(width,)] * 2 + [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
    return [(32000, width), (width,), *layer * layers]


def small_model(layers: int = 19, width: int = 384, tokens: int = 7168, norms: int = 1) -> Shapes:
    """36.4 M parameters in 116 tensors: two norms and four products a layer."""
    layer = [(width,)] * 2 + [(3 * width, width), (width, width), (4 * width, width)]
    return [(tokens, width), *[(width,)] * norms, *[*layer, (width, 4 * width)] * layers]


def matrices(shapes: Shapes) -> Shapes:
    """The matrices of the layers: all but the first tensor, the embedding."""
    return [shape for shape in shapes[1:] if len(shape) == 2]


SHAPES: dict[str, Shapes] = {
    "small": small_model(),
    # 354 M parameters in 146 tensors.
    "medium": small_model(layers=24, width=1024, tokens=50304),
    "large": language_model(),
    "many": [(256,)] * 300,
}
# The last one is large enough for states of 8 bits.
SAMPLE: Shapes = [(1000,), (33, 70), (3,), (257, 129), (64, 96)]


def step_case(
    op: str,
    shapes: Shapes,
    dtype: torch.dtype,
    reference: Callable[..., tuple[Tensor, ...]],
    passes: float,
    sampled: Shapes = SAMPLE,
    operations: int = 0,
) -> Case:
    """A step over tensors of these shapes.

    Args:
        op: the optimizer.
        shapes: of its parameters.
        dtype: of parameters and gradients.
        reference: parameters and gradients to parameters after two steps, in plain torch.
        passes: how often as many bytes as the parameters have are read or written.
        sampled: shapes at which a step is held against the reference.
        operations: of products of matrices.
    """
    params = sum(map(elements, shapes))
    return Case(
        op=op,
        sizes=dict(params=params, tensors=len(shapes)),
        dtype=dtype,
        reference=reference,
        inputs=functools.partial(drawn, shapes, dtype),
        sample=functools.partial(drawn, sampled, dtype),
        bytes_moved={"step": int(passes * params * dtype.itemsize)},
        flops={"step": operations} if operations else {},
    )


def elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def drawn(shapes: Shapes, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Parameters, then their gradients."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    return [draw(shape) for shape in shapes] + [draw(shape) for shape in shapes]


class Stepped:
    """An optimizer as the benchmark takes it: parameters after two steps, or a step to repeat.

    Args:
        make: from parameters to an optimizer.
        clips: clip_grad_norm_ before each step, for optimizers that do not clip.
        captures: a step can be captured in a CUDA graph.
        loss: each step gets a loss.
        alternates: gradients are in one of two memories in turn, as where they are set to None and
            allocated again.
    """

    def __init__(
        self,
        make: Callable[[list], Any],
        *,
        clips: bool = False,
        captures: bool = True,
        loss: bool = False,
        alternates: bool = False,
    ) -> None:
        self.make, self.clips, self.captures, self.loss = make, clips, captures, loss
        self.alternates = alternates

    def prepare(self, tensors: list[Tensor]) -> Callable[[], None]:
        """A step on these parameters and gradients, in place."""
        half = len(tensors) // 2
        parameters = [torch.nn.Parameter(x.detach()) for x in tensors[:half]]
        gradients = [[g.detach() for g in tensors[half:]]]
        if self.alternates:
            gradients.append([g.clone() for g in gradients[0]])
        turns = itertools.cycle(gradients)
        point(parameters, gradients[0])
        optimizer = self.make(parameters)
        losses = [torch.ones((), device=tensors[0].device)] if self.loss else []

        def step() -> None:
            if self.alternates:
                point(parameters, next(turns))
            if self.clips:
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step(*losses)

        return step

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = [x.detach().clone() for x in tensors]
        step = self.prepare(copies)
        step()
        step()
        return tuple(copies[: len(copies) // 2])


def point(parameters: list, gradients: list[Tensor]) -> None:
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g


class OneByOne:
    """The same optimizer for each parameter, one after the other."""

    def __init__(self, parameters: list, make: Callable[[list], Any]) -> None:
        self.optimizers = [make([p]) for p in parameters]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
