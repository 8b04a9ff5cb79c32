"""The layer in plain torch: the specification, the yardstick of the tests and the CPU
implementation. Everything is computed in fp32 (in fp64 for fp64 inputs) and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide

Tensor = torch.Tensor


def silu_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """h = SiLU(x W^T) in ``dtype``."""
    return F.silu(F.linear(wide(x), wide(weight))).to(dtype).contiguous()


def silu_linear_backward(dh: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and W."""
    x_wide, weight_wide = wide(x), wide(weight)
    u = F.linear(x_wide, weight_wide)
    slope = torch.sigmoid(u)
    du = dh.to(u.dtype) * (slope * (1.0 + u * (1.0 - slope)))
    dx = torch.matmul(du, weight_wide).to(x.dtype).contiguous()
    rows = x.shape[:-1].numel()
    dweight = torch.mm(du.reshape(rows, len(weight)).mT, x_wide.reshape(rows, x.shape[-1]))
    return dx, dweight.to(weight.dtype)
