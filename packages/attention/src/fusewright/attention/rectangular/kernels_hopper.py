"""Gluon kernel of the forward pass over many keys, for Hopper.

    s_ij = factor q_i . k_j    p_ij = 2^(s_ij - r_i)
    l_i = sum_j p_ij           o_i = sum_j p_ij v_j / l_i

factor is scale log2 e. The reference r_i is the maximum of s_ij over the first tile of keys that a
row sees, and stays what it is: no later tile rescales o and l, as an online softmax does. Exact
while no score lies far above the reference: exponents of bf16 and fp32 reach 2^127. Rows whose sum
or output has grown beyond a limit are flagged, and ``flagged_forward_kernel`` computes their tile
again, online. In fp16, probabilities reach 2^16, beyond which they and their sum are infinite. The
reference is not put above the first maximum, which would leave more room: the sum is at least 1,
so that what fp16 takes from small probabilities is no more than if the greatest one were 1.

A program is some groups of four warps. The last has a warp that copies tiles of keys and values
into a ring of STAGES in shared memory; each of the other GROUPS, three or, for wider heads, two,
has 64 queries and both products of them. A token goes round among these, so that one issues its
products while the others are at their exponentials. A product's scores stay in registers and become
the probabilities of the next one. l is a product, too, with a column of ones: it adds the
probabilities as they were rounded for o, so that the weight of a row's only key is 1, whatever its
reference is. Where the log-sum-exp is wanted, its sum is that of the probabilities before their
rounding.

Programs stay and take piece after piece of work, queries of one head next to one another, so that
its keys and values stay in the L2 cache. Those of a head with very many keys do not fit into it:
there, with TOGETHER, programs begin their pieces at one time, and the tile of keys that one reads
is in the cache for the others. The pieces that fill all programs are whole tiles of
queries; those that are left are cut by their keys, and ``combine_parts_kernel`` adds the parts.

With SINKS, the sink of a head is added to the sums of its rows once all keys have passed.

With RAGGED, a task has its own number of keys. What memory holds behind them, in the tile of the
last one, has probabilities of 0; where it is no finite number its tiles are flagged.

Shah et al., FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from .._core.kernels_gluon import gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from ..common.kernels_counters import count_and_wait
from ..common.kernels_hopper_forward import (
    LOG2_E,
    ROWS,
    buffers_and_barriers,
    copy_keys,
    copy_queries,
    last_tile,
    next_tile,
    probabilities,
    store_outputs,
    sums_of_lanes,
)


@gluon.jit
def keys_of(batch, lengths_ptr, keys, CONFIG: gl.constexpr):
    """How many keys a task has: all, or its number, cut to 0 ... keys."""
    if CONFIG.RAGGED:
        length = gl.load(lengths_ptr + batch)
        keys = gl.minimum(gl.maximum(length, 0), keys).to(gl.int32)
    return keys


@gluon.jit
def work_of(piece, sizes, lengths_ptr, CONFIG: gl.constexpr):
    """Task, head and tile of queries of a piece of work; the tile of keys that comes first, which
    is its last one in memory, how many it has, and the number of keys up to its last one. The first
    ``whole`` pieces have all tiles of keys; behind them come the first part of each of the ``left``
    other tiles of queries, the second of each, and so on: those at work at one time share keys.
    """
    whole, left, parts, query_tiles, keys, heads = sizes
    beyond = piece - whole
    is_part = beyond >= 0
    tile = gl.where(is_part, whole + beyond % left, piece)
    part = gl.where(is_part, beyond // left, 0)
    head = tile // query_tiles
    keys = keys_of(head // heads, lengths_ptr, keys, CONFIG)
    key_tiles = (keys + CONFIG.BLOCK_K - 1) // CONFIG.BLOCK_K
    first = gl.where(is_part, part * key_tiles // parts, 0)
    last = gl.where(is_part, (part + 1) * key_tiles // parts, key_tiles)
    count = last - first
    comes_first = key_tiles - 1 - first
    if CONFIG.RAGGED:
        # A piece without keys has one tile, in which there are none.
        keys = gl.where(count == 0, 0, keys)
        comes_first = gl.where(count == 0, 0, comes_first)
        count = gl.maximum(count, 1)
    return head // heads, head % heads, tile % query_tiles, comes_first, count, keys


@gluon.jit
def copy_tiles(inputs, call, buffers, barriers, sizes, pieces, CONFIG: gl.constexpr):
    """What the copying warp does: queries of each piece, then its keys and values, last ones first,
    each into a place that is free.
    """
    q_tiles, k_tiles, v_tiles = inputs
    lengths_ptr, begun_ptr, sharing = call
    GROUPS: gl.constexpr = CONFIG.GROUPS
    copied = 0
    begun = begun_ptr.to(gl.int64, bitcast=True)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        batch, head, tile, last, count, _keys = work_of(piece, sizes, lengths_ptr, CONFIG)
        of_keys = head // sharing if CONFIG.GROUPED else head
        turn = piece // gl.num_programs(0)
        # Only where every program has a piece.
        all_begin = (turn > 0) & (turn < sizes[0] // gl.num_programs(0))
        if CONFIG.TOGETHER and all_begin:
            count_and_wait(begun, turn * gl.num_programs(0))
        for group in gl.static_range(GROUPS):
            of_group = batch, head, tile
            copy_queries(q_tiles, buffers, barriers, of_group, group, turn, CONFIG)
        for step in range(count):
            tiles = k_tiles, v_tiles
            of_tile = batch, of_keys, last
            copy_keys(tiles, buffers, barriers, of_tile, step, copied, CONFIG)
            copied += 1


@gluon.jit
def attend(
    o_tiles, pointers, buffers, barriers, sizes, call, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """What each group with queries does: its ROWS queries of every piece, over its keys."""
    pieces, lengths_ptr, queries, rows, factor, keeps = call
    sinks_ptr, lse_ptr, softmax_ptr, o_low_ptr, flags_ptr, parts = pointers
    partial_o_ptr, partial_softmax_ptr = parts
    q_shared, k_shared, _v_shared, o_shared, _ones_shared = buffers
    q_full, q_free, full, _free, tokens = barriers
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    STAGES: gl.constexpr = CONFIG.STAGES
    GROUPS: gl.constexpr = CONFIG.GROUPS
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OF_OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_OUTPUT, 2)
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    BY_ROW_OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, OF_OUTPUT)
    whole, heads = sizes[0], sizes[5]
    blocks = (queries + ROWS - 1) // ROWS
    token = tokens.index(GROUP)
    next_token = tokens.index((GROUP + 1) % GROUPS)
    row = gl.arange(0, ROWS, BY_ROW)
    q = q_shared.index(GROUP).reshape([ROWS, D])
    none = gl.zeros([ROWS, BLOCK_K], gl.float32, OF_SCORES)
    used = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        batch, head, tile, last, count, keys = work_of(piece, sizes, lengths_ptr, CONFIG)
        turn = piece // gl.num_programs(0)
        mbarrier.wait(q_full.index(GROUP), turn & 1)

        # Only the last tile in memory, which comes first, has columns that are no keys.
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        k = k_shared.index(stage).reshape([BLOCK_K, D]).permute([1, 0])
        s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        column = last * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, OF_SCORES))
        is_key = gl.expand_dims(column < keys, 0) & (gl.zeros_like(s) == 0.0)
        s = gl.where(is_key, s, -float("inf"))
        reference = gl.max(s, 1) * factor
        if CONFIG.RAGGED:
            # Without a key all probabilities are 0.
            p = probabilities(s, gl.where(keys == 0, 0.0, reference), factor)
        else:
            p = probabilities(s, reference, factor)
        exact_l = sums_of_lanes(p, BLOCK_K)
        p = gl.convert_layout(p.to(q.dtype), OF_OPERAND)
        l = gl.zeros([ROWS, 8], gl.float32, OF_SUMS)
        o = gl.zeros([ROWS, D], gl.float32, OF_OUTPUT)
        for _ in range(1, count):
            following = (used + 1) % STAGES
            mbarrier.wait(full.index(following), ((used + 1) // STAGES) & 1)
            # The token has come once for each tile of keys but the first of each piece.
            mbarrier.wait(token, ((used - turn) & 1) ^ (1 if GROUP == 0 else 0))
            p, o, l, exact_l = next_tile(
                *(q, p, (o, l, exact_l), buffers, barriers, next_token, (stage, following)),
                *(reference, factor, None, None, CONFIG),
            )
            stage = following
            used += 1
        mbarrier.arrive(q_free.index(GROUP), count=1)
        o, l = last_tile(p, o, l, buffers, barriers, stage, CONFIG)
        used += 1

        total = gl.convert_layout(gl.max(l, 1), BY_ROW)
        exact_total = gl.convert_layout(gl.sum(exact_l, 1), BY_ROW)
        block = tile * GROUPS + GROUP
        if piece >= whole:
            number = (piece - whole) * GROUPS + GROUP
            to_row = gl.expand_dims(gl.arange(0, ROWS, BY_ROW_OF_OUTPUT), 1) * D
            col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, OF_OUTPUT)), 0)
            gl.store(partial_o_ptr + number * (ROWS * D) + to_row + col, o)
            to_softmax = partial_softmax_ptr + number * (3 * ROWS) + row
            gl.store(to_softmax, reference)
            gl.store(to_softmax + ROWS, total)
            if CONFIG.LSE:
                gl.store(to_softmax + 2 * ROWS, exact_total)
        elif block < blocks:
            if CONFIG.SINKS:
                # One that is far above the reference makes a sum that flags its rows.
                sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
                of_sink = gl.exp2(sink - reference)
                total += of_sink
                exact_total += of_sink
            store_outputs(
                *(o_tiles, (lse_ptr, softmax_ptr, o_low_ptr, flags_ptr), o_shared),
                *((o, total, exact_total, reference), (batch, head, block)),
                *((queries, blocks, heads, rows, keeps), GROUP, CONFIG),
            )
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(
    do_not_specialize=(
        *("queries", "keys", "heads", "rows", "whole", "left", "parts"),
        *("query_tiles", "keeps", "sharing"),
    )
)
def hopper_forward_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    o_tiles,
    lengths_ptr,
    sinks_ptr,
    lse_ptr,
    softmax_ptr,
    o_low_ptr,
    flags_ptr,
    partial_o_ptr,
    partial_softmax_ptr,
    begun_ptr,
    scale,
    queries,
    keys,
    heads,
    rows,
    whole,
    left,
    parts,
    query_tiles,
    keeps,
    sharing,
    CONFIG: gl.constexpr,
):
    """A program takes every so many-th piece of work; tiles are tensor descriptors over
    [B, rows, H, D]. ``keeps``, 0 or 1, says whether ``o_low_ptr`` and ``softmax_ptr`` are
    written, and CONFIG whether ``lengths_ptr`` and ``sinks_ptr`` are read and ``lse_ptr`` is
    written, and whether heads share keys, ``sharing`` of them those of one head.
    """
    GROUPS: gl.constexpr = CONFIG.GROUPS
    tiles = (q_tiles, k_tiles, v_tiles, o_tiles)
    buffers, barriers = buffers_and_barriers(tiles, CONFIG)
    of_parts = (partial_o_ptr, partial_softmax_ptr)
    pointers = (sinks_ptr, lse_ptr, softmax_ptr, o_low_ptr, flags_ptr, of_parts)
    pieces = whole + left * parts
    sizes = (whole, gl.maximum(left, 1), parts, query_tiles, keys, heads)
    call = (pieces, lengths_ptr, queries, rows, scale * LOG2_E, keeps)
    inputs = (q_tiles, k_tiles, v_tiles)
    read = (lengths_ptr, begun_ptr, sharing)
    REGISTERS: gl.constexpr = CONFIG.REGISTERS
    COPYING_REGISTERS: gl.constexpr = CONFIG.COPYING_REGISTERS
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 1, CONFIG)),
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 2, CONFIG)),
                (copy_tiles, (inputs, read, buffers, barriers, sizes, pieces, CONFIG)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 1, CONFIG)),
                (copy_tiles, (inputs, read, buffers, barriers, sizes, pieces, CONFIG)),
            ],
            [4, 1],
            [REGISTERS, COPYING_REGISTERS],
        )
