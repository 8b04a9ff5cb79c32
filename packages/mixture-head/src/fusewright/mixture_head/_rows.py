"""How the kernels walk over the rows of a tensor, whatever its leading axes."""

from __future__ import annotations

from ._launch import Kind

# With the offsets of a tile below 2**31: no tile has more than 2**9 rows.
MAX_STRIDE = 2**21


def row_stride(shape: tuple[int, ...], kind: Kind | None) -> int | None:
    """The stride that takes the kernels from each row of an operand to the next, its leading axes
    being ``shape``; 0 for a missing operand, None where no one stride does.
    """
    if kind is None:
        return 0
    found: int | None = None
    length_below = 1
    for length, stride in reversed([*zip(shape, kind[1], strict=False)]):
        if length == 1:
            continue
        if found is None:
            found = stride
        elif stride != found * length_below:
            return None
        length_below *= length
    found = found or 0
    return found if found <= MAX_STRIDE else None
