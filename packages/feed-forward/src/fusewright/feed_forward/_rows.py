"""How the kernels walk over the rows of a tensor, whatever its leading axes and their strides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._launch import Kind, contiguous_strides

# Elements are counted in 64 bits; rows, and columns together with a block of them, in 32.
MAX_ROWS = 2**31 - 2**13
MAX_COLS = 2**30


def rows_and_cols(shape: Sequence[int]) -> tuple[int, int]:
    """The rows of a tensor with elements and the length of one; a number is a row of one."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def check_countable(rows: int, cols: int) -> None:
    """Rows with a stride of their own must be few and short enough to be told apart.

    Raises:
        ValueError: they are not.
    """
    if rows > MAX_ROWS or cols > MAX_COLS:
        raise ValueError(
            f"the kernels serve up to {MAX_ROWS} rows of up to {MAX_COLS} columns where the rows "
            f"do not follow one another, got {rows} of {cols}"
        )


def walk(shape: tuple[int, ...], kind: Kind) -> tuple[int, int, int]:
    """The row strides of an operand, or of the contiguous copy that is read in its place."""
    found = row_strides(shape, kind[1]) or row_strides(shape, contiguous_strides(shape))
    assert found is not None
    return found


def to_copy(shape: tuple[int, ...], *operands: Kind) -> tuple[bool, ...]:
    """Which operands of these kinds the kernels can only read from a contiguous copy; empty where
    there is none.
    """
    copies = tuple(row_strides(shape, strides) is None for _, strides in operands)
    return copies if any(copies) else ()


def follow_one_another(shape: tuple[int, ...], *operands: Kind) -> bool:
    """Whether every operand, as it is read, is one run of elements in the order of the result."""
    rows, cols = rows_and_cols(shape)
    return rows == 1 or all(walk(shape, kind) == (1, cols, 0) for kind in operands)


def row_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """How the rows along the last axis of a tensor are reached.

    Returns:
        ``(inner_rows, outer_stride, inner_stride)``: row i starts at element
        ``i // inner_rows * outer_stride + i % inner_rows * inner_stride``; inner_rows is 1 where
        one stride reaches every row. None where the last axis is not contiguous or the leading axes
        need three strides.
    """
    if shape and strides[-1] != 1 and shape[-1] != 1:
        return None
    axes: list[tuple[int, int]] = []
    for length, stride in zip(shape[:-1], strides[:-1], strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = (axes[-1][0] * length, stride)
        else:
            axes.append((length, stride))
    if len(axes) > 2:
        return None
    if len(axes) == 2:
        return axes[1][0], axes[0][1], axes[1][1]
    return 1, axes[0][1] if axes else 0, 0
