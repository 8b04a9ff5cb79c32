"""Gluon kernel of the backward pass of sliding-window attention, for Hopper.

    p_ij = 2^(factor q_i . k_j - lse_i)    ds_ij = p_ij (do_i . v_j - delta_i)
    dv_j = sum_i p_ij do_i    dk_j = scale sum_i ds_ij q_i    dq_i = scale sum_j ds_ij k_j

Queries and keys are rows of one sequence, and the sums go over j <= i < j + window. factor is scale
log2 e, lse_i the log-sum-exp of a row in base 2. All five products are computed once.

A piece of work is KEYS keys of one head and the tiles of queries that see some of them. The groups
of warps are those of the rectangular pass: two have 64 keys each, of which the second begins and
ends one tile of queries behind the first; one makes dq; of the fourth, one warp copies and one
adds tiles of dq to those in memory. Only the first tile of a group and those where the window ends
have a mask: the window is a tile of queries or more.

The order of sums is fixed: a block of TILES tiles of queries, as many rows as a piece has keys, has
a counter of the pieces that have added their dq. The one whose keys are the block's own rows comes
first, and then those before it, one after another. The last one, which no older piece follows, adds
nothing to memory: the group that makes dq takes the sum so far as the accumulator of its product,
and rounds. Programs take pieces from the last keys of a
head on: those that are at work at one time come to a block in that order, a block's time apart, so
that hardly one has to wait. A piece waits only for pieces that were taken before it, and all
programs are resident, which a cooperative launch sees to.

Shah et al., FlashAttention-3, arXiv 2407.08608; Beltagy, Peters and Cohan, arXiv 2004.05150.
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
from ..common.kernels_counters import pass_on, wait_for, wait_for_sums
from ..common.kernels_hopper_backward import (
    QUERIES,
    ROWS,
    add_tile,
    copy_queries,
    differentiate_tile,
    hand_over,
    load_tile,
    places_in,
    store_gradients,
)
from ..common.kernels_hopper_forward import LOG2_E

# Groups that have keys, keys of a piece, and tiles of queries of as many rows.
GROUPS = gl.constexpr(2)
KEYS = gl.constexpr(128)
TILES = gl.constexpr(2)


@gluon.jit
def work_of(piece, sizes):
    """A piece's head and tile of keys; how many tiles of queries see it, from its own rows on; and
    how many of them each group has: the first from the first one on, the second from the second.
    """
    query_tiles, key_tiles, window = sizes
    head = piece // key_tiles
    key_tile = key_tiles - 1 - piece % key_tiles
    # Of a group's keys: tiles whose first query is less than ``window`` behind the last key.
    of_group = (window + ROWS - 2) // QUERIES + 1
    behind = query_tiles - key_tile * TILES
    tiles = gl.minimum(of_group + 1, behind)
    return head, key_tile, tiles, gl.minimum(of_group, tiles), tiles - 1


@gluon.jit
def added_tiles(key_tile, tiles, window):
    """How many of a piece's tiles, the first ones, are added to dq in memory: an older piece sees
    them too. Of the others the piece has the last terms.
    """
    # Before a sequence's first keys there is no piece.
    return gl.minimum((window + ROWS - 2) // QUERIES, gl.minimum(key_tile, 1) * tiles)


@gluon.jit
def of_own_rows(s, rows):
    """s of keys up to the query's own. The first of a group's tiles alone has others."""
    first_key, first_query, _ = rows
    key, query = places_in(s)
    return gl.where(first_key + key <= first_query + query, s, -float("inf"))


@gluon.jit
def of_window(s, rows):
    """s of keys less than ``window`` rows behind the query. The last of a group's tiles, where the
    window ends, have others.

    Rows are numbered in the sequence: numbers in the tile would be the same for every piece of
    work, and take registers all the time.
    """
    first_key, first_query, window = rows
    key, query = places_in(s)
    return gl.where(first_query + query < first_key + window + key, s, -float("inf"))


@gluon.jit
def differentiate_tiles(
    operands,
    sums,
    rings,
    turns,
    numbers,
    begin,
    end,
    GROUP: gl.constexpr,
    SEEN: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """dk and dv of a group's keys with the terms of its tiles of queries ``begin`` to ``end``.

    Args:
        operands: k and v.
        sums: dk and dv so far.
        rings: of queries and of ds, each with its barriers.
        turns: the tiles that the ring of queries has had before the group's first one, and those of
            its ds.
        numbers: the factor of the scores, the group's first key, and the window.
    """
    streamed, of_queries, ds_shared, ds_full, ds_free = rings
    of_ring, of_ds = turns
    factor, first_key, window = numbers
    dk, dv = sums
    for step in range(begin, end):
        ds_stage = (of_ds + step) % CONFIG.DS_STAGES
        ds_phase = (((of_ds + step) // CONFIG.DS_STAGES) & 1) ^ 1
        place = ds_stage * GROUPS + GROUP
        dk, dv = differentiate_tile(
            operands,
            (dk, dv),
            streamed,
            of_queries,
            of_ring + step,
            ds_shared.index(place),
            (ds_full.index(place), ds_free.index(place), ds_phase),
            factor,
            (first_key, first_key + step * QUERIES, window),
            SEEN,
            CONFIG,
        )
    return dk, dv


@gluon.jit
def copy_tiles(inputs, buffers, barriers, sizes, pieces, heads, CONFIG: gl.constexpr):
    """What the copying warp does: keys and values of each piece, then its queries, do and
    statistics.
    """
    k_tiles, v_tiles, of_queries = inputs
    k_shared, v_shared, streamed = buffers
    kv_full, kv_free, to_queries = barriers
    copied = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        head, key_tile, tiles, _, _ = work_of(piece, sizes)
        batch, of_head = head // heads, head % heads
        mbarrier.wait(kv_free, (piece // gl.num_programs(0) & 1) ^ 1)
        mbarrier.expect(kv_full, 2 * KEYS * CONFIG.D * 2)
        at = [batch, key_tile * KEYS, of_head, 0]
        tma.async_copy_global_to_shared(k_tiles, at, kv_full, k_shared)
        tma.async_copy_global_to_shared(v_tiles, at, kv_full, v_shared)
        for step in range(tiles):
            row = key_tile * KEYS + step * QUERIES
            at = [batch, row, of_head, 0]
            copy_queries(of_queries, streamed, to_queries, at, [head, row], copied, CONFIG)
            copied += 1


@gluon.jit
def differentiate(
    outputs,
    buffers,
    barriers,
    sizes,
    pieces,
    heads,
    scale,
    GROUP: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """What each of the two groups with keys does: dk and dv of its ROWS keys of every piece."""
    k_shared, v_shared, out_shared, streamed, ds_shared = buffers
    kv_full, kv_free, of_queries, ds_full, ds_free = barriers
    D: gl.constexpr = CONFIG.D
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    OF_GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_KEYS: gl.constexpr = gl.DotOperandLayout(0, OF_SCORES, 2)
    factor = scale * LOG2_E
    window = sizes[2]
    used = 0
    of_ds = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        head, key_tile, tiles, of_first, of_second = work_of(piece, sizes)
        steps = of_second if GROUP else of_first
        mbarrier.wait(kv_full, piece // gl.num_programs(0) & 1)
        # Both stay in registers, as left operands of their products.
        k = k_shared.reshape([KEYS, D]).slice(GROUP * ROWS, ROWS, dim=0).load(OF_KEYS)
        v = v_shared.reshape([KEYS, D]).slice(GROUP * ROWS, ROWS, dim=0).load(OF_KEYS)
        mbarrier.arrive(kv_free, count=1)
        dk = gl.zeros([ROWS, D], gl.float32, OF_GRADIENT)
        dv = gl.zeros([ROWS, D], gl.float32, OF_GRADIENT)
        # From this tile on, some queries do not see all keys.
        inner = gl.minimum(window // QUERIES, steps)
        rings = streamed, of_queries, ds_shared, ds_full, ds_free
        turns = used + GROUP, of_ds
        first_key = key_tile * KEYS + GROUP * ROWS
        numbers = factor, first_key, window
        own = gl.minimum(steps, 1)
        dk, dv = differentiate_tiles(
            (k, v), (dk, dv), rings, turns, numbers, 0, own, GROUP, of_own_rows, CONFIG
        )
        dk, dv = differentiate_tiles(
            (k, v), (dk, dv), rings, turns, numbers, 1, inner, GROUP, None, CONFIG
        )
        dk, dv = differentiate_tiles(
            (k, v), (dk, dv), rings, turns, numbers, inner, steps, GROUP, of_window, CONFIG
        )
        used += tiles
        of_ds += steps
        at = [head // heads, first_key, head % heads, 0]
        store_gradients(outputs, out_shared, dk * scale, dv, at, GROUP, CONFIG)
    tma.store_wait(0)


@gluon.jit
def multiply_tile(
    keys,
    dq,
    ds_shared,
    barriers,
    turns,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    SO_FAR: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """A tile of dq, transposed, [D, QUERIES], from the ds of the first group, the second, or both.

    Args:
        keys: of both groups.
        dq: the terms of other pieces, where ``SO_FAR``.
        ds_shared: the ring of ds.
        barriers: of the ring of queries, a place is free; and of that of ds.
        turns: how many tiles each group and the ring of queries have had before.
    """
    first_k, second_k = keys
    q_free, ds_full, ds_free = barriers
    of_first, of_second, used = turns
    first = of_first % CONFIG.DS_STAGES * GROUPS
    second = of_second % CONFIG.DS_STAGES * GROUPS + 1
    if FIRST:
        mbarrier.wait(ds_full.index(first), (of_first // CONFIG.DS_STAGES) & 1)
        ds = ds_shared.index(first)
        dq = warpgroup_mma(first_k, ds, dq, use_acc=SO_FAR, is_async=True)
    if SECOND:
        mbarrier.wait(ds_full.index(second), (of_second // CONFIG.DS_STAGES) & 1)
        ds = ds_shared.index(second)
        dq = warpgroup_mma(second_k, ds, dq, use_acc=FIRST or SO_FAR, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    if FIRST:
        mbarrier.arrive(ds_free.index(first), count=1)
    if SECOND:
        mbarrier.arrive(ds_free.index(second), count=1)
    if not (FIRST and SECOND):
        # In the place of the group that leaves this tile to the other.
        mbarrier.arrive(q_free.index(used % CONFIG.STAGES), count=1)
    return dq


@gluon.jit
def sum_so_far(sums, sizes, head, key_tile, step, OF_DQ: gl.constexpr, CONFIG: gl.constexpr):
    """The terms of dq that other pieces have for a tile of which this one has the last."""
    sums_ptr, counters_ptr = sums
    D: gl.constexpr = CONFIG.D
    query_tiles = sizes[0]
    blocks = (query_tiles + TILES - 1) // TILES
    number = step // TILES
    dq = gl.zeros([D, QUERIES], gl.float32, OF_DQ)
    if number > 0:
        counter = (head * blocks + key_tile + number).to(gl.int64) * 4
        # This piece may have added the block's other tile.
        wait_for_sums(counters_ptr.to(gl.int64, bitcast=True) + counter, number)
        tile = (head * query_tiles + key_tile * TILES + step).to(gl.int64)
        dq = load_tile(sums_ptr, tile * (QUERIES * D), OF_DQ)
    return dq


@gluon.jit
def store_dq(dq_tiles, dq_rounded, dq, at, CONFIG: gl.constexpr):
    """A tile of dq, transposed, to ``at``, rounded, by way of its place in shared memory."""
    D: gl.constexpr = CONFIG.D
    # Where the last tile went from.
    tma.store_wait(0)
    dq_rounded.reshape([QUERIES, D]).permute([1, 0]).store(dq.to(dq_rounded.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_tiles, at, dq_rounded)


@gluon.jit
def multiply_keys(
    dq_tiles, sums, buffers, barriers, sizes, pieces, heads, scale, CONFIG: gl.constexpr
):
    """What the third group does: tiles of dq, on to the warp that adds them, or rounded where the
    piece has their last terms. The keys of both others stay in its registers.
    """
    k_shared, ds_shared, dq_shared, dq_rounded = buffers
    kv_full, kv_free, q_free, ds_full, ds_free, dq_full, dq_free = barriers
    D: gl.constexpr = CONFIG.D
    OF_DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    OF_KEYS: gl.constexpr = gl.DotOperandLayout(0, OF_DQ, 2)
    to_tile = q_free, ds_full, ds_free
    none = gl.zeros([D, QUERIES], gl.float32, OF_DQ)
    used = 0
    handed = 0
    of_first = 0
    of_second = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        head, key_tile, tiles, first_tiles, second_tiles = work_of(piece, sizes)
        added = added_tiles(key_tile, tiles, sizes[2])
        mbarrier.wait(kv_full, piece // gl.num_programs(0) & 1)
        keys = k_shared.reshape([KEYS, D])
        first_k = keys.slice(0, ROWS, dim=0).permute([1, 0]).load(OF_KEYS)
        second_k = keys.slice(ROWS, ROWS, dim=0).permute([1, 0]).load(OF_KEYS)
        both = first_k, second_k
        mbarrier.arrive(kv_free, count=1)
        batch, of_head, row = head // heads, head % heads, key_tile * KEYS
        turns = of_first, of_second, used
        dq = multiply_tile(both, none, ds_shared, to_tile, turns, True, False, False, CONFIG)
        if added > 0:
            hand_over(dq, dq_shared, dq_full, dq_free, handed, CONFIG)
        else:
            store_dq(dq_tiles, dq_rounded, dq * scale, [batch, row, of_head, 0], CONFIG)
        for step in range(1, gl.minimum(added, first_tiles)):
            turns = of_first + step, of_second + step - 1, used + step
            dq = multiply_tile(both, none, ds_shared, to_tile, turns, True, True, False, CONFIG)
            hand_over(dq, dq_shared, dq_full, dq_free, handed + step, CONFIG)
        for step in range(gl.maximum(added, 1), first_tiles):
            turns = of_first + step, of_second + step - 1, used + step
            dq = sum_so_far(sums, sizes, head, key_tile, step, OF_DQ, CONFIG)
            dq = multiply_tile(both, dq, ds_shared, to_tile, turns, True, True, True, CONFIG)
            at = [batch, row + step * QUERIES, of_head, 0]
            store_dq(dq_tiles, dq_rounded, dq * scale, at, CONFIG)
        if first_tiles < tiles:
            # No older piece sees a tile that the first group does not.
            turns = of_first, of_second + second_tiles - 1, used + first_tiles
            dq = sum_so_far(sums, sizes, head, key_tile, first_tiles, OF_DQ, CONFIG)
            dq = multiply_tile(both, dq, ds_shared, to_tile, turns, False, True, True, CONFIG)
            at = [batch, row + first_tiles * QUERIES, of_head, 0]
            store_dq(dq_tiles, dq_rounded, dq * scale, at, CONFIG)
        used += tiles
        handed += added
        of_first += first_tiles
        of_second += second_tiles
    tma.store_wait(0)


@gluon.jit
def add_tiles(sums_tiles, counters_ptr, dq_shared, barriers, sizes, pieces, CONFIG: gl.constexpr):
    """What the adding warp does: tiles of dq to those in memory, a block's in a fixed order."""
    dq_full, dq_free = barriers
    query_tiles = sizes[0]
    blocks = (query_tiles + TILES - 1) // TILES
    counters = counters_ptr.to(gl.int64, bitcast=True)
    used = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        head, key_tile, tiles, _, _ = work_of(piece, sizes)
        added = added_tiles(key_tile, tiles, sizes[2])
        counter = counters
        number = 0
        for step in range(added):
            place = used % CONFIG.PLACES
            mbarrier.wait(dq_full.index(place), (used // CONFIG.PLACES) & 1)
            at = [(head * query_tiles + key_tile * TILES + step) * QUERIES, 0]
            if step % TILES == 0:
                if step > 0:
                    pass_on(counter)
                # Pieces between this one and the block's own.
                number = step // TILES
                counter = counters + (head * blocks + key_tile + number).to(gl.int64) * 4
                wait_for(counter, number)
            add_tile(sums_tiles, at, dq_shared, dq_free, used, number, CONFIG)
            used += 1
        if added > 0:
            pass_on(counter)
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("pieces", "heads", "query_tiles", "key_tiles", "window"))
def window_hopper_backward_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    do_tiles,
    dk_tiles,
    dv_tiles,
    dq_tiles,
    lse_tiles,
    delta_tiles,
    sums_tiles,
    sums_ptr,
    counters_ptr,
    scale,
    pieces,
    heads,
    query_tiles,
    key_tiles,
    window,
    CONFIG: gl.constexpr,
):
    """A program takes every so many-th piece of work; tiles are tensor descriptors: of the first
    seven over [B, rows, H, D], of statistics over [B H, queries], of sums of dq over its tiles.
    """
    D: gl.constexpr = CONFIG.D
    STAGES: gl.constexpr = CONFIG.STAGES
    DS_PLACES: gl.constexpr = CONFIG.DS_STAGES * GROUPS
    PLACES: gl.constexpr = CONFIG.PLACES
    DTYPE: gl.constexpr = q_tiles.dtype
    OF_DS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, QUERIES, 1, D], q_tiles.layout)
    do_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, QUERIES, 1, D], do_tiles.layout)
    k_shared = gl.allocate_shared_memory(DTYPE, [1, KEYS, 1, D], k_tiles.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, [1, KEYS, 1, D], v_tiles.layout)
    lse_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], lse_tiles.layout)
    delta_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], delta_tiles.layout)
    ds_shared = gl.allocate_shared_memory(DTYPE, [DS_PLACES, ROWS, QUERIES], OF_DS)
    dq_shared = gl.allocate_shared_memory(gl.float32, [PLACES, QUERIES, D], sums_tiles.layout)
    dq_rounded = gl.allocate_shared_memory(DTYPE, [1, QUERIES, 1, D], dq_tiles.layout)
    out_shared = gl.allocate_shared_memory(DTYPE, [2 * GROUPS, 1, ROWS, 1, D], dk_tiles.layout)
    kv_full, kv_free = barriers_of(1, 1).index(0), barriers_of(1, GROUPS + 1).index(0)
    q_full, do_full = barriers_of(STAGES, 1), barriers_of(STAGES, 1)
    q_free = barriers_of(STAGES, GROUPS)
    ds_full, ds_free = barriers_of(DS_PLACES, 1), barriers_of(DS_PLACES, 1)
    dq_full, dq_free = barriers_of(PLACES, 1), barriers_of(PLACES, 1)
    fence_async_shared()
    sizes = (query_tiles, key_tiles, window)
    outputs = (dk_tiles, dv_tiles)
    streamed = (q_shared, do_shared, lse_shared, delta_shared)
    of_group = (k_shared, v_shared, out_shared, streamed, ds_shared)
    of_queries = (q_full, do_full, q_free)
    to_group = (kv_full, kv_free, of_queries, ds_full, ds_free)
    sums = (sums_ptr, counters_ptr)
    of_dq = (k_shared, ds_shared, dq_shared, dq_rounded)
    to_dq = (kv_full, kv_free, q_free, ds_full, ds_free, dq_full, dq_free)
    inputs = (k_tiles, v_tiles, (q_tiles, do_tiles, lse_tiles, delta_tiles))
    copied = (k_shared, v_shared, streamed)
    to_copy = (kv_full, kv_free, of_queries)
    to_add = (dq_full, dq_free)
    gl.warp_specialize(
        [
            (differentiate, (outputs, of_group, to_group, sizes, pieces, heads, scale, 0, CONFIG)),
            (differentiate, (outputs, of_group, to_group, sizes, pieces, heads, scale, 1, CONFIG)),
            (multiply_keys, (dq_tiles, sums, of_dq, to_dq, sizes, pieces, heads, scale, CONFIG)),
            (copy_tiles, (inputs, copied, to_copy, sizes, pieces, heads, CONFIG)),
            (add_tiles, (sums_tiles, counters_ptr, dq_shared, to_add, sizes, pieces, CONFIG)),
        ],
        [4, 4, 1, 1],
        [CONFIG.REGISTERS, CONFIG.DQ_REGISTERS, CONFIG.COPYING_REGISTERS, CONFIG.COPYING_REGISTERS],
    )
