"""Which tiles of a sequence a band touches, for the kernels of sliding-window attention.

Queries are all rows of the sequence, or each the last of ``every`` rows. Row r sees the ``prefix``
first keys, and of the others r - window + 1, ..., r. Tiles start where the band does, not at
multiples of their size. All rows of a tile of queries see all keys of an inner tile; only border
tiles need a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_row_of(queries, keys, every):
    """The row of the sequence that query 0 is: the last query is the last row."""
    return keys - 1 - (queries - 1) * every


@triton.jit
def keys_of_rows(first, last, window, prefix, BLOCK_K: tl.constexpr):
    """The tiles of keys that rows ``first`` to ``last`` of the sequence see.

    Returns:
        How many border tiles and how many inner ones; and, for ``border_keys`` and ``inner_keys``,
        where they are: the first key of the band, its border tiles before the inner ones, its inner
        tiles, the prefix's inner tiles.
    """
    start = tl.maximum(first - window + 1, prefix)
    tiles = tl.cdiv(tl.maximum(last + 1 - start, 0), BLOCK_K)
    # Too old for the last row.
    before = tl.minimum(tl.cdiv(tl.maximum(last + 1 - window - start, 0), BLOCK_K), tiles)
    inner = tl.maximum(tl.maximum(first + 1 - start, 0) // BLOCK_K - before, 0)
    whole = prefix // BLOCK_K
    ragged = tl.cdiv(prefix, BLOCK_K) - whole
    return ragged + tiles - inner, whole + inner, (start, before, inner, whole)


@triton.jit
def border_keys(number, place, window, prefix, keys, BLOCK_K: tl.constexpr):
    """Border tile ``number``: its first key, the end of the keys in it, and the range of distances
    at which a row sees them.
    """
    start, before, inner, whole = place
    ragged = tl.cdiv(prefix, BLOCK_K) - whole
    of_prefix = number < ragged
    of_band = number - ragged
    of_band += tl.where(of_band < before, 0, inner)
    key = tl.where(of_prefix, whole * BLOCK_K, start + of_band * BLOCK_K)
    limit = tl.where(of_prefix, prefix, keys)
    # Every row is less than ``keys`` away from every key.
    nearest = tl.where(of_prefix, -keys, 0)
    furthest = tl.where(of_prefix, keys, window)
    return key, limit, (nearest, furthest)


@triton.jit
def inner_keys(number, place, BLOCK_K: tl.constexpr):
    """The first key of inner tile ``number``."""
    start, before, _, whole = place
    return tl.where(number < whole, number * BLOCK_K, start + (before + number - whole) * BLOCK_K)


@triton.jit
def rows_of_keys(
    first, window, offset, every, queries, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """The tiles of queries that see some of the keys ``first``, ``first + 1``, ... of the band;
    query i is row ``offset + i every`` of the sequence.

    Returns:
        The first query; its border tiles before the inner ones, its inner tiles, and all.
    """
    start = queries_before(first, offset, every)
    last = first + BLOCK_K - 1
    end = tl.minimum(queries_before(last + window, offset, every), queries)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_Q)
    # Too old for the last key.
    older = tl.maximum(queries_before(last, offset, every) - start, 0)
    before = tl.minimum(tl.cdiv(older, BLOCK_Q), tiles)
    end = tl.minimum(queries_before(first + window, offset, every), queries)
    see_first = tl.maximum(end - start, 0)
    return start, before, tl.maximum(see_first // BLOCK_Q - before, 0), tiles


@triton.jit
def queries_before(row, offset, every):
    """How many queries come before a row of the sequence, if their number had no end."""
    return tl.cdiv(tl.maximum(row - offset, 0), every)


@triton.jit
def sees(row, key, distances):
    """Whether rows see keys, both numbered in the sequence and shaped to be broadcast."""
    nearest, furthest = distances
    distance = row - key
    return (distance >= nearest) & (distance < furthest)
