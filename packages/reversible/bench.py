"""What is timed and against whom: ``python -m fusewright_testkit.bench reversible``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fusewright.reversible import MidpointStack
from fusewright.reversible.midpoint.reference import midpoint_rule
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

# What the names in cases count, in the picture.
WORDS = {"C": "width {}"}
Tensor = torch.Tensor
Op = Callable[..., Tensor]

OP = "MidpointStack"
STEP = 0.25
# Memory is what the depth shows.
SIZES = (
    dict(layers=8, tokens=8192, C=512),
    dict(layers=32, tokens=8192, C=512),
    dict(layers=32, tokens=8192, C=1024),
)
# The whole would take fp64 long.
CHECKED = dict(layers=4, tokens=256)
MULTIPLE = 4


class Layer(nn.Module):
    """Two products around GELU, behind a norm; its weights are handed to every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.empty(0))
        self.outer = nn.Parameter(torch.empty(0))

    def force(self, x: Tensor, *, tape: Any) -> tuple[Tensor, None]:
        return force(x, self.inner, self.outer), None


def force(x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), inner)), outer)


def cases() -> list[Case]:
    """Feed-forward layers in fp32 states, their products in TF32."""
    return [case(sizes) for sizes in SIZES]


def case(sizes: dict[str, int]) -> Case:
    tokens, width = sizes["tokens"], sizes["C"]
    product = 2 * 2 * sizes["layers"] * tokens * width * MULTIPLE * width
    weights = 4 * 2 * sizes["layers"] * MULTIPLE * width**2
    moved = 2 * 4 * tokens * width + weights
    # Those of the formula: what is recomputed counts as time alone.
    return Case(
        op=OP,
        sizes=sizes,
        dtype=torch.float32,
        precision="tf32",
        reference=by_autograd,
        inputs=functools.partial(inputs, sizes),
        bytes_moved=by_pass(moved),
        flops=by_pass(product),
        sample=functools.partial(inputs, sizes | CHECKED),
    )


def inputs(sizes: dict[str, int], device: str) -> list[Tensor]:
    """x, then the two weights of each layer."""
    width = sizes["C"]
    inner = width * MULTIPLE

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device) * columns**-0.5

    x = torch.randn(sizes["tokens"], width, device=device)
    pairs = [(draw(inner, width), draw(width, inner)) for _ in range(sizes["layers"])]
    return [x, *(weight for pair in pairs for weight in pair)]


def by_autograd(x: Tensor, *weights: Tensor) -> Tensor:
    """The rule as autograd keeps it."""
    return midpoint_rule(x, forces_of(weights), STEP)


def by_checkpoints(x: Tensor, *weights: Tensor) -> Tensor:
    """The rule with each force recomputed from its input, which is kept."""

    def recomputed(force: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(force, x, use_reentrant=False, preserve_rng_state=False)

    return midpoint_rule(x, [recomputed(force) for force in forces_of(weights)], STEP)


def forces_of(weights: tuple[Tensor, ...]) -> list[Callable[[Tensor], Tensor]]:
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return [functools.partial(force, inner=inner, outer=outer) for inner, outer in pairs]


def by_stack(mode: str) -> Op:
    """Our stack of as many layers as there are pairs of weights."""

    @functools.cache
    def stack_of(layers: int) -> MidpointStack:
        return MidpointStack([Layer() for _ in range(layers)], step=STEP, mode=mode)  # type: ignore[arg-type]

    def op(x: Tensor, *weights: Tensor) -> Tensor:
        stack = stack_of(len(weights) // 2)
        names = [name for name, _ in stack.named_parameters()]
        return functional_call(stack, dict(zip(names, weights, strict=True)), (x,)).x

    return op


def providers() -> dict[str, dict[str, Op]]:
    """Ours, with its states stored too, torch's checkpoints, and plain autograd."""
    return {
        "fusewright": {OP: by_stack("exact")},
        "fusewright-stored": {OP: by_stack("stored")},
        "torch": {OP: by_autograd},
        "checkpoint": {OP: by_checkpoints},
    }
