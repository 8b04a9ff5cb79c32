"""The layer in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

SiLU is computed in fp32 (in fp64 for fp64 inputs) and rounded once; the products are torch's.
Gradients are autograd's. The backward pass stands here for the derivatives of the op, first and
second.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide

Tensor = torch.Tensor


def feed_forward(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    """y = SiLU(x A^T) C^T, A ``hidden_weight`` and C ``output_weight``."""
    return F.linear(silu(F.linear(x, hidden_weight)), output_weight).contiguous()


def silu(u: Tensor) -> Tensor:
    """u * sigmoid(u)."""
    return F.silu(wide(u)).to(u.dtype).contiguous()


def feed_forward_backward(
    dy: Tensor, x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and C."""
    u = F.linear(x, hidden_weight)
    u_wide = wide(u)
    slope = torch.sigmoid(u_wide)
    dh = wide(torch.matmul(dy, output_weight))
    du = (dh * (slope * (1.0 + u_wide * (1.0 - slope)))).to(u.dtype)
    dx = torch.matmul(du, hidden_weight).contiguous()
    dhidden_weight = torch.mm(as_matrix(du).mT, as_matrix(x))
    return dx, dhidden_weight, torch.mm(as_matrix(dy).mT, as_matrix(silu(u)))


def as_matrix(x: Tensor) -> Tensor:
    """All leading axes as one."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
