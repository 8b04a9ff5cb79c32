"""The layer in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

The gating is computed in fp32 (in fp64 for fp64 inputs) and rounded once; the products are torch's.
Gradients are autograd's. The backward pass stands here for the derivatives of the op, first and
second.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..gating import reference as gating
from ..perceptron.reference import as_matrix

Tensor = torch.Tensor


def swiglu(x: Tensor, joint_weight: Tensor, output_weight: Tensor) -> Tensor:
    """y = (SiLU(x A^T) * x B^T) C^T, A above B in ``joint_weight``, C ``output_weight``."""
    return F.linear(gating.silu_mul_halves(F.linear(x, joint_weight)), output_weight).contiguous()


def swiglu_backward(
    dy: Tensor, x: Tensor, joint_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A above B, and C."""
    joint = F.linear(x, joint_weight)
    djoint = gating.silu_mul_halves_backward(torch.matmul(dy, output_weight), joint)
    dx = torch.matmul(djoint, joint_weight).contiguous()
    djoint_weight = torch.mm(as_matrix(djoint).mT, as_matrix(x))
    gated = gating.silu_mul_halves(joint)
    return dx, djoint_weight, torch.mm(as_matrix(dy).mT, as_matrix(gated))
