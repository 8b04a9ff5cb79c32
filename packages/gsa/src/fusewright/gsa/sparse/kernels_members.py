"""Triton kernels of the bits and lists that tiles need: a bit for each query and key that it has
selected, and from these for each tile of queries the keys that any of them has selected, for each
tile of keys the queries that have selected any of them.

A bit cannot say how often a key counts: a query that names a key in several slots has no bits, but
a mark, and is computed by itself. Bits are set by an atomic "or" of
integers, whose result does not depend on the order. Lists ascend.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import zeros
from .tiles import load_selected, place_of, selection_of


@triton.jit
def members_kernel(
    indices_ptr,
    count_ptr,
    members_ptr,
    indices_batch_stride,
    indices_head_stride,
    indices_row_stride,
    count_batch_stride,
    count_head_stride,
    count_row_stride,
    first,
    part,
    keys,
    selections,
    slots,
    words,
    BLOCK: tl.constexpr,
):
    """One program sets the bits of the keys of one of ``part`` queries from ``first`` on, in its
    zeroed words. Behind the bits of all queries stand marks, zeroed too: whether any query names a
    key again, and for each query whether it does.
    """
    batch, place, selection = place_of(part, selections)
    indices_at, last = selection_of(
        (indices_ptr, indices_batch_stride, indices_head_stride, indices_row_stride),
        (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
        *(batch, first + place, selection, slots),
    )
    number = (batch * selections + selection) * part + place
    row = members_ptr + number * words
    again = tl.zeros([BLOCK], tl.int32)
    for start in range(0, last, BLOCK):
        key, valid = load_selected(indices_at, start, last, keys, BLOCK)
        bit = tl.full([BLOCK], 1, tl.int32) << (key & 31).to(tl.int32)
        before = tl.atomic_or(row + (key >> 5), bit, mask=valid, sem="relaxed")
        again |= tl.where(valid, before & bit, 0)
    # All of the program's bits are set where the greatest of its numbers is known.
    if tl.max((again != 0).to(tl.int32), 0) > 0:
        marks = members_ptr + tl.num_programs(0).to(tl.int64) * words
        tl.store(marks, 1)
        tl.store(marks + 1 + number, 1)
        for start in range(0, last, BLOCK):
            key, valid = load_selected(indices_at, start, last, keys, BLOCK)
            tl.store(row + (key >> 5), tl.zeros([BLOCK], tl.int32), mask=valid)


@triton.jit
def append(name, members, length, outputs, CONFIG: tl.constexpr):
    """Write those of BLOCK names that have members, ``[BLOCK, WORDS]`` bits, behind the
    first ``length``; the new length, and the last of the new ones (0 without any). ``outputs``:
    where the list and its members stand, and how many entries they hold.
    """
    list_at, members_at, capacity = outputs
    valid = tl.max((members != 0).to(tl.int32), 1)
    place = length + tl.cumsum(valid, 0) - valid
    tl.store(list_at + place, name, mask=valid > 0)
    word = tl.arange(0, CONFIG.WORDS)
    at = members_at + word[None, :] * capacity + place[:, None]
    tl.store(at, members, mask=(valid > 0)[:, None])
    return length + tl.sum(valid, 0), tl.max(tl.where(valid > 0, name, 0), 0)


@triton.jit
def fill(last, length, outputs, CONFIG: tl.constexpr):
    """Pad the list to a multiple of FILL entries by the last name, without members."""
    FILL: tl.constexpr = CONFIG.FILL
    WORDS: tl.constexpr = CONFIG.WORDS
    list_at, members_at, capacity = outputs
    place = length + tl.arange(0, FILL)
    beyond = place < tl.cdiv(length, FILL) * FILL
    tl.store(list_at + place, tl.zeros([FILL], tl.int32) + last, mask=beyond)
    word = tl.arange(0, WORDS)
    at = members_at + word[None, :] * capacity + place[:, None]
    tl.store(at, tl.zeros([FILL, WORDS], tl.int32), mask=beyond[:, None])


@triton.jit
def unions_kernel(
    members_ptr,
    union_ptr,
    part,
    words,
    tiles,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes BLOCK words of a union: a bit for each key that any of TILE queries has
    selected.
    """
    blocks = tl.cdiv(words, BLOCK)
    number = tl.program_id(0) // blocks
    word = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first = number % tiles * TILE
    at = members_ptr + ((number // tiles).to(tl.int64) * part + first) * words + word
    union = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(TILE):
        inside = (first + place < part) & (word < words)
        union |= tl.load(at + place * words, mask=inside, other=0)
    tl.store(union_ptr + number.to(tl.int64) * words + word, union, mask=word < words)


@triton.jit
def count_bits(word):
    """How many bits of a word of 32 are set."""
    twos = word - ((word >> 1) & 0x55555555)
    fours = (twos & 0x33333333) + ((twos >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def keys_before(union_at, first_word, BLOCK: tl.constexpr):
    """How many keys the words of a union before this one hold, and the last of them (0 without
    any).
    """
    length, last = 0, 0
    for start in range(0, first_word, BLOCK):
        number = start + tl.arange(0, BLOCK)
        word = tl.load(union_at + number, mask=number < first_word, other=0)
        length += tl.sum(count_bits(word), 0)
        greatest = tl.zeros([BLOCK], tl.int32)
        for bit in tl.static_range(32):
            greatest = tl.where((word >> bit) & 1 != 0, number * 32 + bit, greatest)
        last = tl.maximum(last, tl.max(greatest, 0))
    return length, last


@triton.jit
def keys_of_tiles_kernel(
    members_ptr,
    union_ptr,
    list_ptr,
    list_members_ptr,
    length_ptr,
    part,
    keys,
    words,
    tiles,
    capacity,
    CONFIG: tl.constexpr,
):
    """One program lists those of AT_A_TIME keys that TILE queries have selected, behind those that
    come before, and for each key its queries: a bit for each query of the tile, 32 of them a word.
    """
    stretches = tl.cdiv(keys, CONFIG.AT_A_TIME)
    number = (tl.program_id(0) // stretches).to(tl.int64)
    begin = tl.program_id(0) % stretches * CONFIG.AT_A_TIME
    union_at = union_ptr + number * words
    list_at = list_ptr + number * capacity
    outputs = (list_at, list_members_ptr + number * CONFIG.WORDS * capacity, capacity)
    first = (number % tiles).to(tl.int32) * CONFIG.TILE + tl.arange(0, CONFIG.WORDS) * 32
    corner = members_ptr + (number // tiles * part + first) * words
    PLACES: tl.constexpr = CONFIG.TILE if CONFIG.TILE < 32 else 32
    length, last = keys_before(union_at, begin // 32, CONFIG.BLOCK)
    for start in range(begin, tl.minimum(begin + CONFIG.AT_A_TIME, keys), CONFIG.BLOCK):
        key = start + tl.arange(0, CONFIG.BLOCK)
        word = tl.load(union_at + (key >> 5), mask=key < keys, other=0)
        listed = (word >> (key & 31)) & 1 != 0
        if tl.max(listed.to(tl.int32), 0) > 0:
            at = corner[None, :] + (key >> 5)[:, None]
            here = zeros(CONFIG.BLOCK, CONFIG.WORDS).to(tl.int32)
            # Unrolled, so that no query's word waits for another's.
            for place in tl.static_range(PLACES):
                inside = (first + place < part)[None, :] & listed[:, None]
                word_of_query = tl.load(at + place * words, mask=inside, other=0)
                here |= ((word_of_query >> (key & 31)[:, None]) & 1) << place
            length, newest = append(key, here, length, outputs, CONFIG)
            last = tl.maximum(last, newest)
    if begin + CONFIG.AT_A_TIME >= keys:
        fill(last, length, outputs, CONFIG)
        tl.store(length_ptr + number, length)


@triton.jit
def queries_of_tiles_kernel(
    members_ptr,
    list_ptr,
    list_members_ptr,
    length_ptr,
    first_query,
    part,
    words,
    tiles,
    capacity,
    CONFIG: tl.constexpr,
):
    """One program lists the queries that have selected one of TILE keys, and for each query
    its keys: a bit for each key of the tile, 32 of them a word.
    """
    selection = (tl.program_id(0) // tiles).to(tl.int64)
    number = tl.program_id(0).to(tl.int64)
    list_at = list_ptr + number * capacity
    outputs = (list_at, list_members_ptr + number * CONFIG.WORDS * capacity, capacity)
    first = tl.program_id(0) % tiles * CONFIG.TILE
    word = first // 32 + tl.arange(0, CONFIG.WORDS)
    length, last = 0, 0
    for start in range(0, part, CONFIG.BLOCK):
        place = start + tl.arange(0, CONFIG.BLOCK)
        at = members_ptr + ((selection * part + place) * words)[:, None] + word[None, :]
        here = tl.load(at, mask=(place < part)[:, None] & (word < words)[None, :], other=0)
        if CONFIG.TILE < 32:
            here = (here >> (first & 31)) & ((1 << CONFIG.TILE) - 1)
        query = first_query + place
        length, newest = append(query, here, length, outputs, CONFIG)
        last = tl.maximum(last, newest)
    fill(last, length, outputs, CONFIG)
    tl.store(length_ptr + number, length)
