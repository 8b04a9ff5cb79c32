"""How kernels take their operands: contiguous, or heads [B, T, heads, D] by their strides, in tiles
that ``tl.dot`` multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from .._core.backends import interpreted
from .._core.launches import Layout, contiguous_strides
from .._core.precision import allows_tf32

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)

# The largest memory that one program of the scan or of the read holds.
WIDEST = 64
WIDEST_HIDDEN = 512
# tl.dot multiplies no tiles of fewer rows or columns.
SMALLEST_TILE = 16
# Products of fewer rows take other instructions, and where one kernel has both kinds triton 3.6
# reads past the end of its shared memory. Where programs share a head, rows are tokens or columns
# of keys and values alone, and a program may take fewer hidden units.
FEWEST_ROWS = SMALLEST_TILE if interpreted() else 64


def contiguous(x: MaybeTensor) -> MaybeTensor:
    """x, or a contiguous copy."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def all_contiguous(*operands: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Each of them, or a contiguous copy; one call for them all."""
    return tuple([x if x is None or x.is_contiguous() else x.contiguous() for x in operands])


def product_precision(dtype: torch.dtype) -> str:
    """``tl.dot``'s precision for tiles of heads of this dtype."""
    # Three products of TF32 parts are as good as one of fp32, and fit the same units.
    return "tf32" if dtype == torch.float32 and allows_tf32() else "tf32x3"


def head_strides(
    shape: tuple[int, ...],
    operands: Sequence[Layout],
    *others: tuple[tuple[int, ...], Layout | None],
) -> tuple[tuple[bool, ...], list[tuple[int, ...]]]:
    """Which operands the kernels read from a contiguous copy, empty where there is none: of those
    [B, T, heads, D] of this shape, then of the others, whose shapes are given. And the strides of
    batch, tokens and heads with which the former are read.
    """
    _, tokens, heads, width = shape
    copies = [strides[-1] != 1 and width > 1 for _, strides in operands]
    copy = (tokens * heads * width, heads * width, width)
    read = [
        copy if is_copied else strides[:-1]
        for is_copied, (_, strides) in zip(copies, operands, strict=True)
    ]
    copies += [needs_copy(*other) for other in others]
    return tuple(copies) if any(copies) else (), read


def needs_copy(shape: tuple[int, ...], layout: Layout | None) -> bool:
    """Whether the kernels, which read it where it is contiguous, read a copy of an operand."""
    return layout is not None and layout[1] != contiguous_strides(shape)
