"""What the ops call once triton is needed."""

from __future__ import annotations

from ._backward import launch_norm_backward
from ._forward import launch_norm_forward
from ._sinkhorn import launch_sinkhorn_backward, launch_sinkhorn_forward

__all__ = [
    "launch_norm_backward",
    "launch_norm_forward",
    "launch_sinkhorn_backward",
    "launch_sinkhorn_forward",
]
