"""Device functions of sparse attention's kernels: selections and gathered rows, query by query;
lists and the bits of their members, by tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(queries, groups):
    """Which sequence, query and group of heads a program takes: neighbours share the selection."""
    group = tl.program_id(0) % groups
    query = tl.program_id(0) // groups % queries
    batch = tl.program_id(0) // groups // queries
    return batch.to(tl.int64), query, group


@triton.jit
def selection_of(
    indices_source,
    count_source,
    batch,
    query,
    group,
    slots,
    HAS_COUNT: tl.constexpr,
):
    """Where a query's selection starts, and how many of its slots are looked at; the sources tell
    where they are: the pointer, and the strides of sequences, heads and queries.
    """
    indices_ptr, batch_stride, head_stride, row_stride = indices_source
    at = indices_ptr + batch * batch_stride + group.to(tl.int64) * head_stride
    at += query.to(tl.int64) * row_stride
    last = slots
    if HAS_COUNT:
        count_ptr, batch_stride, head_stride, row_stride = count_source
        count_at = count_ptr + batch * batch_stride + group.to(tl.int64) * head_stride
        count = tl.load(count_at + query.to(tl.int64) * row_stride)
        last = tl.minimum(count, slots).to(tl.int32)
    return at, last


@triton.jit
def load_selected(indices_at, start, slots, keys, BLOCK_K: tl.constexpr):
    """The keys in slots ``start``, ``start + 1``, ..., and which of them are valid."""
    slot = start + tl.arange(0, BLOCK_K)
    key = tl.load(indices_at + slot, mask=slot < slots, other=-1).to(tl.int64)
    return key, (key >= 0) & (key < keys)


@triton.jit
def gather_rows(corner, row, valid, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """These rows of a head, zeros for those that are not valid, whose addresses are not read."""
    col = tl.arange(0, BLOCK_D)
    at = corner + ((row * row_stride)[:, None] + col[None, :])
    return tl.load(at, mask=valid[:, None] & (col < D)[None, :], other=0.0)


@triton.jit
def head_rows(
    corner, first, ROWS: tl.constexpr, head_stride, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Addresses of the rows of a query's heads from ``first`` on, and which of them are valid."""
    head, col = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    at = corner + ((first + head).to(tl.int64) * head_stride)[:, None] + col[None, :]
    return at, (head < ROWS)[:, None] & (col < D)[None, :]


@triton.jit
def tile_of(tiles, selections, first_head, blocks):
    """The tile, block of heads and sequence of a program, and the number of its list: neighbours
    share the heads, and the tiles with the longest lists come first; ``first_head`` is a block's.
    """
    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles
    block = pid // tiles % blocks
    batch = (pid // tiles // blocks).to(tl.int64)
    number = (batch * selections + block * first_head % selections) * tiles + tile
    return tile, block, batch, number


@triton.jit
def place_bits(place, word):
    """The bit of each place that lies in this word of 32, 0 for another's."""
    bit = tl.full(place.shape, 1, tl.int32) << (place % 32)
    return tl.where(place // 32 == word, bit, 0)


@triton.jit
def are_members(members_at, slot, place, capacity, WORDS: tl.constexpr):
    """Which places, the rows, are members of the entries of a list in these slots, the columns."""
    bits = tl.load(members_at + slot)[None, :] & place_bits(place, 0)[:, None]
    for word in tl.static_range(1, WORDS):
        more = tl.load(members_at + word * capacity + slot)
        bits |= more[None, :] & place_bits(place, word)[:, None]
    return bits != 0


@triton.jit
def load_listed(corner, name, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The named rows of a head, zeros beyond its width."""
    col = tl.arange(0, BLOCK_D)
    at = corner + ((name.to(tl.int64) * row_stride)[:, None] + col[None, :])
    return tl.load(at) if D == BLOCK_D else tl.load(at, mask=(col < D)[None, :], other=0.0)
