"""Gluon kernel of the backward pass over few keys, for Hopper.

    p = softmax(scale q k^T)    ds = p * (do v^T - delta)    delta = rowsum(p * do v^T) - dlse
    dq = scale ds k    dk = scale ds^T q    dv = p^T do

All keys of a head are one tile, so that a row's softmax, and delta, come from the tile's own
scores: q, k, v and do are read once, dq, dk and dv written once, and nothing else moves.

A program is GROUPS groups of four warps that take tiles of 64 queries in turns, a group that sums
dk and dv, and a warp that copies. A tile's p and ds go by way of shared memory from the group that
computes them to the one that sums, which takes tiles in their order: same inputs, same bits. It
computes both sums transposed, [D, keys], so that keys are the columns of its products, of which
there may be 16. It has no other work. Of 65 to 128 keys, whose p and dp are 128 registers, as both
sums are, there is one group with tiles: two of them spill.
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
from ..common.kernels_hopper_forward import LOG2_E, ROWS
from .kernels_hopper import keys_of
from .kernels_hopper_single_tile import copy_tiles, part_of, parts_of, softmax_of, wait_for_keys


@gluon.jit
def differentiate(
    dq_tiles, pointers, buffers, barriers, sizes, call, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """What each group with tiles does: dq of every so many-th tile of queries of every part, and
    the tile's p and ds.
    """
    lengths_ptr, dlse_ptr = pointers
    k_shared, v_shared, q_shared, do_shared, p_shared, ds_shared, dq_shared = buffers
    kv_full, kv_ready, kv_free, full, p_full, ds_full, both_free = barriers
    queries, keys, heads, scale = call
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    GROUPS: gl.constexpr = CONFIG.GROUPS
    DTYPE: gl.constexpr = dq_tiles.dtype
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OF_DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_DQ, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    no_scores = gl.zeros([ROWS, BLOCK_K], gl.float32, OF_SCORES)
    no_dq = gl.zeros([ROWS, D], gl.float32, OF_DQ)
    factor = scale * LOG2_E
    out = dq_shared.index(GROUP)
    used = 0
    for number in range(parts_of(sizes)):
        head, first, count = part_of(number, sizes)
        batch, of_head = head // heads, head % heads
        of_keys = number % CONFIG.KEY_STAGES
        length = keys_of(batch, lengths_ptr, keys, CONFIG)
        both = (k_shared, v_shared)
        wait_for_keys(number, length, both, (kv_full, kv_ready), GROUP, CONFIG)
        k = k_shared.index(of_keys).reshape([BLOCK_K, D])
        v = v_shared.index(of_keys).reshape([BLOCK_K, D])
        for step in range((GROUP + GROUPS - used % GROUPS) % GROUPS, count, GROUPS):
            slot = used + step
            stage = slot % CONFIG.STAGES
            mbarrier.wait(full.index(stage), (slot // CONFIG.STAGES) & 1)
            q = q_shared.index(stage).reshape([ROWS, D])
            do = do_shared.index(stage).reshape([ROWS, D])
            s = warpgroup_mma(q, k.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            dp = warpgroup_mma(do, v.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            p, _, l = softmax_of(s, length, factor, CONFIG)
            p = p * gl.expand_dims(1.0 / gl.where(l == 0.0, 1.0, l), 1)
            place = slot % CONFIG.PLACES
            mbarrier.wait(both_free.index(place), ((slot // CONFIG.PLACES) & 1) ^ 1)
            p_shared.index(place).store(p.to(DTYPE))
            fence_async_shared()
            mbarrier.arrive(p_full.index(place), count=1)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            delta = gl.sum(p * dp, 1)
            tile = first + step
            if CONFIG.DLSE:
                row = tile * ROWS + gl.arange(0, ROWS, BY_ROW)
                at = dlse_ptr + head.to(gl.int64) * queries + row
                delta -= gl.load(at, mask=row < queries, other=0.0).to(gl.float32)
            ds = (p * (dp - gl.expand_dims(delta, 1))).to(DTYPE)
            ds_shared.index(place).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(place), count=1)
            ds = gl.convert_layout(ds, OF_OPERAND)
            dq = warpgroup_mma(ds, k, no_dq, use_acc=False, is_async=True)
            # The group's last tile has left its place.
            tma.store_wait(0)
            dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
            if CONFIG.RAGGED:
                # Without keys there is no gradient, not even the NaN of do.
                dq = gl.where((length > 0) & (gl.zeros_like(dq) == 0.0), dq, 0.0)
            out.reshape([ROWS, D]).store((dq * scale).to(DTYPE))
            fence_async_shared()
            tma.async_copy_shared_to_global(dq_tiles, [batch, tile * ROWS, of_head, 0], out)
        mbarrier.arrive(kv_free.index(of_keys), count=1)
        used += count
    tma.store_wait(0)


@gluon.jit
def sum_tiles(outputs, lengths_ptr, buffers, barriers, sizes, call, CONFIG: gl.constexpr):
    """What the group that sums does: dk and dv of every part, transposed, [D, keys]."""
    dk_tiles, dv_tiles = outputs
    q_shared, do_shared, p_shared, ds_shared = buffers
    full, free, p_full, ds_full, both_free = barriers
    keys, heads, scale = call
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    DTYPE: gl.constexpr = dk_tiles.dtype
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    used = 0
    for number in range(parts_of(sizes)):
        head, _first, count = part_of(number, sizes)
        dk = gl.zeros([D, BLOCK_K], gl.float32, OF_SUMS)
        dv = gl.zeros([D, BLOCK_K], gl.float32, OF_SUMS)
        for step in range(count):
            stage = used % CONFIG.STAGES
            place = used % CONFIG.PLACES
            phase = (used // CONFIG.PLACES) & 1
            mbarrier.wait(full.index(stage), (used // CONFIG.STAGES) & 1)
            q = q_shared.index(stage).reshape([ROWS, D]).permute([1, 0])
            do = do_shared.index(stage).reshape([ROWS, D]).permute([1, 0])
            mbarrier.wait(p_full.index(place), phase)
            dv_ahead = warpgroup_mma(do, p_shared.index(place), dv, is_async=True)
            mbarrier.wait(ds_full.index(place), phase)
            dk_ahead = warpgroup_mma(q, ds_shared.index(place), dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=(dv_ahead, dk_ahead))
            # The group that has computed ds has read q and do.
            mbarrier.arrive(free.index(stage), count=1)
            if step + 1 < count:
                mbarrier.arrive(both_free.index(place), count=1)
            used += 1
        dk = dk * scale
        if CONFIG.RAGGED:
            length = keys_of(head // heads, lengths_ptr, keys, CONFIG)
            column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, OF_SUMS))
            is_key = gl.expand_dims(column < length, 0) & (gl.zeros_like(dk) == 0.0)
            dk, dv = gl.where(is_key, dk, 0.0), gl.where(is_key, dv, 0.0)
        # The sums leave from where the last tile's p and ds were.
        place = (used - 1) % CONFIG.PLACES
        OF_KEYS: gl.constexpr = dk_tiles.layout
        of_dk = ds_shared.index(place)._reinterpret(DTYPE, [1, BLOCK_K, 1, D], OF_KEYS)
        of_dv = p_shared.index(place)._reinterpret(DTYPE, [1, BLOCK_K, 1, D], OF_KEYS)
        of_dk.reshape([BLOCK_K, D]).permute([1, 0]).store(dk.to(DTYPE))
        of_dv.reshape([BLOCK_K, D]).permute([1, 0]).store(dv.to(DTYPE))
        fence_async_shared()
        at = [head // heads, 0, head % heads, 0]
        tma.async_copy_shared_to_global(dk_tiles, at, of_dk)
        tma.async_copy_shared_to_global(dv_tiles, at, of_dv)
        tma.store_wait(0)
        mbarrier.arrive(both_free.index(place), count=1)


# One compilation serves all sizes.
@gluon.jit(
    do_not_specialize=(
        *("queries", "keys", "heads"),
        *("rounds", "left", "per_program", "query_tiles"),
    )
)
def hopper_single_tile_backward_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    do_tiles,
    dq_tiles,
    dk_tiles,
    dv_tiles,
    lengths_ptr,
    dlse_ptr,
    scale,
    queries,
    keys,
    heads,
    rounds,
    left,
    per_program,
    query_tiles,
    CONFIG: gl.constexpr,
):
    """A program takes the parts that ``part_of`` says, whole heads; tiles are tensor descriptors
    over [B, rows, H, D]. CONFIG says whether ``lengths_ptr`` and ``dlse_ptr`` are read.
    """
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    STAGES: gl.constexpr = CONFIG.STAGES
    KEY_STAGES: gl.constexpr = CONFIG.KEY_STAGES
    PLACES: gl.constexpr = CONFIG.PLACES
    GROUPS: gl.constexpr = CONFIG.GROUPS
    DTYPE: gl.constexpr = q_tiles.dtype
    OF_SCORES: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * BLOCK_K), 16)
    k_shared = gl.allocate_shared_memory(DTYPE, [KEY_STAGES, 1, BLOCK_K, 1, D], k_tiles.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, [KEY_STAGES, 1, BLOCK_K, 1, D], v_tiles.layout)
    q_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, ROWS, 1, D], q_tiles.layout)
    do_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, ROWS, 1, D], do_tiles.layout)
    p_shared = gl.allocate_shared_memory(DTYPE, [PLACES, ROWS, BLOCK_K], OF_SCORES)
    ds_shared = gl.allocate_shared_memory(DTYPE, [PLACES, ROWS, BLOCK_K], OF_SCORES)
    dq_shared = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, ROWS, 1, D], dq_tiles.layout)
    kv_full, kv_ready = barriers_of(KEY_STAGES, 1), barriers_of(KEY_STAGES, 1)
    kv_free = barriers_of(KEY_STAGES, GROUPS)
    full, free = barriers_of(STAGES, 1), barriers_of(STAGES, 1)
    p_full, ds_full = barriers_of(PLACES, 1), barriers_of(PLACES, 1)
    both_free = barriers_of(PLACES, 1)
    fence_async_shared()
    sizes = (rounds, left, per_program, query_tiles)
    call = (queries, keys, heads, scale)
    inputs = (k_tiles, v_tiles, q_tiles, do_tiles)
    copied = (k_shared, v_shared, q_shared, do_shared)
    to_copy = (kv_full, kv_free, full, free)
    buffers = (k_shared, v_shared, q_shared, do_shared, p_shared, ds_shared, dq_shared)
    barriers = (kv_full, kv_ready, kv_free, full, p_full, ds_full, both_free)
    pointers = (lengths_ptr, dlse_ptr)
    outputs = (dk_tiles, dv_tiles)
    of_sums = (keys, heads, scale)
    summed = (q_shared, do_shared, p_shared, ds_shared)
    to_sum = (full, free, p_full, ds_full, both_free)
    REGISTERS: gl.constexpr = CONFIG.REGISTERS
    SUM_REGISTERS: gl.constexpr = CONFIG.SUM_REGISTERS
    COPYING_REGISTERS: gl.constexpr = CONFIG.COPYING_REGISTERS
    # The first group has the registers that the others leave.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (differentiate, (dq_tiles, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
                (sum_tiles, (outputs, lengths_ptr, summed, to_sum, sizes, of_sums, CONFIG)),
                (copy_tiles, (inputs, copied, to_copy, sizes, heads, CONFIG)),
            ],
            [4, 1],
            [SUM_REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (differentiate, (dq_tiles, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
                (differentiate, (dq_tiles, pointers, buffers, barriers, sizes, call, 1, CONFIG)),
                (sum_tiles, (outputs, lengths_ptr, summed, to_sum, sizes, of_sums, CONFIG)),
                (copy_tiles, (inputs, copied, to_copy, sizes, heads, CONFIG)),
            ],
            [4, 4, 1],
            [REGISTERS, SUM_REGISTERS, COPYING_REGISTERS],
        )
