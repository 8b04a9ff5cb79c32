"""Triton kernels of sparse attention's gradients, dq one query and dk and dv one key at a time.

    p_tr  = exp(s_tr - lse_t)    delta_t = sum_d do_t o_t - dlse_t
    ds_tr = p_tr (do_t . v_j(t,r) - delta_t)
    dq_t  = scale sum_r ds_tr k_j(t,r)
    dk_j  = scale sum_{t selects j} ds_tr q_t    dv_j = sum_{t selects j} p_tr do_t

Each key goes through the queries that have selected it, in their order, so that no two programs add
to one number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launches import SMALLEST_TILE as SMALLEST
from ..common.tiles import LOG2_E, product, product_with_rows, zeros
from .tiles import gather_rows, head_rows, load_selected, place_of, selection_of

SMALLEST_TILE = tl.constexpr(SMALLEST)


@triton.jit
def query_gradient(
    q_source,
    k_source,
    v_source,
    indices_source,
    count_source,
    of_rows,
    scale,
    at,
    sizes,
    STAGES: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """dq of HEADS heads of one query, and their delta; ``at`` and the sources: as ``attend`` has
    them.
    """
    q_ptr, q_batch_stride, q_row_stride, q_head_stride = q_source
    k_ptr, k_batch_stride, k_row_stride, k_head_stride = k_source
    v_ptr, v_batch_stride, v_row_stride, v_head_stride = v_source
    o_ptr, softmax_ptr, do_ptr, dlse_ptr, dq_ptr, delta_ptr = of_rows
    batch, query, first_head, key_head, selection = at
    queries, keys, heads, slots, rows = sizes
    q_corner = q_ptr + batch * q_batch_stride + query.to(tl.int64) * q_row_stride
    q_at, inside = head_rows(q_corner, first_head, q_head_stride, CONFIG)
    q = tl.load(q_at, mask=inside, other=0.0)
    to_query = (batch * queries + query) * heads * CONFIG.D
    o_at, _ = head_rows(o_ptr + to_query, first_head, CONFIG.D, CONFIG)
    do_at, _ = head_rows(do_ptr + to_query, first_head, CONFIG.D, CONFIG)
    o = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_at, mask=inside, other=0.0)
    head = tl.arange(0, CONFIG.BLOCK_G)
    to_lse = (batch * heads + first_head + head) * queries + query
    m = tl.load(softmax_ptr + to_lse, mask=head < CONFIG.HEADS, other=0.0)
    inverse_l = tl.load(softmax_ptr + rows + to_lse, mask=head < CONFIG.HEADS, other=0.0)
    delta = tl.sum(o * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + to_lse, mask=head < CONFIG.HEADS, other=0.0).to(tl.float32)
        # That of no keys is minus infinity, and its gradient may be infinite, too.
        delta -= tl.where(inverse_l == 0.0, 0.0, dlse)
    tl.store(delta_ptr + to_lse, delta, mask=head < CONFIG.HEADS)
    k_corner = k_ptr + batch * k_batch_stride + key_head * k_head_stride
    v_corner = v_ptr + batch * v_batch_stride + key_head * v_head_stride
    indices_at, last = selection_of(indices_source, count_source, batch, query, selection, slots)

    dq = zeros(CONFIG.BLOCK_G, CONFIG.BLOCK_D)
    for start in tl.range(0, last, CONFIG.BLOCK, num_stages=STAGES):
        key, valid = load_selected(indices_at, start, last, keys, CONFIG.BLOCK)
        k = gather_rows(k_corner, key, valid, k_row_stride, CONFIG)
        v = gather_rows(v_corner, key, valid, v_row_stride, CONFIG)
        # [BLOCK_G, BLOCK_K]
        s = product_with_rows(q, k, CONFIG) * (scale * LOG2_E)
        p = tl.where(valid[None, :], tl.exp2(s - m[:, None]) * inverse_l[:, None], 0.0)
        dp = product_with_rows(do, v, CONFIG)
        ds = tl.where(valid[None, :], p * (dp - delta[:, None]), 0.0)
        dq += product(ds.to(k.dtype), k, CONFIG)

    dq_at, _ = head_rows(dq_ptr + to_query, first_head, CONFIG.D, CONFIG)
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sparse_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    count_ptr,
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
    indices_batch_stride,
    indices_head_stride,
    indices_row_stride,
    count_batch_stride,
    count_head_stride,
    count_row_stride,
    queries,
    keys,
    heads,
    groups,
    shared,
    slots,
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes dq of the ROWS heads of a group for one query, and their delta."""
    batch, query, group = place_of(queries, groups)
    key_head = (group // shared).to(tl.int64)
    query_gradient(
        (q_ptr, q_batch_stride, q_row_stride, q_head_stride),
        (k_ptr, k_batch_stride, k_row_stride, k_head_stride),
        (v_ptr, v_batch_stride, v_row_stride, v_head_stride),
        (indices_ptr, indices_batch_stride, indices_head_stride, indices_row_stride),
        (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
        (o_ptr, softmax_ptr, do_ptr, dlse_ptr, dq_ptr, delta_ptr),
        scale,
        (batch, query, group * CONFIG.HEADS, key_head, group),
        (queries, keys, heads, slots, rows),
        CONFIG.NUM_STAGES,
        CONFIG,
    )


@triton.jit
def marked_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    count_ptr,
    bits_ptr,
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
    indices_batch_stride,
    indices_head_stride,
    indices_row_stride,
    count_batch_stride,
    count_head_stride,
    count_row_stride,
    first,
    part,
    selections,
    marks,
    queries,
    keys,
    heads,
    groups,
    shared,
    slots,
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes dq and delta of a group's heads for those of TILE queries that are
    marked, where any of ``part`` queries from ``first`` on is.
    """
    if tl.load(bits_ptr + marks) != 0:
        batch, tile, group = place_of(tl.cdiv(part, CONFIG.TILE), groups)
        key_head = (group // shared).to(tl.int64)
        marks_at = bits_ptr + marks + 1 + (batch * selections + group % selections) * part
        for step in range(0, CONFIG.TILE):
            one = tile * CONFIG.TILE + step
            if tl.load(marks_at + one, mask=one < part, other=0) != 0:
                query_gradient(
                    (q_ptr, q_batch_stride, q_row_stride, q_head_stride),
                    (k_ptr, k_batch_stride, k_row_stride, k_head_stride),
                    (v_ptr, v_batch_stride, v_row_stride, v_head_stride),
                    (indices_ptr, indices_batch_stride, indices_head_stride, indices_row_stride),
                    (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
                    (o_ptr, softmax_ptr, do_ptr, dlse_ptr, dq_ptr, delta_ptr),
                    scale,
                    (batch, first + one, group * CONFIG.HEADS, key_head, group),
                    (queries, keys, heads, slots, rows),
                    1,
                    CONFIG,
                )


@triton.jit
def times_row(rows, x, CONFIG: tl.constexpr):
    """Products of rows with one row, as the other passes compute them: in the first of the columns
    that a product of tiles takes at least.
    """
    first = tl.arange(0, SMALLEST_TILE) == 0
    column = tl.where(first[None, :], x[:, None], 0.0).to(x.dtype)
    return tl.sum(product(rows, column, CONFIG), 1)


@triton.jit
def sparse_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    softmax_ptr,
    delta_ptr,
    lists_ptr,
    key_ptr,
    first_ptr,
    last_ptr,
    part_ptr,
    dk_ptr,
    dv_ptr,
    dk_parts_ptr,
    dv_parts_ptr,
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
    queries,
    keys,
    heads,
    groups,
    shared,
    selections,
    list_length,
    segments,
    most_parts,
    rows,
    CONFIG: tl.constexpr,
):
    """One program goes through one segment of a key's list, for the ROWS heads of a group, and
    writes dk and dv, or a part of them.
    """
    group = tl.program_id(0) % groups
    segment = tl.program_id(0) // groups % segments
    batch = (tl.program_id(0) // groups // segments).to(tl.int64)
    # All groups share a selection, or each has its own.
    selection = batch * selections + group % selections
    at = selection * segments + segment
    key = tl.load(key_ptr + at)
    if key < keys:
        first, last = tl.load(first_ptr + at), tl.load(last_ptr + at)
        part = tl.load(part_ptr + at)
        key_head = (group // shared).to(tl.int64)
        col = tl.arange(0, CONFIG.BLOCK_D)
        of_head = col < CONFIG.D
        k_at = k_ptr + batch * k_batch_stride + key_head * k_head_stride
        v_at = v_ptr + batch * v_batch_stride + key_head * v_head_stride
        k_at += key.to(tl.int64) * k_row_stride
        v_at += key.to(tl.int64) * v_row_stride
        k = tl.load(k_at + col, mask=of_head, other=0.0)
        v = tl.load(v_at + col, mask=of_head, other=0.0)

        dk = zeros(CONFIG.BLOCK_D)
        dv = zeros(CONFIG.BLOCK_D)
        row = tl.arange(0, CONFIG.BLOCK * CONFIG.BLOCK_G)
        head = (group * CONFIG.HEADS + row % CONFIG.BLOCK_G).to(tl.int64)
        for start in tl.range(first, last, CONFIG.BLOCK, num_stages=CONFIG.NUM_STAGES):
            place = start + row // CONFIG.BLOCK_G
            valid = (place < last) & (row % CONFIG.BLOCK_G < CONFIG.HEADS)
            query = tl.load(lists_ptr + selection * list_length + place, mask=valid, other=0)
            query = query.to(tl.int64)
            inside = valid[:, None] & of_head[None, :]
            to_q = batch * q_batch_stride + query * q_row_stride + head * q_head_stride
            to_do = ((batch * queries + query) * heads + head) * CONFIG.D
            q = tl.load(q_ptr + to_q[:, None] + col[None, :], mask=inside, other=0.0)
            do = tl.load(do_ptr + to_do[:, None] + col[None, :], mask=inside, other=0.0)
            to_row = (batch * heads + head) * queries + query
            m = tl.load(softmax_ptr + to_row, mask=valid, other=0.0)
            inverse_l = tl.load(softmax_ptr + rows + to_row, mask=valid, other=0.0)
            delta = tl.load(delta_ptr + to_row, mask=valid, other=0.0)
            # [BLOCK_T * BLOCK_G]
            s = times_row(q, k, CONFIG) * (scale * LOG2_E)
            p = tl.where(valid, tl.exp2(s - m) * inverse_l, 0.0)
            ds = p * (times_row(do, v, CONFIG) - delta)
            dv += tl.sum(p[:, None] * do.to(tl.float32), 0)
            dk += tl.sum(ds[:, None] * q.to(tl.float32), 0)

        dk = dk * scale
        if part < 0:
            out = ((batch * keys + key) * groups + group) * CONFIG.D + col
            tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=of_head)
            tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=of_head)
        else:
            out = ((batch * groups + group) * most_parts + part) * CONFIG.D + col
            tl.store(dk_parts_ptr + out, dk, mask=of_head)
            tl.store(dv_parts_ptr + out, dv, mask=of_head)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    dk_parts_ptr,
    dv_parts_ptr,
    dk_ptr,
    dv_ptr,
    keys,
    groups,
    selections,
    most_parts,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program adds the parts of one key's dk and dv, for one group, in their order."""
    group = tl.program_id(0) % groups
    key = tl.program_id(0) // groups % keys
    batch = (tl.program_id(0) // groups // keys).to(tl.int64)
    selection = batch * selections + group % selections
    at = parts_ptr + selection * (keys + 1) + key
    first, last = tl.load(at), tl.load(at + 1)
    if first < last:
        col = tl.arange(0, BLOCK_D)
        dk = tl.zeros([BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_D], tl.float32)
        for part in range(first, last):
            to_part = ((batch * groups + group) * most_parts + part) * D + col
            dk += tl.load(dk_parts_ptr + to_part, mask=col < D, other=0.0)
            dv += tl.load(dv_parts_ptr + to_part, mask=col < D, other=0.0)
        out = ((batch * keys + key) * groups + group) * D + col
        tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=col < D)
        tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=col < D)
