"""What the optimizers call once triton is needed."""

from __future__ import annotations

from ._adamw_launch import KernelPart
from ._norm_launch import KernelGradients

__all__ = ["KernelGradients", "KernelPart"]
