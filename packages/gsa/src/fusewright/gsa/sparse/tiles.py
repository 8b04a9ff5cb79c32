"""Device functions of sparse attention's kernels: selections and gathered rows, query by query;
lists and the bits of their members, by tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG_2


@triton.jit
def place_of(queries, groups):
    """Which sequence, query and group of heads a program takes: neighbours share the selection."""
    group = tl.program_id(0) % groups
    query = tl.program_id(0) // groups % queries
    batch = tl.program_id(0) // groups // queries
    return batch.to(tl.int64), query, group


@triton.jit
def selection_of(indices_source, count_source, batch, query, group, slots):
    """Where a query's selection starts, and how many of its slots are looked at; the sources tell
    where they are: the pointer, and the strides of sequences, heads and queries.
    """
    indices_ptr, batch_stride, head_stride, row_stride = indices_source
    at = indices_ptr + batch * batch_stride + group.to(tl.int64) * head_stride
    at += query.to(tl.int64) * row_stride
    last = slots
    count_ptr, batch_stride, head_stride, row_stride = count_source
    if count_ptr is not None:
        count_at = count_ptr + batch * batch_stride + group.to(tl.int64) * head_stride
        count = tl.load(count_at + query.to(tl.int64) * row_stride)
        last = tl.minimum(count, slots).to(tl.int32)
    return at, last


@triton.jit
def load_selected(indices_at, start, slots, keys, BLOCK: tl.constexpr):
    """The keys in slots ``start``, ``start + 1``, ..., and which of them are valid."""
    slot = start + tl.arange(0, BLOCK)
    key = tl.load(indices_at + slot, mask=slot < slots, other=-1).to(tl.int64)
    return key, (key >= 0) & (key < keys)


@triton.jit
def gather_rows(corner, row, valid, row_stride, CONFIG: tl.constexpr):
    """These rows of a head, zeros for those that are not valid, whose addresses are not read."""
    col = tl.arange(0, CONFIG.BLOCK_D)
    at = corner + ((row * row_stride)[:, None] + col[None, :])
    return tl.load(at, mask=valid[:, None] & (col < CONFIG.D)[None, :], other=0.0)


@triton.jit
def head_rows(corner, first, head_stride, CONFIG: tl.constexpr):
    """Addresses of the rows of a query's heads from ``first`` on, and which of them are valid."""
    head, col = tl.arange(0, CONFIG.BLOCK_G), tl.arange(0, CONFIG.BLOCK_D)
    at = corner + ((first + head).to(tl.int64) * head_stride)[:, None] + col[None, :]
    return at, (head < CONFIG.HEADS)[:, None] & (col < CONFIG.D)[None, :]


@triton.jit
def tile_of(first, tiles, selections, heads, shared, CONFIG: tl.constexpr):
    """The sequence of a program and the number of its list; of each of its rows, which are queries
    from ``first`` on with their heads, the place in the tile, the query and the head; and the head
    of keys. Neighbours share the heads, and the tiles with the longest lists come first.
    """
    pid = tl.program_id(0)
    blocks = heads // CONFIG.HEADS
    tile = tiles - 1 - pid % tiles
    block = pid // tiles % blocks
    batch = (pid // tiles // blocks).to(tl.int64)
    number = (batch * selections + block * CONFIG.HEADS % selections) * tiles + tile
    row = tl.arange(0, CONFIG.TILE * CONFIG.HEADS)
    place = row // CONFIG.HEADS
    query = (first + tile * CONFIG.TILE + place).to(tl.int64)
    head = (block * CONFIG.HEADS + row % CONFIG.HEADS).to(tl.int64)
    return batch, number, place, query, head, (block * CONFIG.HEADS // shared).to(tl.int64)


@triton.jit
def online_softmax(m, s, factor):
    """The next maximum of scores ``factor`` s in base 2, their weights below it, and what earlier
    weights are multiplied with.
    """
    m_next = tl.maximum(m, tl.max(s, 1) * factor)
    # Without a key so far the maximum is -inf, whose distance to itself is NaN.
    finite = tl.where(m_next == float("-inf"), 0.0, m_next)
    return m_next, tl.exp2(s * factor - finite[:, None]), tl.exp2(m - finite)


@triton.jit
def store_softmax(lse_ptr, softmax_ptr, at, rows, m, l, inverse_l, valid):
    """Store the log-sum-exp of rows and, where it is kept, their maximum and one over their sum."""
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LOG_2)
    tl.store(lse_ptr + at, lse, mask=valid)
    if softmax_ptr is not None:
        tl.store(softmax_ptr + at, tl.where(l == 0.0, 0.0, m), mask=valid)
        tl.store(softmax_ptr + rows + at, inverse_l, mask=valid)


@triton.jit
def slots_of_rows(indices_source, count_source, batch, query, selection, valid, slots):
    """Where the selection of each row's query starts, and how many of its slots are looked at, of
    rows that are not valid none; the sources are those of ``selection_of``.
    """
    indices_ptr, batch_stride, head_stride, row_stride = indices_source
    at = indices_ptr + batch * batch_stride + selection * head_stride + query * row_stride
    last = tl.where(valid, slots, 0)
    count_ptr, batch_stride, head_stride, row_stride = count_source
    if count_ptr is not None:
        count_at = count_ptr + batch * batch_stride + selection * head_stride + query * row_stride
        count = tl.load(count_at, mask=valid, other=0)
        last = tl.minimum(count, slots).to(tl.int32)
    return at, last


@triton.jit
def place_bits(place, word):
    """The bit of each place that lies in this word of 32, 0 for another's."""
    bit = tl.full(place.shape, 1, tl.int32) << (place % 32)
    return tl.where(place // 32 == word, bit, 0)


@triton.jit
def are_members(members_at, slot, place, capacity, CONFIG: tl.constexpr):
    """Which places, the rows, are members of the entries of a list in these slots, the columns; or
    TRANSPOSED.
    """
    bits = bits_of(tl.load(members_at + slot), place_bits(place, 0), CONFIG)
    WORDS: tl.constexpr = CONFIG.WORDS
    for word in tl.static_range(1, WORDS):
        more = tl.load(members_at + word * capacity + slot)
        bits |= bits_of(more, place_bits(place, word), CONFIG)
    return bits != 0


@triton.jit
def bits_of(of_slots, of_places, CONFIG: tl.constexpr):
    """The bits that words of slots and of places have in common, of each pair."""
    if CONFIG.TRANSPOSED:
        bits = of_slots[:, None] & of_places[None, :]
    else:
        bits = of_slots[None, :] & of_places[:, None]
    return bits


@triton.jit
def load_listed(corner, name, row_stride, CONFIG: tl.constexpr):
    """The named rows of a head, zeros beyond its width."""
    col = tl.arange(0, CONFIG.BLOCK_D)
    at = corner + ((name.to(tl.int64) * row_stride)[:, None] + col[None, :])
    return (
        tl.load(at)
        if CONFIG.D == CONFIG.BLOCK_D
        else tl.load(at, mask=(col < CONFIG.D)[None, :], other=0.0)
    )
