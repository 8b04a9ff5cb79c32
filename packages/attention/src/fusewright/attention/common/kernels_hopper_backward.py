"""Device functions of the backward passes of warp groups, for Hopper, in Gluon.

    p_ij = 2^(factor q_i . k_j - lse_i)    ds_ij = p_ij (do_i . v_j - delta_i)
    dv_j += sum_i p_ij do_i    dk_j += sum_i ds_ij q_i    dq_i += sum_j ds_ij k_j

A group of four warps has ROWS keys and values, as left operands in registers or in shared memory,
while tiles of QUERIES queries pass in shared memory. Scores are transposed, [keys, queries], so
that p and ds stay in registers for the products that make dv and dk.
"""

from __future__ import annotations

from .._core.kernels_gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_add,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Queries of a tile, keys of a group of warps, and columns of a tile of dq.
QUERIES = gl.constexpr(64)
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(64)


@gluon.jit
def places_in(tile):
    """The rows [ROWS, 1] and columns [1, QUERIES] of a tile of scores, its keys and its queries."""
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, tile.type.layout))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    return gl.expand_dims(row, 1), gl.expand_dims(column, 0)


@gluon.jit
def copy_queries(tiles, shared, barriers, at, at_row, copied, CONFIG: gl.constexpr):
    """A tile of queries, of do and of their statistics into a place of their ring that is free.
    ``copied``: tiles that the ring has had before.
    """
    q_tiles, do_tiles, lse_tiles, delta_tiles = tiles
    q_shared, do_shared, lse_shared, delta_shared = shared
    q_full, do_full, q_free = barriers
    stage = copied % CONFIG.STAGES
    mbarrier.wait(q_free.index(stage), ((copied // CONFIG.STAGES) & 1) ^ 1)
    full = q_full.index(stage)
    mbarrier.expect(full, QUERIES * (CONFIG.D * 2 + 4))
    tma.async_copy_global_to_shared(q_tiles, at, full, q_shared.index(stage))
    tma.async_copy_global_to_shared(lse_tiles, at_row, full, lse_shared.index(stage))
    full = do_full.index(stage)
    mbarrier.expect(full, QUERIES * (CONFIG.D * 2 + 4))
    tma.async_copy_global_to_shared(do_tiles, at, full, do_shared.index(stage))
    tma.async_copy_global_to_shared(delta_tiles, at_row, full, delta_shared.index(stage))


@gluon.jit
def load_statistics(shared, OF_COLUMNS: gl.constexpr):
    """QUERIES numbers, one for each column of a tile of scores. ``prepare_kernel`` wrote them so
    that the 16 that a lane needs are next to one another.
    """
    BY_LANE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4], [8]],
        lane_bases=[[16], [32], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[64],
    )
    x = shared.reshape([QUERIES]).load(BY_LANE)
    return gl.convert_layout(x.reshape([4, 8, 2]).permute([1, 0, 2]).reshape([QUERIES]), OF_COLUMNS)


@gluon.jit
def differentiate_tile(
    operands,
    sums,
    streamed,
    barriers,
    slot,
    ds_shared,
    ds_ring,
    factor,
    numbers,
    SEEN: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """dk and dv of a group's keys, [ROWS, D], with the terms of the tile of queries in ``slot`` of
    the ring of queries; and its ds, for dq, into ``ds_shared``, a place of a ring.

    Args:
        operands: k and v.
        sums: dk and dv so far.
        streamed: the rings of q, do, lse and delta.
        barriers: of each stage of these: q has come, do has come, it is free.
        slot: tiles that the ring has had before.
        ds_shared: where the ds of the group's keys go.
        ds_ring: the barriers of that place, ds is there and it is free, and the phase of the
            latter.
        factor: of the scores.
        SEEN: None where all queries see all keys; else a device function of s and of ``numbers``,
            which returns s with minus infinity where a key is not seen.
    """
    k, v = operands
    dk, dv = sums
    q_shared, do_shared, lse_shared, delta_shared = streamed
    q_full, do_full, q_free = barriers
    ds_full, ds_free, ds_phase = ds_ring
    D: gl.constexpr = CONFIG.D
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    OF_GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_GRADIENT, 2)
    BY_QUERY: gl.constexpr = gl.SliceLayout(0, OF_SCORES)
    none = gl.zeros([ROWS, QUERIES], gl.float32, OF_SCORES)
    stage = slot % CONFIG.STAGES
    phase = (slot // CONFIG.STAGES) & 1
    mbarrier.wait(q_full.index(stage), phase)
    q = q_shared.index(stage).reshape([QUERIES, D])
    do = do_shared.index(stage).reshape([QUERIES, D])
    s = warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)
    lse = load_statistics(lse_shared.index(stage), BY_QUERY)
    s = warpgroup_mma_wait(0, deps=(s,))
    if SEEN is not None:
        # While registers are free: dp takes as many as s.
        s = SEEN(s, numbers)
    # The exponentials of s are computed while the tensor cores multiply v and do.
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma(v, do.permute([1, 0]), none, use_acc=False, is_async=True)
    # lse has its sign changed: one multiplication with addition.
    p = gl.exp2(s * factor + gl.expand_dims(lse, 0))
    p_operand = gl.convert_layout(p.to(do.dtype), OF_OPERAND)
    delta = load_statistics(delta_shared.index(stage), BY_QUERY)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv_ahead = warpgroup_mma(p_operand, do, dv, is_async=True)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    mbarrier.wait(ds_free, ds_phase)
    ds_shared.store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full, count=1)
    ds_operand = gl.convert_layout(ds, OF_OPERAND)
    dk_ahead = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv, dk, p_operand, ds_operand = warpgroup_mma_wait(
        0, deps=(dv_ahead, dk_ahead, p_operand, ds_operand)
    )
    mbarrier.arrive(q_free.index(stage), count=1)
    return dk, dv


@gluon.jit
def store_gradients(outputs, out_shared, dk, dv, at, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """dk and dv of a group's keys to ``at``, rounded, by way of its two places in shared memory."""
    D: gl.constexpr = CONFIG.D
    dk_tiles, dv_tiles = outputs
    # Where the last piece's gradients went from.
    tma.store_wait(0)
    out_shared.index(2 * GROUP).reshape([ROWS, D]).store(dk.to(dk_tiles.dtype))
    out_shared.index(2 * GROUP + 1).reshape([ROWS, D]).store(dv.to(dv_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_tiles, at, out_shared.index(2 * GROUP))
    tma.async_copy_shared_to_global(dv_tiles, at, out_shared.index(2 * GROUP + 1))


@gluon.jit
def store_gradient(tiles, place, gradient, at, CONFIG: gl.constexpr):
    """A gradient of a group's keys to ``at``, rounded, by way of a place in shared memory that is
    free, and free again afterwards.
    """
    place.reshape([ROWS, CONFIG.D]).store(gradient.to(tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tiles, at, place)
    tma.store_wait(0)


@gluon.jit
def hand_over(dq, dq_shared, dq_full, dq_free, used, CONFIG: gl.constexpr):
    """A tile of dq, transposed, [COLUMNS, QUERIES], to the warp that adds it to memory."""
    place = used % CONFIG.PLACES
    mbarrier.wait(dq_free.index(place), ((used // CONFIG.PLACES) & 1) ^ 1)
    # Four numbers of a thread next to one another: stores of 16 bytes without conflicts.
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([64, 64])
    dq_shared.index(place).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(place), count=1)


@gluon.jit
def load_tile(sums_ptr, at, OF_DQ: gl.constexpr):
    """Sums of a tile of dq as ``hand_over`` ordered them, from number ``at`` on: [D, QUERIES]."""
    BY_THREAD: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [512], [1024], [2048]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[128], [256]],
        block_bases=[],
        shape=[4096],
    )
    # From the L2 cache, to which the bulk copy engine adds.
    x = gl.load(sums_ptr + at + gl.arange(0, 4096, BY_THREAD), cache_modifier=".cg")
    x = x.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 64])
    return gl.convert_layout(x, OF_DQ, assert_trivial=True)


@gluon.jit
def add_tile(dq_tiles, at, dq_shared, dq_free, used, number, CONFIG: gl.constexpr):
    """A tile of dq from its place in shared memory to ``at``. Its sum has had ``number`` terms."""
    place = used % CONFIG.PLACES
    # The first one finds nothing that it could be added to.
    if number == 0:
        tma.async_copy_shared_to_global(dq_tiles, at, dq_shared.index(place))
    else:
        tma_add(dq_tiles, at, dq_shared.index(place))
    # The tile before this one is in memory: its place is free.
    tma.store_wait(1)
    if used > 0:
        mbarrier.arrive(dq_free.index((used + CONFIG.PLACES - 1) % CONFIG.PLACES), count=1)
