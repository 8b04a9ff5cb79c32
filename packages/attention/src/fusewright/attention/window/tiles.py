"""Which tiles of a sequence a band touches, for the kernels of sliding-window attention.

Queries are all rows of the sequence, or each the last of ``every`` rows. Row r sees the ``prefix``
first keys, and of the others r - window + 1, ..., r. Tiles start where the band does, not at
multiples of their size. All rows of a tile of queries see all keys of an inner tile; only border
tiles need a mask.

A sequence may be packed from documents, a row of which sees none of another. Its rows are
stretches, one after the other: the prefix, padding, the documents, padding. A tile is of one
stretch and begins as if that were alone, so that all above holds with the document's first row in
the place of the prefix's end, and what another document holds is never read. Stretch d begins
within tile row / BLOCK of them, and in no tile that the stretch before it takes if each takes one
more than it may need: so the tiles of stretch d are those from row / BLOCK + d on. Where stretches
begin is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .documents import BESIDE_DOCUMENTS

# What varies from batch to batch: one kernel serves every number.
COUNTS = ("documents",)
# Stretches beside the documents: the prefix and the padding on both sides.
BESIDE = tl.constexpr(BESIDE_DOCUMENTS)
# Where a program looks for its stretch, so many bounds at a time.
SEARCHED = tl.constexpr(64)


@triton.jit
def first_row_of(queries, keys, every):
    """The row of the sequence that query 0 is: the last query is the last row."""
    return keys - 1 - (queries - 1) * every


@triton.jit
def bound_of(number, sequence):
    """The row at which a stretch of a sequence begins."""
    bounds_ptr, documents, batch, prefix, keys = sequence
    document = tl.minimum(tl.maximum(number - 2, 0), documents)
    bound = prefix + tl.load(bounds_ptr + batch * (documents + 1) + document)
    bound = tl.where(number < 2, tl.where(number < 1, 0, prefix), bound)
    return tl.where(number > documents + 2, keys, bound)


@triton.jit
def count_tiles(rows, bounds_ptr, documents, BLOCK: tl.constexpr):
    """How many tiles ``rows`` rows of a sequence have; if it is packed, at most."""
    tiles = tl.cdiv(rows, BLOCK)
    if bounds_ptr is not None:
        tiles = rows // BLOCK + documents + BESIDE
    return tiles


@triton.jit
def rows_of_tile(tile, rows, sequence, offset, every, BLOCK: tl.constexpr):
    """A tile of ``rows`` rows, of which number i is row ``offset + i every`` of the sequence.

    Returns:
        Its first row; the end of those that it has, and of those that see something, which none of
        padding does; and the first row and the end, in the sequence, of the document that they are
        of.
    """
    bounds_ptr, documents, _, prefix, keys = sequence
    first, last, seeing, begin, end = tile * BLOCK, rows, rows, prefix, keys
    if bounds_ptr is not None:
        stretch = stretch_of(tile, sequence, offset, every, BLOCK)
        begin, end = bound_of(stretch, sequence), bound_of(stretch + 1, sequence)
        start = queries_before(begin, offset, every)
        first = start + (tile - start // BLOCK - stretch) * BLOCK
        last = queries_before(end, offset, every)
        is_padding = (stretch == 1) | (stretch == documents + 2)
        seeing = tl.where(is_padding, 0, last)
        # The prefix sees itself, and has no band.
        begin = tl.maximum(begin, prefix)
    return first, last, seeing, begin, end


@triton.jit
def stretch_of(tile, sequence, offset, every, BLOCK: tl.constexpr):
    """The last stretch whose tiles begin at ``tile`` or before."""
    _, documents, _, _, _ = sequence
    # One sum behind the loop: a sum in each round would take registers from the whole kernel.
    begun = tl.zeros([SEARCHED], tl.int32)
    for start in range(0, documents + BESIDE, SEARCHED):
        each = start + tl.arange(0, SEARCHED)
        before = queries_before(bound_of(each, sequence), offset, every)
        begun += ((each < documents + BESIDE) & (before // BLOCK + each <= tile)).to(tl.int32)
    return tl.sum(begun, 0) - 1


@triton.jit
def keys_of_rows(first, last, window, prefix, begin, BLOCK_K: tl.constexpr):
    """The tiles of keys that rows ``first`` to ``last`` see, of a sequence or of its document that
    begins at row ``begin``.

    Returns:
        How many border tiles and how many inner ones; and, for ``border_keys`` and ``inner_keys``,
        where they are: the first key of the band, its border tiles before the inner ones, its inner
        tiles, the prefix's inner tiles.
    """
    start = tl.maximum(first - window + 1, begin)
    tiles = tl.cdiv(tl.maximum(last + 1 - start, 0), BLOCK_K)
    # Too old for the last row.
    before = tl.minimum(tl.cdiv(tl.maximum(last + 1 - window - start, 0), BLOCK_K), tiles)
    inner = tl.maximum(tl.maximum(first + 1 - start, 0) // BLOCK_K - before, 0)
    whole = prefix // BLOCK_K
    ragged = tl.cdiv(prefix, BLOCK_K) - whole
    return ragged + tiles - inner, whole + inner, (start, before, inner, whole)


@triton.jit
def border_keys(number, place, window, prefix, end, keys, BLOCK_K: tl.constexpr):
    """Border tile ``number``: its first key, the end of the keys in it, which for a band is that of
    the document, and the range of distances at which a row sees them.
    """
    start, before, inner, whole = place
    ragged = tl.cdiv(prefix, BLOCK_K) - whole
    of_prefix = number < ragged
    of_band = number - ragged
    of_band += tl.where(of_band < before, 0, inner)
    key = tl.where(of_prefix, whole * BLOCK_K, start + of_band * BLOCK_K)
    limit = tl.where(of_prefix, prefix, end)
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
def queries_of_chunk(first, limit, sequence, offset, every, BLOCK_Q: tl.constexpr):
    """The tiles of the queries from ``first`` on before ``limit``, all of which see the prefix, but
    for padding.

    Returns:
        As ``rows_of_keys``, with the queries that are of the prefix as border tiles before the
        inner ones; and the end of these queries, that of the others, and how far behind the end of
        those tiles the inner ones begin.
    """
    bounds_ptr, documents, _, prefix, _ = sequence
    before, begin, earlier = 0, first, limit
    if bounds_ptr is not None:
        earlier = tl.minimum(queries_before(prefix, offset, every), limit)
        before = tl.cdiv(tl.maximum(earlier - first, 0), BLOCK_Q)
        bound = queries_before(bound_of(2, sequence), offset, every)
        begin = tl.maximum(first, bound)
        bound = queries_before(bound_of(documents + 2, sequence), offset, every)
        limit = tl.minimum(limit, bound)
    length = tl.maximum(limit - begin, 0)
    inner, tiles = length // BLOCK_Q, before + tl.cdiv(length, BLOCK_Q)
    gap = begin - first - before * BLOCK_Q
    return (first, before, inner, tiles), (earlier, limit, gap)


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
