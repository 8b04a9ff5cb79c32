"""What the optimizers call once triton is needed."""

from __future__ import annotations

from ._adamw_launch import KernelPart
from ._group_norm_launch import WIDEST, Control, PartSquares
from ._norm_launch import KernelGradients

__all__ = ["WIDEST", "Control", "KernelGradients", "KernelPart", "PartSquares"]
