"""How the kernels reach the rows of a head: strides, copies, what a tensor descriptor can span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core.launches import Layout, contiguous_strides
from .checks import WIDTH_MULTIPLE

# The offsets inside a tile are 32-bit numbers.
MAX_ROW_STRIDE = 2**23
# Rows that a descriptor spans start at multiples of this many bytes.
DESCRIPTOR_BYTES = 16

Shape = tuple[int, ...]


def needs_copy(layout: Layout) -> bool:
    """Whether the kernels can read [B, rows, heads, D] of this layout only from a contiguous
    copy.
    """
    _, (*strides, last_stride) = layout
    odd = any(stride % WIDTH_MULTIPLE for stride in strides)
    return last_stride != 1 or odd or strides[1] > MAX_ROW_STRIDE


def present(layout: Layout | None) -> Layout:
    """The layout of an operand that is never absent."""
    assert layout is not None
    return layout


def to_copy(
    layouts: Sequence[Layout | None], needs: Callable[[Any], bool] = needs_copy
) -> tuple[bool, ...]:
    """Which operands are copied first; empty where none is."""
    copies = tuple(needs(layout) for layout in layouts)
    return copies if any(copies) else ()


def head_strides(shape: Shape, layout: Layout) -> tuple[int, int, int]:
    """Strides of tasks, rows and heads of an operand, or of its copy."""
    strides = contiguous_strides(shape) if needs_copy(layout) else layout[1]
    batch, row, head, _ = strides
    return batch, row, head


def describable(shape: Shape, layout: Layout) -> bool:
    """Whether one descriptor spans an operand: all tasks' rows follow one another at one stride."""
    batches, rows, heads, width = shape
    batch, row, head = head_strides(shape, layout)
    return (
        width & (width - 1) == 0
        and width * layout[0].itemsize >= DESCRIPTOR_BYTES * 2
        and row * layout[0].itemsize % DESCRIPTOR_BYTES == 0
        and row > 0
        and head > 0
        and (batch == rows * row or batches == 1)
        and (heads - 1) * head + width < 2**31
        and batches * rows < 2**31
    )


def is_aligned(*operands: torch.Tensor) -> bool:
    """Whether every operand starts where a descriptor may."""
    bits = 0
    for x in operands:
        bits |= x.data_ptr()
    return bits % DESCRIPTOR_BYTES == 0
