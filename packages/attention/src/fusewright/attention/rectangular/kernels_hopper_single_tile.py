"""Gluon kernel of the forward pass over few keys, for Hopper, and what it shares with the backward
pass.

    s_ij = factor q_i . k_j    p_ij = 2^(s_ij - max_j s_ij)    o_i = sum_j p_ij v_j / sum_j p_ij

factor is scale log2 e. All keys of a head are one tile, so that a row's softmax is complete at
once, and q and o are nearly all that memory moves: the pass takes as long as they do, if their
copies never wait. So a program stays on its multiprocessor, and one warp of it copies tiles of 64
queries into a ring in shared memory, those of the next head behind those of the last one, and keys
and values a head ahead. Groups of four warps take the tiles in turns, and o leaves by bulk copies
from shared memory.

With RAGGED, a task has its own number of keys. The first group sets rows behind them, where memory
may hold anything, to zero before the others read the tile.

Programs take whole heads, neighbours at one time, since the rows of heads lie side by side in
memory. The heads that do not fill all programs are shared out in ranges of tiles: a program has a
part of one head, or of two.
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
from ..common.kernels_hopper_forward import LOG2_E, LOG_2, ROWS, probabilities
from .kernels_hopper import keys_of

# The reference of a row without any score above minus infinity: finite, and below every score.
LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.jit
def parts_of(sizes):
    """How many parts a program has, each of one head: one in each round of whole heads, and those
    of its range of the tiles that are left.
    """
    rounds, left, per_program, query_tiles = sizes
    begin = gl.minimum(gl.program_id(0) * per_program, left)
    end = gl.minimum(begin + per_program, left)
    heads = (end + query_tiles - 1) // query_tiles - begin // query_tiles
    return rounds + gl.where(begin < end, heads, 0)


@gluon.jit
def part_of(number, sizes):
    """The head, the first tile and the number of tiles of a part."""
    rounds, left, per_program, query_tiles = sizes
    begin = gl.minimum(gl.program_id(0) * per_program, left)
    end = gl.minimum(begin + per_program, left)
    # In tiles from the first one that is left on.
    of_left = begin // query_tiles + number - rounds
    first = gl.maximum(begin, of_left * query_tiles)
    count = gl.minimum(end, (of_left + 1) * query_tiles) - first
    is_whole = number < rounds
    head = number * gl.num_programs(0) + gl.program_id(0)
    head = gl.where(is_whole, head, rounds * gl.num_programs(0) + of_left)
    first = gl.where(is_whole, 0, first - of_left * query_tiles)
    return head, first, gl.where(is_whole, query_tiles, count)


@gluon.jit
def copy_tiles(inputs, buffers, barriers, sizes, heads, CONFIG: gl.constexpr):
    """What the copying warp does: keys and values of each part, then its tiles of queries and, in
    a backward pass, of do.
    """
    k_tiles, v_tiles, q_tiles, do_tiles = inputs
    k_shared, v_shared, q_shared, do_shared = buffers
    kv_full, kv_free, full, free = barriers
    COPIES: gl.constexpr = 2 if CONFIG.BACKWARD else 1
    copied = 0
    for number in range(parts_of(sizes)):
        head, first, count = part_of(number, sizes)
        batch, of_head = head // heads, head % heads
        place = number % CONFIG.KEY_STAGES
        mbarrier.wait(kv_free.index(place), ((number // CONFIG.KEY_STAGES) & 1) ^ 1)
        mbarrier.expect(kv_full.index(place), 2 * CONFIG.BLOCK_K * CONFIG.D * 2)
        at = [batch, 0, of_head, 0]
        tma.async_copy_global_to_shared(k_tiles, at, kv_full.index(place), k_shared.index(place))
        tma.async_copy_global_to_shared(v_tiles, at, kv_full.index(place), v_shared.index(place))
        for step in range(count):
            stage = copied % CONFIG.STAGES
            at = [batch, (first + step) * ROWS, of_head, 0]
            mbarrier.wait(free.index(stage), ((copied // CONFIG.STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), COPIES * ROWS * CONFIG.D * 2)
            tma.async_copy_global_to_shared(q_tiles, at, full.index(stage), q_shared.index(stage))
            if CONFIG.BACKWARD:
                to = do_shared.index(stage)
                tma.async_copy_global_to_shared(do_tiles, at, full.index(stage), to)
            copied += 1


@gluon.jit
def clear(rows, keys, CONFIG: gl.constexpr):
    """Zeros in a tile of keys or values in shared memory, from row ``keys`` on."""
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    OF_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = rows.reshape([BLOCK_K, CONFIG.D])
    x = tile.load(OF_ROWS)
    row = gl.arange(0, BLOCK_K, gl.SliceLayout(1, OF_ROWS))
    nothing = gl.zeros_like(x)
    tile.store(gl.where(gl.expand_dims(row < keys, 1) & (nothing == 0.0), x, nothing))


@gluon.jit
def wait_for_keys(number, keys, buffers, barriers, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until a group may read the keys and values of its part of this number, ``keys`` of them.
    With RAGGED, the first group clears the rows behind them for all.
    """
    k_shared, v_shared = buffers
    kv_full, kv_ready = barriers
    place = number % CONFIG.KEY_STAGES
    phase = (number // CONFIG.KEY_STAGES) & 1
    if CONFIG.RAGGED:
        if GROUP == 0:
            mbarrier.wait(kv_full.index(place), phase)
            if keys < CONFIG.BLOCK_K:
                clear(k_shared.index(place), keys, CONFIG)
                clear(v_shared.index(place), keys, CONFIG)
                fence_async_shared()
            mbarrier.arrive(kv_ready.index(place), count=1)
        mbarrier.wait(kv_ready.index(place), phase)
    else:
        mbarrier.wait(kv_full.index(place), phase)


@gluon.jit
def softmax_of(s, keys, factor, CONFIG: gl.constexpr):
    """2^(factor s - m) of a tile of scores, with the row's maximum m in base 2 and the row's sum;
    without any score above -inf the maximum is LOWEST and the sum 0.
    """
    if CONFIG.MASKED:
        column = gl.arange(0, CONFIG.BLOCK_K, gl.SliceLayout(0, s.type.layout))
        is_key = gl.expand_dims(column < keys, 0) & (gl.zeros_like(s) == 0.0)
        s = gl.where(is_key, s, -float("inf"))
    m = gl.max(s, 1) * factor
    m = gl.where(m == -float("inf"), LOWEST, m)
    p = probabilities(s, m, factor)
    return p, m, gl.sum(p, 1)


@gluon.jit
def attend(
    o_tiles, pointers, buffers, barriers, sizes, call, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """What each group does: every so many-th tile of queries of every part."""
    lengths_ptr, lse_ptr = pointers
    k_shared, v_shared, q_shared, o_shared = buffers
    kv_full, kv_ready, kv_free, full, free = barriers
    queries, keys, heads, factor = call
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    GROUPS: gl.constexpr = CONFIG.GROUPS
    DTYPE: gl.constexpr = o_tiles.dtype
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OF_OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_OUTPUT, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    BY_ROW_OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, OF_OUTPUT)
    no_scores = gl.zeros([ROWS, BLOCK_K], gl.float32, OF_SCORES)
    no_output = gl.zeros([ROWS, D], gl.float32, OF_OUTPUT)
    out = o_shared.index(GROUP)
    used = 0
    for number in range(parts_of(sizes)):
        head, first, count = part_of(number, sizes)
        batch, of_head = head // heads, head % heads
        place = number % CONFIG.KEY_STAGES
        length = keys_of(batch, lengths_ptr, keys, CONFIG)
        of_keys = (k_shared, v_shared)
        wait_for_keys(number, length, of_keys, (kv_full, kv_ready), GROUP, CONFIG)
        k = k_shared.index(place).reshape([BLOCK_K, D]).permute([1, 0])
        v = v_shared.index(place).reshape([BLOCK_K, D])
        for step in range((GROUP + GROUPS - used % GROUPS) % GROUPS, count, GROUPS):
            stage = (used + step) % CONFIG.STAGES
            mbarrier.wait(full.index(stage), ((used + step) // CONFIG.STAGES) & 1)
            q = q_shared.index(stage).reshape([ROWS, D])
            s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(free.index(stage), count=1)
            p, m, l = softmax_of(s, length, factor, CONFIG)
            p = gl.convert_layout(p.to(DTYPE), OF_OPERAND)
            o = warpgroup_mma(p, v, no_output, use_acc=False, is_async=True)
            tile = first + step
            if CONFIG.LSE:
                row = tile * ROWS + gl.arange(0, ROWS, BY_ROW)
                lse = (m + gl.log2(l)) * LOG_2
                gl.store(lse_ptr + head.to(gl.int64) * queries + row, lse, mask=row < queries)
            inverse_sum = 1.0 / gl.where(l == 0.0, 1.0, l)
            inverse_sum = gl.expand_dims(gl.convert_layout(inverse_sum, BY_ROW_OF_OUTPUT), 1)
            # The group's last tile has left its place.
            tma.store_wait(0)
            o, p = warpgroup_mma_wait(0, deps=(o, p))
            out.reshape([ROWS, D]).store((o * inverse_sum).to(DTYPE))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_tiles, [batch, tile * ROWS, of_head, 0], out)
        mbarrier.arrive(kv_free.index(place), count=1)
        used += count
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(
    do_not_specialize=(
        *("queries", "keys", "heads"),
        *("rounds", "left", "per_program", "query_tiles"),
    )
)
def hopper_single_tile_forward_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    o_tiles,
    lengths_ptr,
    lse_ptr,
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
    """A program takes the parts that ``part_of`` says; tiles are tensor descriptors over
    [B, rows, H, D]. CONFIG says whether ``lengths_ptr`` is read and ``lse_ptr`` is written.
    """
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    STAGES: gl.constexpr = CONFIG.STAGES
    KEY_STAGES: gl.constexpr = CONFIG.KEY_STAGES
    GROUPS: gl.constexpr = CONFIG.GROUPS
    DTYPE: gl.constexpr = q_tiles.dtype
    k_shared = gl.allocate_shared_memory(DTYPE, [KEY_STAGES, 1, BLOCK_K, 1, D], k_tiles.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, [KEY_STAGES, 1, BLOCK_K, 1, D], v_tiles.layout)
    q_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, ROWS, 1, D], q_tiles.layout)
    o_shared = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, ROWS, 1, D], o_tiles.layout)
    kv_full, kv_ready = barriers_of(KEY_STAGES, 1), barriers_of(KEY_STAGES, 1)
    kv_free = barriers_of(KEY_STAGES, GROUPS)
    full, free = barriers_of(STAGES, 1), barriers_of(STAGES, 1)
    fence_async_shared()
    # A forward pass has no do.
    inputs = (k_tiles, v_tiles, q_tiles, q_tiles)
    buffers = (k_shared, v_shared, q_shared, o_shared)
    copied = (k_shared, v_shared, q_shared, q_shared)
    barriers = (kv_full, kv_ready, kv_free, full, free)
    to_copy = (kv_full, kv_free, full, free)
    pointers = (lengths_ptr, lse_ptr)
    sizes = (rounds, left, per_program, query_tiles)
    call = (queries, keys, heads, scale * LOG2_E)
    REGISTERS: gl.constexpr = CONFIG.REGISTERS
    COPYING_REGISTERS: gl.constexpr = CONFIG.COPYING_REGISTERS
    gl.static_assert(GROUPS == 3)
    gl.warp_specialize(
        [
            (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
            (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 1, CONFIG)),
            (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 2, CONFIG)),
            (copy_tiles, (inputs, copied, to_copy, sizes, heads, CONFIG)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, COPYING_REGISTERS],
    )
