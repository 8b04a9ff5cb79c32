"""What the optimizers call once triton is needed."""

from __future__ import annotations

from ._adamw_launch import KernelPart
from ._group_norm_launch import WIDEST, Control, PartSquares
from ._learned_launch import LearnedBatch
from ._learned_layout import too_long
from ._learned_part_launch import LearnedPart
from ._matrix_launch import MatrixLaunches, StackedAdamW
from ._norm_launch import KernelGradients
from ._velo_launch import VeLOPart

__all__ = [
    "WIDEST",
    "Control",
    "KernelGradients",
    "KernelPart",
    "LearnedBatch",
    "LearnedPart",
    "MatrixLaunches",
    "PartSquares",
    "StackedAdamW",
    "VeLOPart",
    "too_long",
]
