"""The gating in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

Everything is computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the input's dtype;
outputs are contiguous. Gradients are autograd's. The backward passes stand here for the derivatives
of the ops, first and second.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide

Tensor = torch.Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """y = SiLU(gate) * up, SiLU(x) = x * sigmoid(x)."""
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype).contiguous()


def silu_mul_halves(joint: Tensor) -> Tensor:
    """silu_mul of the first and the second half of the last axis."""
    return silu_mul(*joint.tensor_split(2, -1))


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup) of silu_mul."""
    dy_wide, gate_wide = wide(dy), wide(gate)
    slope = torch.sigmoid(gate_wide)
    dgate = dy_wide * wide(up) * slope * (1.0 + gate_wide * (1.0 - slope))
    dup = dy_wide * F.silu(gate_wide)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def silu_mul_halves_backward(dy: Tensor, joint: Tensor) -> Tensor:
    """The gradient of both halves, in one tensor as they are."""
    return torch.cat(silu_mul_backward(dy, *joint.tensor_split(2, -1)), -1)
