"""Rows as the kernels of both families count them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .._core.rows import MAX_ROWS


def count_rows(shape: Sequence[int]) -> int:
    """The rows of a tensor that has columns.

    Raises:
        ValueError: more rows than the kernels, which count them in 32 bits, can number.
    """
    rows = math.prod(shape[:-1])
    if rows > MAX_ROWS:
        raise ValueError(f"the kernels serve up to {MAX_ROWS} rows, got {rows}")
    return rows
