"""Device functions of the forward passes of warp groups, for Hopper, in Gluon.

    s_ij = factor q_i . k_j    p_ij = 2^(s_ij - r_i)
    l_i += sum_j p_ij          o_i += sum_j p_ij v_j

A group of four warps has ROWS queries in shared memory, while tiles of BLOCK_K keys and values pass
there in a ring. A product's scores stay in registers and become the probabilities of the next one.
The reference r_i is the maximum of s_ij over the first tile of keys that a row sees, and stays what
it is. Rows whose sum or output has grown beyond a limit are flagged, and computed again by another
launch.

l is a product, too, with a column of ones: it adds the probabilities as they were rounded for o, so
that the weight of a row's only key is 1, whatever its reference is. Where the log-sum-exp is
wanted, its sum is that of the probabilities before their rounding.
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
from .tiles_rounding import MIDDLE, STEPS

LOG_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
# Queries of a group.
ROWS = gl.constexpr(64)
# A sum above this, 2^64, makes its rows be computed again, and an output beyond fp32.
LARGEST_SUM = gl.constexpr(18446744073709551616.0)
LARGEST_OUTPUT = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def buffers_and_barriers(tiles, CONFIG: gl.constexpr):
    """The shared memory of a program: queries and outputs of its groups, the ring of keys and
    values, and ones; and the barriers of each group's queries, have come and are free, of each
    place of the ring, and the tokens.
    """
    q_tiles, k_tiles, v_tiles, o_tiles = tiles
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    STAGES: gl.constexpr = CONFIG.STAGES
    GROUPS: gl.constexpr = CONFIG.GROUPS
    DTYPE: gl.constexpr = q_tiles.dtype
    q_shared = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, ROWS, 1, D], q_tiles.layout)
    o_shared = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, ROWS, 1, D], o_tiles.layout)
    k_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_K, 1, D], k_tiles.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_K, 1, D], v_tiles.layout)
    OF_ONES: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ones_shared = gl.allocate_shared_memory(DTYPE, [8, BLOCK_K], OF_ONES)
    ONES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ones_shared.store(gl.full([8, BLOCK_K], 1.0, DTYPE, ONES))
    q_full, q_free = barriers_of(GROUPS, 1), barriers_of(GROUPS, 1)
    tokens = barriers_of(GROUPS, 1)
    full, free = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    fence_async_shared()
    buffers = (q_shared, k_shared, v_shared, o_shared, ones_shared)
    return buffers, (q_full, q_free, full, free, tokens)


@gluon.jit
def copy_queries(q_tiles, buffers, barriers, piece, group, turn, CONFIG: gl.constexpr):
    """The queries of a group of a piece, its task, head and tile of queries, once those of the
    ``turn`` pieces before are not needed.
    """
    batch, head, tile = piece
    q_shared, _, _, _, _ = buffers
    q_full, q_free, _, _, _ = barriers
    mbarrier.wait(q_free.index(group), (turn & 1) ^ 1)
    mbarrier.expect(q_full.index(group), ROWS * CONFIG.D * 2)
    at = [batch, (tile * CONFIG.GROUPS + group) * ROWS, head, 0]
    tma.async_copy_global_to_shared(q_tiles, at, q_full.index(group), q_shared.index(group))


@gluon.jit
def copy_keys(tiles, buffers, barriers, piece, step, copied, CONFIG: gl.constexpr):
    """A tile of keys and values into a place of the ring that is free: of a piece, its task, the
    head of its keys and the tile that comes first, the one ``step`` tiles before that.
    ``copied``: tiles that the ring has had before.
    """
    k_tiles, v_tiles = tiles
    batch, head, last = piece
    _, k_shared, v_shared, _, _ = buffers
    _, _, full, free, _ = barriers
    stage = copied % CONFIG.STAGES
    mbarrier.wait(free.index(stage), ((copied // CONFIG.STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), 2 * CONFIG.BLOCK_K * CONFIG.D * 2)
    at = [batch, (last - step) * CONFIG.BLOCK_K, head, 0]
    tma.async_copy_global_to_shared(k_tiles, at, full.index(stage), k_shared.index(stage))
    tma.async_copy_global_to_shared(v_tiles, at, full.index(stage), v_shared.index(stage))


@gluon.jit
def sums_of_lanes(p, BLOCK_K: gl.constexpr):
    """The sum over the columns that a lane holds, [ROWS, 4]: lanes are added once, at the end."""
    return gl.sum(gl.sum(p.reshape([ROWS, BLOCK_K // 8, 4, 2]), 3), 1)


@gluon.jit
def probabilities(s, reference, factor):
    """2^(factor s - reference), by one multiplication with addition and one exponential each."""
    return gl.exp2(s * factor + gl.expand_dims(-reference, 1))


@gluon.jit
def next_tile(
    q,
    p,
    sums,
    buffers,
    barriers,
    next_token,
    stages,
    reference,
    factor,
    numbers,
    SEEN: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The sums with the terms of the tile of keys in the ring that p are of, and p of the following
    one. Its exponentials are computed while the tensor cores multiply for other groups.

    Args:
        p: probabilities, as the left operand of their products.
        sums: o, l, and the sums of the lanes.
        next_token: the barrier of the token that this group has, for the next group; or None.
        stages: of both tiles in the ring. The second has come.
        SEEN: None where all rows see all keys of the following tile; else a device function of s
            and of ``numbers``, which returns s with minus infinity where a key is not seen.

    Returns:
        p, o, l, and the sums of the lanes.
    """
    o, l, exact_l = sums
    _, k_shared, v_shared, _, ones_shared = buffers
    _, _, _, free, _ = barriers
    stage, following = stages
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OF_OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_OUTPUT, 2)
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    OF_TERMS: gl.constexpr = gl.DotOperandLayout(0, OF_SUMS, 2)
    none = gl.zeros([ROWS, BLOCK_K], gl.float32, OF_SCORES)
    k = k_shared.index(following).reshape([BLOCK_K, D]).permute([1, 0])
    s_ahead = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    v = v_shared.index(stage).reshape([BLOCK_K, D])
    o_ahead = warpgroup_mma(p, v, o, is_async=True)
    terms = gl.convert_layout(p, OF_TERMS)
    l_ahead = warpgroup_mma(terms, ones_shared.permute([1, 0]), l, is_async=True)
    s = warpgroup_mma_wait(2, deps=(s_ahead,))
    if next_token is not None:
        mbarrier.arrive(next_token, count=1)
    if SEEN is not None:
        s = SEEN(s, numbers)
    p_next = probabilities(s, reference, factor)
    if CONFIG.LSE:
        exact_l += sums_of_lanes(p_next, BLOCK_K)
    p_next = gl.convert_layout(p_next.to(q.dtype), OF_OPERAND)
    o, l, p, terms = warpgroup_mma_wait(0, deps=(o_ahead, l_ahead, p, terms))
    mbarrier.arrive(free.index(stage), count=1)
    return p_next, o, l, exact_l


@gluon.jit
def last_tile(p, o, l, buffers, barriers, stage, CONFIG: gl.constexpr):
    """o and l with the terms of the last tile of keys."""
    _, _, v_shared, _, ones_shared = buffers
    _, _, _, free, _ = barriers
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    OF_TERMS: gl.constexpr = gl.DotOperandLayout(0, OF_SUMS, 2)
    v = v_shared.index(stage).reshape([CONFIG.BLOCK_K, CONFIG.D])
    o_ahead = warpgroup_mma(p, v, o, is_async=True)
    terms = gl.convert_layout(p, OF_TERMS)
    l_ahead = warpgroup_mma(terms, ones_shared.permute([1, 0]), l, is_async=True)
    o, l, p, terms = warpgroup_mma_wait(0, deps=(o_ahead, l_ahead, p, terms))
    mbarrier.arrive(free.index(stage), count=1)
    return o, l


@gluon.jit
def store_rounding(o, rounded, o_low_ptr, place, call, D: gl.constexpr):
    """What rounding took from a group's rows of o, as ``tiles_rounding`` keeps it."""
    batch, head, block = place
    queries, heads = call
    step: gl.constexpr = (1 << (16 if rounded.dtype == gl.bfloat16 else 13)) // STEPS
    WORDS: gl.constexpr = D // 8
    near = rounded.to(gl.float32).to(gl.int32, bitcast=True)
    taken = o.to(gl.int32, bitcast=True) - near
    taken = gl.minimum(gl.maximum(taken, -MIDDLE * step), (MIDDLE - 1) * step)
    code = (taken + (MIDDLE * step + step // 2)) // step
    col = gl.arange(0, D, gl.SliceLayout(0, o.type.layout))
    code = code << gl.expand_dims(col % 8 * 4, 0)
    words = gl.sum(gl.sum(code.reshape([ROWS, WORDS, 4, 2]), 3), 2)
    query = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, words.type.layout))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, words.type.layout))
    # May need 64 bits.
    at_row = ((batch.to(gl.int64) * queries + query) * heads + head) * WORDS
    at = o_low_ptr + gl.expand_dims(at_row, 1) + gl.expand_dims(word, 0)
    gl.store(at, words, mask=gl.expand_dims(query < queries, 1))


@gluon.jit
def store_outputs(
    o_tiles, pointers, o_shared, sums, place, call, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """A group's rows of o, of what rounding takes from it and of their statistics, and their flag.

    Args:
        o_tiles: of o.
        pointers: lse, softmax, o_low and flags.
        sums: o, the sum of each row as it divides o and as lse has it, and the reference.
        place: task, head, and the block of ROWS queries.
        call: queries, blocks and heads of a task, rows of all, and whether o_low and softmax are
            written.
    """
    lse_ptr, softmax_ptr, o_low_ptr, flags_ptr = pointers
    o, total, exact_total, reference = sums
    batch, head, block = place
    queries, blocks, heads, rows, keeps = call
    D: gl.constexpr = CONFIG.D
    BY_ROW: gl.constexpr = total.type.layout
    BY_ROW_OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    inverse_sum = 1.0 / total
    o = o * gl.expand_dims(gl.convert_layout(inverse_sum, BY_ROW_OF_OUTPUT), 1)
    rounded = o.to(o_tiles.dtype)
    # Where the last piece's output went from.
    tma.store_wait(0)
    o_shared.index(GROUP).reshape([ROWS, D]).store(rounded)
    fence_async_shared()
    at = [batch, block * ROWS, head, 0]
    tma.async_copy_shared_to_global(o_tiles, at, o_shared.index(GROUP))
    if keeps:
        store_rounding(o, rounded, o_low_ptr, place, (queries, heads), D)
    query = block * ROWS + gl.arange(0, ROWS, BY_ROW)
    at_row = (batch * heads + head) * queries + query
    if CONFIG.LSE:
        lse = (reference + gl.log2(exact_total)) * LOG_2
        gl.store(lse_ptr + at_row, lse, mask=query < queries)
    if keeps:
        gl.store(softmax_ptr + at_row, reference, mask=query < queries)
        gl.store(softmax_ptr + rows + at_row, inverse_sum, mask=query < queries)
    # Not above: NaN has to be flagged, too.
    is_good = gl.where(total <= LARGEST_SUM, 1, 0)
    largest = gl.min(gl.where(gl.abs(o) <= LARGEST_OUTPUT, 1, 0), 1)
    is_good = is_good & gl.convert_layout(largest, BY_ROW)
    flag = flags_ptr + (batch * heads + head) * blocks + block
    gl.store(flag, 1 - gl.min(is_good, 0))
