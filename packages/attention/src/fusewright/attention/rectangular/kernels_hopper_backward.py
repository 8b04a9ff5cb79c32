"""Gluon kernel of the backward pass over many keys, for Hopper.

    p_ij = 2^(factor q_i . k_j - lse_i)    ds_ij = p_ij (do_i . v_j - delta_i)
    dv_j = sum_i p_ij do_i    dk_j = scale sum_i ds_ij q_i    dq_i = scale sum_j ds_ij k_j

factor is scale log2 e, lse_i the log-sum-exp of a row in base 2. All five products are computed
once: a program keeps KEYS keys and values while the queries of their head pass, sums dk and dv in
registers, and adds each tile of dq to memory.

A program is four groups of four warps. Two have 64 keys each and compute p, ds, dk and dv of every
tile of queries. One multiplies the ds of both by the keys and stores the tile of dq in shared
memory. Of the fourth, one warp copies tiles of queries and of do into a ring of STAGES, and another
adds tiles of dq to those in memory, by the bulk copy engine, in fp32.

Sums of dk and dv of 128 columns leave no registers for that. There, without IN_REGISTERS, keys and
values stay in shared memory, and the two groups with keys make dq, too, each COLUMNS columns of a
tile, once the tile behind it is done: neither waits for the ds of the other.

Programs stay and take piece after piece of work: KEYS keys of one head against all its queries. The
pieces that fill all programs are whole; the few that are left are cut by their queries, and
``add_parts_kernel`` adds their parts of dk and dv.

The order of sums is fixed: a block of TILES tiles of queries has a counter of the pieces that have
added their dq, and a piece waits for its number before it adds. Programs of one head begin at most
GAP blocks apart, so that hardly one has to wait: when a program comes to a block, the one before it
has left. Where queries are few, a head's keys are several ranges with sums of dq of their own. The
number of a piece grows with the time at which it comes to a block, so programs that are all
resident, which a cooperative launch sees to, cannot wait for one another in a circle.

With RAGGED, a task has its own number of keys: pieces behind them have no queries, and are counted
nowhere. What memory holds behind a task's last key is kept out of products.

Shah et al., FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from .._core.kernels_barriers import barriers_of
from .._core.kernels_gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..common.kernels_counters import pass_on, wait_for
from ..common.kernels_hopper_backward import (
    COLUMNS,
    QUERIES,
    ROWS,
    add_tile,
    copy_queries,
    differentiate_tile,
    hand_over,
    places_in,
    store_gradient,
    store_gradients,
)
from ..common.kernels_hopper_forward import LOG2_E
from .kernels_hopper_order import KEYS, pieces_before, tile_at, work_of

# Groups that have keys, and keys of a program.
GROUPS = gl.constexpr(2)


@gluon.jit
def copy_tiles(inputs, call, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the copying warp does: keys and values of each piece, then its queries, do and
    statistics. Tiles of the queries of ``sharing`` heads, which share keys, follow one another.
    """
    lengths_ptr, sharing = call
    k_tiles, v_tiles, of_queries = inputs
    k_shared, v_shared, streamed = buffers
    kv_full, kv_free, to_queries = barriers
    heads = sizes[6]
    copied = 0
    for piece in range(gl.program_id(0), sizes[2], gl.num_programs(0)):
        work = work_of(piece, sizes, lengths_ptr, CONFIG)
        head, _stripe, first_key, _limit = work[0]
        first, tiles, begin = work[1]
        batch = head // heads
        of_head = head % heads
        mbarrier.wait(kv_free, (piece // gl.num_programs(0) & 1) ^ 1)
        mbarrier.expect(kv_full, 2 * KEYS * CONFIG.D * 2)
        if CONFIG.IN_REGISTERS:
            at = [batch, first_key, of_head, 0]
            tma.async_copy_global_to_shared(k_tiles, at, kv_full, k_shared)
            tma.async_copy_global_to_shared(v_tiles, at, kv_full, v_shared)
        else:
            for group in gl.static_range(GROUPS):
                at = [batch, first_key + group * ROWS, of_head, 0]
                tma.async_copy_global_to_shared(k_tiles, at, kv_full, k_shared.index(group))
                tma.async_copy_global_to_shared(v_tiles, at, kv_full, v_shared.index(group))
        for step in range(tiles):
            tile = first + tile_at(step, tiles, begin)
            at = [batch, tile * QUERIES, of_head, 0]
            if CONFIG.GROUPED:
                of_member = sizes[4] // sharing
                member = of_head * sharing + tile // of_member
                at = [batch, tile % of_member * QUERIES, member, 0]
            at_row = [head, tile * QUERIES]
            copy_queries(of_queries, streamed, to_queries, at, at_row, copied, CONFIG)
            copied += 1


@gluon.jit
def of_keys(s, limit):
    """s of rows before ``limit``, which are keys."""
    key, query = places_in(s)
    return gl.where((key < limit) & (query >= 0), s, -float("inf"))


@gluon.jit
def differentiate_piece(
    operands,
    of_dq,
    buffers,
    barriers,
    steps,
    factor,
    GROUP: gl.constexpr,
    SEEN: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """dk, not scaled, and dv of a group's keys, [ROWS, D], over the queries of a piece; and their
    ds, for dq, or, with keys in shared memory, the group's columns of dq. ``SEEN``: None, or
    ``of_keys`` where rows from ``limit`` on are no keys.
    """
    used, tiles, limit = steps
    streamed, ds_shared = buffers
    of_queries, ds_full, ds_free = barriers
    D: gl.constexpr = CONFIG.D
    OF_GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([ROWS, D], gl.float32, OF_GRADIENT)
    dv = gl.zeros([ROWS, D], gl.float32, OF_GRADIENT)
    of_ds = ds_shared, ds_full, ds_free
    for step in range(tiles):
        slot = used + step
        ds_stage = slot % CONFIG.DS_STAGES
        ds_place = ds_shared.index(ds_stage).slice(GROUP * ROWS, ROWS, dim=0)
        ds_phase = ((slot // CONFIG.DS_STAGES) & 1) ^ 1
        ds_ring = ds_full.index(ds_stage), ds_free.index(ds_stage), ds_phase
        dk, dv = differentiate_tile(
            operands,
            (dk, dv),
            streamed,
            of_queries,
            slot,
            ds_place,
            ds_ring,
            factor,
            limit,
            SEEN,
            CONFIG,
        )
        # Of the tile before: the other group need not be as far.
        if not CONFIG.IN_REGISTERS and step > 0:
            multiply_tile(of_dq, of_ds, slot - 1, GROUP, CONFIG)
    if not CONFIG.IN_REGISTERS and tiles > 0:
        multiply_tile(of_dq, of_ds, used + tiles - 1, GROUP, CONFIG)
    return dk, dv


@gluon.jit
def multiply_tile(of_dq, of_ds, slot, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """A group's COLUMNS columns of a tile of dq, transposed, [COLUMNS, QUERIES], from the keys and
    the ds of both groups, in shared memory.
    """
    k_shared, dq_shared, dq_full, dq_free = of_dq
    ds_shared, ds_full, ds_free = of_ds
    OF_DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    stage = slot % CONFIG.DS_STAGES
    mbarrier.wait(ds_full.index(stage), (slot // CONFIG.DS_STAGES) & 1)
    dq = gl.zeros([COLUMNS, QUERIES], gl.float32, OF_DQ)
    for group in gl.static_range(GROUPS):
        ds = ds_shared.index(stage).slice(group * ROWS, ROWS, dim=0)
        k = k_shared.index(group).reshape([ROWS, CONFIG.D]).slice(GROUP * COLUMNS, COLUMNS, dim=1)
        dq = warpgroup_mma(k.permute([1, 0]), ds, dq, use_acc=group > 0, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(ds_free.index(stage), count=1)
    hand_over(dq, dq_shared, dq_full, dq_free, slot * GROUPS + GROUP, CONFIG)


@gluon.jit
def keys_before(limit, x, AXIS: gl.constexpr):
    """A left operand with zeros from ``limit`` on along the axis of keys: memory may hold anything
    there.
    """
    key = gl.arange(0, x.shape[AXIS], gl.SliceLayout(1 - AXIS, x.type.layout))
    is_key = gl.expand_dims(key < limit, 1 - AXIS)
    nothing = gl.zeros_like(x)
    return gl.where(is_key & (nothing == 0.0), x, nothing)


@gluon.jit
def differentiate(call, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """What each of the two groups with keys does: dk and dv of its ROWS keys of every piece."""
    outputs, lengths_ptr, buffers, barriers, sizes, scale = call
    dk_tiles, dv_tiles, partial_ptr = outputs
    k_shared, v_shared, leaving, streamed = buffers
    kv_full, kv_free, of_queries = barriers
    D: gl.constexpr = CONFIG.D
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    OF_GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_KEYS: gl.constexpr = gl.DotOperandLayout(0, OF_SCORES, 2)
    whole, pieces, heads = sizes[0], sizes[2], sizes[6]
    factor = scale * LOG2_E
    used = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        work = work_of(piece, sizes, lengths_ptr, CONFIG)
        head, _stripe, first_key, limit = work[0]
        tiles = work[1][1]
        mbarrier.wait(kv_full, piece // gl.num_programs(0) & 1)
        if CONFIG.IN_REGISTERS:
            k = k_shared.reshape([KEYS, D]).slice(GROUP * ROWS, ROWS, dim=0).load(OF_KEYS)
            v = v_shared.reshape([KEYS, D]).slice(GROUP * ROWS, ROWS, dim=0).load(OF_KEYS)
            mbarrier.arrive(kv_free, count=1)
            of_dq = None
        else:
            dq_shared, dq_full, dq_free = leaving
            of_dq = k_shared, dq_shared, dq_full, dq_free
            k = k_shared.index(GROUP).reshape([ROWS, D])
            v = v_shared.index(GROUP).reshape([ROWS, D])
        first = first_key + GROUP * ROWS
        steps = (used, tiles, limit - GROUP * ROWS)
        if limit < (GROUP + 1) * ROWS:
            if CONFIG.RAGGED:
                if CONFIG.IN_REGISTERS:
                    k = keys_before(limit - GROUP * ROWS, k, 0)
                    v = keys_before(limit - GROUP * ROWS, v, 0)
                else:
                    k.store(keys_before(limit - GROUP * ROWS, k.load(OF_KEYS), 0))
                    v.store(keys_before(limit - GROUP * ROWS, v.load(OF_KEYS), 0))
                    fence_async_shared()
            dk, dv = differentiate_piece(
                (k, v), of_dq, streamed, of_queries, steps, factor, GROUP, of_keys, CONFIG
            )
        else:
            dk, dv = differentiate_piece(
                (k, v), of_dq, streamed, of_queries, steps, factor, GROUP, None, CONFIG
            )
        used += tiles
        dk = dk * scale
        if piece >= whole:
            row = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_GRADIENT))
            column = gl.arange(0, D, gl.SliceLayout(0, OF_GRADIENT))
            at = gl.expand_dims(row, 1) * D + gl.expand_dims(column, 0)
            part = partial_ptr + (piece - whole) * (2 * KEYS * D)
            gl.store(part + at, dk)
            gl.store(part + KEYS * D + at, dv)
        else:
            corner = [head // heads, first, head % heads, 0]
            if CONFIG.IN_REGISTERS:
                store_gradients((dk_tiles, dv_tiles), leaving, dk, dv, corner, GROUP, CONFIG)
            else:
                # In the place of its values, which no other group reads.
                store_gradient(dv_tiles, v_shared.index(GROUP), dv, corner, CONFIG)
                store_gradient(dk_tiles, v_shared.index(GROUP), dk, corner, CONFIG)
        if not CONFIG.IN_REGISTERS:
            mbarrier.arrive(kv_free, count=1)
    tma.store_wait(0)


@gluon.jit
def multiply_keys(lengths_ptr, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the third group does: tiles of dq, transposed, [D, QUERIES], from the ds of both groups
    with keys, and from k, which stays in registers.
    """
    k_shared, ds_shared, dq_shared = buffers
    kv_full, kv_free, ds_full, ds_free, dq_full, dq_free = barriers
    D: gl.constexpr = CONFIG.D
    DS_STAGES: gl.constexpr = CONFIG.DS_STAGES
    OF_DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    OF_KEYS: gl.constexpr = gl.DotOperandLayout(0, OF_DQ, 2)
    none = gl.zeros([D, QUERIES], gl.float32, OF_DQ)
    used = 0
    for piece in range(gl.program_id(0), sizes[2], gl.num_programs(0)):
        work = work_of(piece, sizes, lengths_ptr, CONFIG)
        tiles = work[1][1]
        mbarrier.wait(kv_full, piece // gl.num_programs(0) & 1)
        k = k_shared.reshape([KEYS, D]).permute([1, 0]).load(OF_KEYS)
        if CONFIG.RAGGED:
            k = keys_before(work[0][3], k, 1)
        mbarrier.arrive(kv_free, count=1)
        for _step in range(tiles):
            ds_stage = used % DS_STAGES
            mbarrier.wait(ds_full.index(ds_stage), (used // DS_STAGES) & 1)
            ds = ds_shared.index(ds_stage)
            dq = warpgroup_mma(k, ds, none, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(ds_free.index(ds_stage), count=1)
            hand_over(dq, dq_shared, dq_full, dq_free, used, CONFIG)
            used += 1


@gluon.jit
def add_tiles(dq_tiles, pointers, dq_shared, barriers, sizes, CONFIG: gl.constexpr):
    """What the adding warp does: tiles of dq to those in memory, a block's in a fixed order."""
    dq_full, dq_free = barriers
    lengths_ptr, counters_ptr = pointers
    query_tiles = sizes[4]
    blocks = (query_tiles + CONFIG.TILES - 1) // CONFIG.TILES
    counters = counters_ptr.to(gl.int64, bitcast=True)
    used = 0
    for piece in range(gl.program_id(0), sizes[2], gl.num_programs(0)):
        work = work_of(piece, sizes, lengths_ptr, CONFIG)
        stripe = work[0][1]
        first, tiles, begin = work[1]
        counter = counters
        number = 0
        for step in range(tiles):
            tile = tile_at(step, tiles, begin)
            for part in gl.static_range(CONFIG.D // COLUMNS):
                place = used % CONFIG.PLACES
                mbarrier.wait(dq_full.index(place), (used // CONFIG.PLACES) & 1)
                of_tile = (stripe * query_tiles + first + tile) * (CONFIG.D // COLUMNS) + part
                at = [of_tile * QUERIES, 0]
                if part == 0 and tile % CONFIG.TILES == 0:
                    if step > 0:
                        pass_on(counter)
                    block = first // CONFIG.TILES + tile // CONFIG.TILES
                    counter = counters + (stripe * blocks + block).to(gl.int64) * 4
                    number = pieces_before(tile // CONFIG.TILES, work[2])
                    wait_for(counter, number)
                add_tile(dq_tiles, at, dq_shared, dq_free, used, number, CONFIG)
                used += 1
        if tiles > 0:
            pass_on(counter)
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(
    do_not_specialize=(
        *("keys", "heads", "whole", "parts", "pieces"),
        *("query_tiles", "key_tiles", "ranges", "sharing"),
    )
)
def hopper_backward_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    do_tiles,
    dk_tiles,
    dv_tiles,
    lse_tiles,
    delta_tiles,
    dq_tiles,
    lengths_ptr,
    counters_ptr,
    partial_ptr,
    scale,
    keys,
    heads,
    whole,
    parts,
    pieces,
    query_tiles,
    key_tiles,
    ranges,
    sharing,
    CONFIG: gl.constexpr,
):
    """A program takes every so many-th piece of work; tiles are tensor descriptors: of the first
    six over [B, rows, heads, D], of statistics over [B heads, queries], of dq over its tiles.
    ``heads`` are those of keys, and ``query_tiles`` all of the heads that share one.
    """
    D: gl.constexpr = CONFIG.D
    STAGES: gl.constexpr = CONFIG.STAGES
    DS_STAGES: gl.constexpr = CONFIG.DS_STAGES
    PLACES: gl.constexpr = CONFIG.PLACES
    DTYPE: gl.constexpr = q_tiles.dtype
    OF_DS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, QUERIES, 1, D], q_tiles.layout)
    do_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, QUERIES, 1, D], do_tiles.layout)
    # In one tile, or in one for each group.
    TOGETHER: gl.constexpr = [1, KEYS, 1, D]
    SEPARATE: gl.constexpr = [GROUPS, 1, ROWS, 1, D]
    OF_KEYS: gl.constexpr = TOGETHER if CONFIG.IN_REGISTERS else SEPARATE
    k_shared = gl.allocate_shared_memory(DTYPE, OF_KEYS, k_tiles.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, OF_KEYS, v_tiles.layout)
    lse_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], lse_tiles.layout)
    delta_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], delta_tiles.layout)
    ds_shared = gl.allocate_shared_memory(DTYPE, [DS_STAGES, KEYS, QUERIES], OF_DS)
    dq_shared = gl.allocate_shared_memory(gl.float32, [PLACES, QUERIES, COLUMNS], dq_tiles.layout)
    if CONFIG.IN_REGISTERS:
        OUT_SHAPE: gl.constexpr = [2 * GROUPS, 1, ROWS, 1, D]
        leaving = gl.allocate_shared_memory(DTYPE, OUT_SHAPE, dk_tiles.layout)
    # With keys in shared memory the groups read what elsewhere the third group does.
    READERS: gl.constexpr = GROUPS + 1 if CONFIG.IN_REGISTERS else GROUPS
    OF_DS_READERS: gl.constexpr = 1 if CONFIG.IN_REGISTERS else GROUPS
    kv_full, kv_free = barriers_of(1, 1).index(0), barriers_of(1, READERS).index(0)
    q_full, do_full = barriers_of(STAGES, 1), barriers_of(STAGES, 1)
    q_free = barriers_of(STAGES, GROUPS)
    ds_full, ds_free = barriers_of(DS_STAGES, GROUPS), barriers_of(DS_STAGES, OF_DS_READERS)
    dq_full, dq_free = barriers_of(PLACES, 1), barriers_of(PLACES, 1)
    fence_async_shared()
    if not CONFIG.IN_REGISTERS:
        leaving = (dq_shared, dq_full, dq_free)
    sizes = (whole, parts, pieces, key_tiles, query_tiles, keys, heads, ranges)
    outputs = (dk_tiles, dv_tiles, partial_ptr)
    streamed = ((q_shared, do_shared, lse_shared, delta_shared), ds_shared)
    of_queries = ((q_full, do_full, q_free), ds_full, ds_free)
    of_group = (k_shared, v_shared, leaving, streamed)
    to_group = (kv_full, kv_free, of_queries)
    of_dq = (k_shared, ds_shared, dq_shared)
    to_dq = (kv_full, kv_free, ds_full, ds_free, dq_full, dq_free)
    inputs = (k_tiles, v_tiles, (q_tiles, do_tiles, lse_tiles, delta_tiles))
    pointers = (lengths_ptr, counters_ptr)
    copied = (k_shared, v_shared, streamed[0])
    to_copy = (kv_full, kv_free, of_queries[0])
    to_add = (dq_full, dq_free)
    call = (outputs, lengths_ptr, of_group, to_group, sizes, scale)
    REGISTERS: gl.constexpr = CONFIG.REGISTERS
    DQ_REGISTERS: gl.constexpr = CONFIG.DQ_REGISTERS
    FEW_REGISTERS: gl.constexpr = CONFIG.COPYING_REGISTERS
    if CONFIG.IN_REGISTERS:
        gl.warp_specialize(
            [
                (differentiate, (call, 0, CONFIG)),
                (differentiate, (call, 1, CONFIG)),
                (multiply_keys, (lengths_ptr, of_dq, to_dq, sizes, CONFIG)),
                (copy_tiles, (inputs, (lengths_ptr, sharing), copied, to_copy, sizes, CONFIG)),
                (add_tiles, (dq_tiles, pointers, dq_shared, to_add, sizes, CONFIG)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, DQ_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (differentiate, (call, 0, CONFIG)),
                (differentiate, (call, 1, CONFIG)),
                (copy_tiles, (inputs, (lengths_ptr, sharing), copied, to_copy, sizes, CONFIG)),
                (add_tiles, (dq_tiles, pointers, dq_shared, to_add, sizes, CONFIG)),
            ],
            [4, 1, 1],
            [REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
        )
