"""The layer in plain torch: the specification and the yardstick of the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide

Tensor = torch.Tensor


def swiglu(x: Tensor, joint_weight: Tensor, output_weight: Tensor) -> Tensor:
    """(SiLU(x A^T) * x B^T) C^T, A above B in ``joint_weight``, C ``output_weight``. The gating is
    computed in fp32 (in fp64 for fp64 inputs) and rounded once.
    """
    gate, up = F.linear(x, joint_weight).tensor_split(2, -1)
    gated = F.silu(wide(gate)) * wide(up)
    return F.linear(gated.to(gate.dtype), output_weight)
