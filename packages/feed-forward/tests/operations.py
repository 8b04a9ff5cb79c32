"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fusewright.feed_forward.gating import reference
from fusewright.feed_forward.gating.silu_mul import silu_mul, silu_mul_halves
from fusewright.feed_forward.narrow.silu_linear import silu_linear
from fusewright.feed_forward.perceptron import reference as layer_reference
from fusewright.feed_forward.perceptron.feed_forward import feed_forward
from fusewright.feed_forward.swiglu import reference as gated_reference
from fusewright.feed_forward.swiglu.gated_feed_forward import gated_feed_forward
from fusewright_testkit.conformance import Operation, Package

Tensors = list[torch.Tensor]

PACKAGE = Package(
    "fusewright.feed_forward",
    names="FeedForward SwiGLU feed_forward gated_feed_forward silu_linear silu_mul",
    registered=(
        "feed_forward feed_forward_backward gated_feed_forward gated_feed_forward_backward "
        "silu_linear silu_linear_backward silu_mul silu_mul_backward "
        "silu_mul_halves silu_mul_halves_backward"
    ),
    without_triton=(
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "silu_mul(SwiGLU(8, 5)(x), FeedForward(8, 5)(x)).square().sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
    ),
)


@dataclass(frozen=True)
class GatingOp(Operation):
    """SiLU gating of ``operands`` tensors, which are ``widening`` times as wide as the result."""

    name: str
    function: Callable
    operands: int
    widening: int
    twin: Callable

    small = (3, 20)
    tiny = (2, 5)
    several = (70, 33)
    growing = ((3, 20), (5, 20), (8, 20))
    empty = ((0, 5), (3, 0), (0, 0), (2, 0, 4), (0,))
    strided = (2, 3, 2, 16)
    gpu = ((3000, 1024), (64, 256), (7, 20001))

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.function(*tensors, **options)

    def reference(self, *tensors: torch.Tensor) -> torch.Tensor:
        return getattr(reference, self.name)(*tensors)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an operand for a result of this shape."""
        return (*shape[:-1], self.widening * shape[-1])

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensors:
        """Operands for a result of this shape, from a normal distribution twice as wide."""
        shape = self.shape(shape)
        return [2 * torch.randn(shape, device=device).to(dtype) for _ in range(self.operands)]

    def kept(self, tensors: Tensors) -> int:
        return 0


@dataclass(frozen=True)
class FeedForwardOp(Operation):
    """A layer of ``products`` of x and one of what is computed from them: x [..., d], weights
    [products * F, d] and [M, F]; a size is that of x, then F and M.
    """

    name: str
    function: Callable
    products: int
    formula: Callable
    twin: Callable

    small = (3, 20, 6, 5)
    tiny = (2, 3, 4, 2)
    several = (70, 33, 40, 24)
    growing = ((3, 20, 6, 5), (5, 20, 6, 5), (8, 20, 6, 5))
    empty = ((0, 5, 3, 4), (3, 0, 5, 4), (3, 5, 0, 4), (3, 5, 4, 0), (2, 0, 4, 3, 3))
    strided = (2, 3, 2, 16, 8, 24)
    gpu = ((3000, 512, 1376, 512), (64, 256, 520, 128), (7, 200, 96, 200))

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.function(*tensors, **options)

    def reference(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.formula(*tensors)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensors:
        """x from a normal distribution, and weights that keep its size."""
        *leading, cols, hidden, outputs = shape
        x = torch.randn(*leading, cols, device=device).to(dtype)
        sizes = (self.products * hidden, cols), (outputs, hidden)
        weights = (torch.randn(size, device=device).div(max(size[1], 1) ** 0.5) for size in sizes)
        return [x, *(weight.to(dtype) for weight in weights)]

    def autocast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.bfloat16() for x in tensors]

    def kept(self, tensors: Tensors) -> int:
        """What is before the activation and behind it."""
        x, weight, output_weight = tensors
        return len(x) * (len(weight) + output_weight.shape[1])


@dataclass(frozen=True)
class NarrowOp(Operation):
    """SiLU of x [..., d] times the transpose of [F, d]; a size is that of x, then F."""

    name: str
    # Of the result; x's where left out.
    dtype: torch.dtype | None = None

    small = (3, 20, 6)
    tiny = (2, 3, 4)
    several = (300, 11, 140)
    growing = ((3, 20, 6), (5, 20, 6), (8, 20, 6))
    empty = ((0, 5, 3), (3, 0, 5), (3, 5, 0), (2, 0, 4, 3))
    strided = (2, 3, 2, 16, 8)
    gpu = ((3000, 11, 512), (64, 64, 520), (7, 200, 96))
    gpu_dtypes = (torch.float32, torch.bfloat16)

    def public(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return silu_linear(*tensors, **{"dtype": self.dtype} | options)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensors:
        """x from a normal distribution, and a weight that keeps its size."""
        *leading, cols, hidden = shape
        x = torch.randn(*leading, cols, device=device).to(dtype)
        weight = torch.randn(hidden, cols, device=device).div(max(cols, 1) ** 0.5)
        return [x, weight.to(dtype)]

    def kept(self, tensors: Tensors) -> int:
        return 0


def torch_feed_forward(x, hidden_weight, output_weight):
    return F.linear(F.silu(F.linear(x, hidden_weight)), output_weight)


def torch_gated_feed_forward(x, joint_weight, output_weight):
    gate, up = F.linear(x, joint_weight).tensor_split(2, -1)
    return F.linear(F.silu(gate) * up, output_weight)


def torch_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def torch_silu_mul_halves(joint: torch.Tensor) -> torch.Tensor:
    return torch_silu_mul(*joint.chunk(2, -1))


GATINGS = {
    op.name: op
    for op in (
        GatingOp("silu_mul", silu_mul, operands=2, widening=1, twin=torch_silu_mul),
        GatingOp(
            "silu_mul_halves", silu_mul_halves, operands=1, widening=2, twin=torch_silu_mul_halves
        ),
    )
}
FEED_FORWARD = FeedForwardOp(
    "feed_forward", feed_forward, 1, layer_reference.feed_forward, torch_feed_forward
)
GATED = FeedForwardOp(
    "gated_feed_forward", gated_feed_forward, 2, gated_reference.swiglu, torch_gated_feed_forward
)
NARROW = NarrowOp("silu_linear")
OPERATIONS = GATINGS | {op.name: op for op in (FEED_FORWARD, GATED, NARROW)}
FORMS = {"silu_linear to bf16": NarrowOp("silu_linear", dtype=torch.bfloat16)}
