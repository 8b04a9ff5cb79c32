"""How the kernels reach the rows of a head: strides, copies, what a tensor descriptor can span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._checks import WIDTH_MULTIPLE
from ._launch import Kind, contiguous_strides

# The offsets inside a tile are 32-bit numbers.
MAX_ROW_STRIDE = 2**23
# Rows that a descriptor spans start at multiples of so many bytes.
DESCRIPTOR_BYTES = 16

Shape = tuple[int, ...]


def needs_copy(kind: Kind) -> bool:
    """Whether the kernels can read [B, rows, heads, D] of this kind only from a contiguous copy."""
    _, (*strides, last_stride) = kind
    odd = any(stride % WIDTH_MULTIPLE for stride in strides)
    return last_stride != 1 or odd or strides[1] > MAX_ROW_STRIDE


def present(kind: Kind | None) -> Kind:
    """The kind of an operand that is always there."""
    assert kind is not None
    return kind


def to_copy(
    kinds: Sequence[Kind | None], needs: Callable[[Any], bool] = needs_copy
) -> tuple[bool, ...]:
    """Which operands are copied first; empty where none is."""
    copies = tuple(needs(kind) for kind in kinds)
    return copies if any(copies) else ()


def head_strides(shape: Shape, kind: Kind) -> tuple[int, int, int]:
    """Strides of tasks, rows and heads of an operand, or of its copy."""
    strides = contiguous_strides(shape) if needs_copy(kind) else kind[1]
    batch, row, head, _ = strides
    return batch, row, head


def describable(shape: Shape, kind: Kind) -> bool:
    """Whether one descriptor spans an operand: all tasks' rows follow one another at one stride."""
    batches, rows, heads, width = shape
    batch, row, head = head_strides(shape, kind)
    return (
        width & (width - 1) == 0
        and width * kind[0].itemsize >= DESCRIPTOR_BYTES * 2
        and row * kind[0].itemsize % DESCRIPTOR_BYTES == 0
        and row > 0
        and head > 0
        and (batch == rows * row or batches == 1)
        and (heads - 1) * head + width < 2**31
        and batches * rows < 2**31
    )
