"""What the ops call once triton is needed."""

from __future__ import annotations

from ._scale_kernels import launch_scale

__all__ = ["launch_scale"]
