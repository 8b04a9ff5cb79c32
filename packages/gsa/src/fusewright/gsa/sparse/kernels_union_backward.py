"""Triton kernels of sparse attention's gradients by tiles: dq of tiles of queries with the union of
their keys as columns, dk and dv of tiles of keys with the union of the queries that have selected
them, in their order: no two programs add to one number. Queries that name a key again have no bits:
where there are any, dk and dv are launched again with them. The formulas are those of
``kernels_backward``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launches import SMALLEST_TILE as SMALLEST
from ..common.tiles import LOG2_E, product, product_with_rows, zeros
from .kernels_segments import partial_of, segment_of
from .tiles import are_members, load_listed, slots_of_rows, tile_of

SMALLEST_TILE = tl.constexpr(SMALLEST)


@triton.jit
def union_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    list_ptr,
    members_ptr,
    length_ptr,
    o_ptr,
    softmax_ptr,
    do_ptr,
    dlse_ptr,
    dq_ptr,
    delta_ptr,
    scale,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    k_head_stride,
    v_batch_stride,
    v_row_stride,
    v_head_stride,
    first,
    queries,
    heads,
    shared,
    selections,
    tiles,
    capacity,
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes dq and delta of STACK heads of TILE queries."""
    batch, number, place, query, head, key_head = tile_of(
        first, tiles, selections, heads, shared, CONFIG
    )
    col = tl.arange(0, CONFIG.BLOCK_D)
    inside = (query < queries)[:, None] & (col < CONFIG.D)[None, :]
    to_q = batch * q_batch_stride + query * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + to_q[:, None] + col[None, :], mask=inside, other=0.0)
    to_o = (((batch * queries + query) * heads + head) * CONFIG.D)[:, None] + col[None, :]
    o = tl.load(o_ptr + to_o, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + to_o, mask=inside, other=0.0)
    to_row = (batch * heads + head) * queries + query
    m = tl.load(softmax_ptr + to_row, mask=query < queries, other=0.0)
    inverse_l = tl.load(softmax_ptr + rows + to_row, mask=query < queries, other=0.0)
    delta = tl.sum(o * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + to_row, mask=query < queries, other=0.0).to(tl.float32)
        # That of no keys is minus infinity, and its gradient may be infinite, too.
        delta -= tl.where(inverse_l == 0.0, 0.0, dlse)
    tl.store(delta_ptr + to_row, delta, mask=query < queries)
    k_corner = k_ptr + batch * k_batch_stride + key_head * k_head_stride
    v_corner = v_ptr + batch * v_batch_stride + key_head * v_head_stride
    list_at = list_ptr + number * capacity
    members_at = members_ptr + number * CONFIG.WORDS * capacity
    factor = scale * LOG2_E

    dq = zeros(CONFIG.TILE * CONFIG.HEADS, CONFIG.BLOCK_D)
    length = tl.load(length_ptr + number)
    for start in tl.range(0, length, CONFIG.BLOCK, num_stages=CONFIG.NUM_STAGES):
        slot = start + tl.arange(0, CONFIG.BLOCK)
        key = tl.load(list_at + slot)
        k = load_listed(k_corner, key, k_row_stride, CONFIG)
        v = load_listed(v_corner, key, v_row_stride, CONFIG)
        # [TILE * STACK, BLOCK_K]
        s = product_with_rows(q, k, CONFIG)
        s = tl.where(are_members(members_at, slot, place, capacity, CONFIG), s, float("-inf"))
        p = tl.exp2(s * factor - m[:, None]) * inverse_l[:, None]
        dp = product_with_rows(do, v, CONFIG)
        ds = p * (dp - delta[:, None])
        dq += product(ds.to(k.dtype), k, CONFIG)

    tl.store(dq_ptr + to_o, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def union_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    list_ptr,
    members_ptr,
    length_ptr,
    indices_ptr,
    count_ptr,
    bits_ptr,
    softmax_ptr,
    do_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    cut_ptr,
    parts_ptr,
    scale,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    k_head_stride,
    v_batch_stride,
    v_row_stride,
    v_head_stride,
    indices_batch_stride,
    indices_head_stride,
    indices_row_stride,
    count_batch_stride,
    count_head_stride,
    count_row_stride,
    first,
    part,
    slots,
    marks,
    queries,
    keys,
    heads,
    shared,
    selections,
    tiles,
    capacity,
    rows,
    segments,
    most_parts,
    CONFIG: tl.constexpr,
):
    """One program computes dk and dv of TILE keys of one head of keys, from all heads that share
    it, or ADDS them to what earlier queries gave; where lists are cut, from one segment of the
    tile's list, and writes a partial sum where the tile has several. AGAIN: where any of ``part``
    queries from ``first`` on is marked, with the marked ones, or ADDS theirs alone.
    """
    if CONFIG.AGAIN:  # noqa: SIM102
        # The first condition is a constant, and leaves nothing of the second where it is false.
        if tl.load(bits_ptr + marks) == 0:
            return
    key_heads = heads // shared
    programs = tiles if cut_ptr is None else segments
    key_head = (tl.program_id(0) // programs % key_heads).to(tl.int64)
    batch = (tl.program_id(0) // programs // key_heads).to(tl.int64)
    tile = tl.program_id(0) % programs
    first_entry, end = 0, part
    if cut_ptr is not None:
        # Heads that share a head of keys have one list here.
        row = batch * selections + key_head % selections
        cut_at = cut_ptr + row * (segments + 2 * tiles + 2)
        tile, first_entry, end = segment_of(cut_at, tile, segments)
        if tile < 0:
            return
    place, col = tl.arange(0, CONFIG.TILE), tl.arange(0, CONFIG.BLOCK_D)
    key = (tile * CONFIG.TILE + place).to(tl.int64)
    inside = (key < keys)[:, None] & (col < CONFIG.D)[None, :]
    to_k = batch * k_batch_stride + key * k_row_stride + key_head * k_head_stride
    to_v = batch * v_batch_stride + key * v_row_stride + key_head * v_head_stride
    k = tl.load(k_ptr + to_k[:, None] + col[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + to_v[:, None] + col[None, :], mask=inside, other=0.0)
    factor = scale * LOG2_E
    column = tl.arange(0, CONFIG.BLOCK * CONFIG.HEADS)

    ROWS: tl.constexpr = CONFIG.BLOCK_D if CONFIG.TRANSPOSED else CONFIG.TILE
    COLUMNS: tl.constexpr = CONFIG.TILE if CONFIG.TRANSPOSED else CONFIG.BLOCK_D
    dk, dv = zeros(ROWS, COLUMNS), zeros(ROWS, COLUMNS)
    longest = 0
    for block in range(0, shared // CONFIG.HEADS):
        first_head = key_head * shared + block * CONFIG.HEADS
        number = (batch * selections + first_head % selections) * tiles + tile
        length = tl.load(length_ptr + number)
        if CONFIG.AGAIN and CONFIG.ADDS:
            length = 0
        last_entry = tl.minimum(length, end)
        longest = tl.maximum(longest, length)
        list_at = list_ptr + number * capacity
        members_at = members_ptr + number * CONFIG.WORDS * capacity
        head = first_head + column % CONFIG.HEADS
        q_at = q_ptr + (batch * q_batch_stride + head * q_head_stride)[:, None] + col[None, :]
        do_at = do_ptr + ((batch * queries * heads + head) * CONFIG.D)[:, None] + col[None, :]
        of_head = (batch * heads + head) * queries
        for start in tl.range(first_entry, last_entry, CONFIG.BLOCK, num_stages=CONFIG.NUM_STAGES):
            slot = start + column // CONFIG.HEADS
            query = tl.load(list_at + slot).to(tl.int64)
            to_do = (query * heads * CONFIG.D)[:, None]
            if CONFIG.D == CONFIG.BLOCK_D:
                q = tl.load(q_at + (query * q_row_stride)[:, None])
                do = tl.load(do_at + to_do)
            else:
                wide = (col < CONFIG.D)[None, :]
                q = tl.load(q_at + (query * q_row_stride)[:, None], mask=wide, other=0.0)
                do = tl.load(do_at + to_do, mask=wide, other=0.0)
            m = tl.load(softmax_ptr + of_head + query)
            inverse_l = tl.load(softmax_ptr + rows + of_head + query)
            delta = tl.load(delta_ptr + of_head + query)
            if CONFIG.TRANSPOSED:
                # [BLOCK_Q * STACK, TILE]
                s = product(q, tl.trans(k), CONFIG)
                members = are_members(members_at, slot, place, capacity, CONFIG)
                s = tl.where(members, s, float("-inf"))
                p = tl.exp2(s * factor - m[:, None]) * inverse_l[:, None]
                # [BLOCK_D, TILE]
                dv += product(tl.trans(do), p.to(do.dtype), CONFIG)
                ds = p * (product(do, tl.trans(v), CONFIG) - delta[:, None])
                dk += product(tl.trans(q), ds.to(q.dtype), CONFIG)
            else:
                # [TILE, BLOCK_Q * STACK]
                s = product_with_rows(k, q, CONFIG)
                members = are_members(members_at, slot, place, capacity, CONFIG)
                s = tl.where(members, s, float("-inf"))
                p = tl.exp2(s * factor - m[None, :]) * inverse_l[None, :]
                dv += product(p.to(do.dtype), do, CONFIG)
                ds = p * (product_with_rows(v, do, CONFIG) - delta[None, :])
                dk += product(ds.to(q.dtype), q, CONFIG)

    if CONFIG.TRANSPOSED:
        dk, dv = tl.trans(dk), tl.trans(dv)
    if CONFIG.AGAIN:
        longest = 1
        entry = tl.arange(0, SMALLEST_TILE)
        for block in range(0, shared // CONFIG.HEADS):
            first_head = key_head * shared + block * CONFIG.HEADS
            selection = first_head % selections
            of_selection = (batch * selections + selection) * part
            head = first_head + entry % CONFIG.HEADS
            q_row = q_ptr + batch * q_batch_stride + head * q_head_stride
            do_row = do_ptr + (batch * queries * heads + head) * CONFIG.D
            row = (batch * heads + head) * queries
            for start in range(0, part, SMALLEST_TILE // CONFIG.HEADS):
                number = start + entry // CONFIG.HEADS
                valid = number < part
                marked = bits_ptr + marks + 1 + of_selection + number
                valid = valid & (tl.load(marked, mask=valid, other=0) != 0)
                if tl.max(valid.to(tl.int32), 0) > 0:
                    name = (first + number).to(tl.int64)
                    indices_at, last = slots_of_rows(
                        (
                            indices_ptr,
                            indices_batch_stride,
                            indices_head_stride,
                            indices_row_stride,
                        ),
                        (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
                        *(batch, name, selection, valid, slots),
                    )
                    times = zeros(CONFIG.TILE, SMALLEST_TILE)
                    for slot in range(0, slots):
                        named = tl.load(indices_at + slot, mask=slot < last, other=-1)
                        times += (key[:, None] == named.to(tl.int64)[None, :]).to(tl.float32)
                    wide = valid[:, None] & (col < CONFIG.D)[None, :]
                    q_at = (q_row + name * q_row_stride)[:, None] + col[None, :]
                    do_at = (do_row + name * heads * CONFIG.D)[:, None] + col[None, :]
                    q = tl.load(q_at, mask=wide, other=0.0)
                    do = tl.load(do_at, mask=wide, other=0.0)
                    m = tl.load(softmax_ptr + row + name, mask=valid, other=0.0)
                    inverse_l = tl.load(softmax_ptr + rows + row + name, mask=valid, other=0.0)
                    delta = tl.load(delta_ptr + row + name, mask=valid, other=0.0)
                    # [TILE, SMALLEST_TILE]
                    s = tl.where(times > 0.0, product_with_rows(k, q, CONFIG), float("-inf"))
                    p = tl.exp2(s * factor - m[None, :]) * inverse_l[None, :] * times
                    dv += product(p.to(do.dtype), do, CONFIG)
                    ds = p * (product_with_rows(v, do, CONFIG) - delta[None, :])
                    dk += product(ds.to(q.dtype), q, CONFIG)

    if cut_ptr is not None:
        # Read only now, so that the loop holds no register for it.
        partial = partial_of(cut_at, tl.program_id(0) % segments, tile, tiles, segments)
        if partial >= 0:
            # [2, B, Hkv, PARTS, TILE, D]
            of_head = (batch * key_heads + key_head) * most_parts
            to_dv = tl.num_programs(0).to(tl.int64) // segments * most_parts
            part_at = parts_ptr + (of_head + partial) * CONFIG.TILE * CONFIG.D
            part_at += (place * CONFIG.D)[:, None] + col[None, :]
            tl.store(part_at, dk, mask=(col < CONFIG.D)[None, :])
            part_at += to_dv * CONFIG.TILE * CONFIG.D
            tl.store(part_at, dv, mask=(col < CONFIG.D)[None, :])
            return
    dk = dk * scale
    at = (((batch * keys + key) * key_heads + key_head) * CONFIG.D)[:, None] + col[None, :]
    if CONFIG.ADDS:
        inside = inside & (longest > 0)
        dk += tl.load(dk_ptr + at, mask=inside, other=0.0)
        dv += tl.load(dv_ptr + at, mask=inside, other=0.0)
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
