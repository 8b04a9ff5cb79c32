"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fusewright.feed_forward.gating import reference
from fusewright.feed_forward.gating.silu_mul import silu_mul, silu_mul_halves
from fusewright_testkit.conformance import Operation, Package

Tensors = list[torch.Tensor]

PACKAGE = Package(
    "fusewright.feed_forward",
    names="SwiGLU silu_mul",
    registered="silu_mul silu_mul_backward silu_mul_halves silu_mul_halves_backward",
    without_triton=(
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "silu_mul(SwiGLU(8, 5)(x), x).square().sum().backward()\n"
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


def torch_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def torch_silu_mul_halves(joint: torch.Tensor) -> torch.Tensor:
    return torch_silu_mul(*joint.chunk(2, -1))


OPERATIONS = {
    op.name: op
    for op in (
        GatingOp("silu_mul", silu_mul, operands=2, widening=1, twin=torch_silu_mul),
        GatingOp(
            "silu_mul_halves", silu_mul_halves, operands=1, widening=2, twin=torch_silu_mul_halves
        ),
    )
}
