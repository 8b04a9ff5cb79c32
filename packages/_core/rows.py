"""How kernels reach the rows of a tensor, whatever its leading axes and their strides."""

from __future__ import annotations

from .launches import Layout

# Rows are counted in 32 bits: the largest block that a launch table may name is left free.
MAX_ROWS = 2**31 - 2**13


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


def read_strides(shape: tuple[int, ...], layout: Layout | None) -> tuple[int, int, int]:
    """The row strides of an operand, or of the contiguous copy that is read in its place; any for
    an operand that is absent.
    """
    strides = None if layout is None else row_strides(shape, layout[1])
    return strides or (1, shape[-1] if shape else 1, 0)


def to_copy(shape: tuple[int, ...], *operands: Layout | None) -> tuple[bool, ...]:
    """Which operands of these layouts, of this shape or vectors of its columns, the kernels can
    only read from a contiguous copy; empty where there is none.
    """
    copies = tuple(
        layout is not None and row_strides(shape[len(shape) - len(layout[1]) :], layout[1]) is None
        for layout in operands
    )
    return copies if any(copies) else ()
