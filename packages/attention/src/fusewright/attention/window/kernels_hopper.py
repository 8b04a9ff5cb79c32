"""Gluon kernel of the forward pass of sliding-window attention, for Hopper.

    s_ij = factor q_i . k_j    p_ij = 2^(s_ij - r_i)
    l_i = sum_j p_ij           o_i = sum_j p_ij v_j / l_i

Queries and keys are rows of one sequence, and the sums go over j <= i < j + window. factor is scale
log2 e. The reference r_i is the maximum of s_ij over the keys that a row sees in the tile of its
group's own rows, itself among them.

The groups of warps are those of the rectangular pass: of the last one a warp copies, each of the
others has ROWS queries. A piece of work is their queries, next to one another in one head, and the
tiles of keys that some of them see, the last ones first. A group leaves out those tiles that none
of its own rows sees. Only its first tile and those where the window ends have a mask: the window is
ROWS or more.

A key whose probability is 0 may have a value that is no finite number: rows of such tiles are
flagged, as those are whose sums have grown too large, and computed again by
``flagged_window_forward_kernel``.

Shah et al., FlashAttention-3, arXiv 2407.08608; Beltagy, Peters and Cohan, arXiv 2004.05150.
"""

from __future__ import annotations

from .._core.kernels_gluon import gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
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
def work_of(piece, sizes, CONFIG: gl.constexpr):
    """A piece's head and tile of queries; the last tile of keys that some of them see, and how many
    tiles they see. Of ``together`` heads the last tiles of queries come first, so that the first
    ones, which see few keys, come last, and programs end at about one time.
    """
    query_tiles, queries, window, together = sizes
    of_them = piece % (together * query_tiles)
    head = piece // (together * query_tiles) * together + of_them % together
    tile = query_tiles - 1 - of_them // together
    first = tile * (CONFIG.GROUPS * ROWS)
    last = gl.minimum(first + CONFIG.GROUPS * ROWS, queries) - 1
    newest = last // CONFIG.BLOCK_K
    oldest = gl.maximum(first - window + 1, 0) // CONFIG.BLOCK_K
    return head, tile, newest, newest - oldest + 1


@gluon.jit
def share_of(first, newest, sizes, CONFIG: gl.constexpr):
    """Of a group whose rows begin with ``first``: the tile of its own last row, which comes first;
    how many tiles it sees; and up to which of them all its rows see all keys, but for the first.
    """
    _query_tiles, queries, window, _together = sizes
    own = gl.minimum((first + ROWS - 1) // CONFIG.BLOCK_K, newest)
    oldest = gl.maximum(first - window + 1, 0) // CONFIG.BLOCK_K
    # A group behind the last row has nothing to do, and one tile.
    oldest = gl.where(first < queries, oldest, own)
    # The oldest tile whose keys the last row sees all.
    whole = gl.maximum(first + ROWS - window + CONFIG.BLOCK_K - 1, 0) // CONFIG.BLOCK_K
    tiles = own - oldest + 1
    return own, tiles, gl.maximum(gl.minimum(own - whole + 1, tiles), 1)


@gluon.jit
def columns_and_rows(parts):
    """Of a tile of scores as [ROWS, j, l, c], whose columns are 8 j + 2 l + c: 8 j + c, and the row
    less 2 l.

    Of a thread the former are constants and the latter two numbers: a column alone would be a
    register for each, the same for every tile, which the compiler keeps all the time.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, parts.type.layout))
    j = gl.arange(0, parts.shape[1], gl.SliceLayout(0, COLUMNS)) * 8
    c = gl.arange(0, 2, gl.SliceLayout(0, LANES))
    l = gl.arange(0, 4, gl.SliceLayout(1, LANES)) * 2
    row = gl.arange(0, parts.shape[0], gl.SliceLayout(1, COLUMNS))
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 2), 3)
    row = gl.expand_dims(gl.expand_dims(gl.expand_dims(row, 1), 2), 3)
    c = gl.expand_dims(gl.expand_dims(gl.expand_dims(c, 0), 0), 1)
    l = gl.expand_dims(gl.expand_dims(gl.expand_dims(l, 1), 0), 1)
    return j + c, row - l


@gluon.jit
def of_own_rows(s, rows):
    """s of keys up to the query's own. The first of a group's tiles alone has others."""
    first_query, first_key, _ = rows
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    column, row = columns_and_rows(parts)
    parts = gl.where(column <= row + (first_query - first_key), parts, -float("inf"))
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@gluon.jit
def of_window(s, rows):
    """s of keys less than ``window`` rows behind the query."""
    first_query, first_key, window = rows
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    column, row = columns_and_rows(parts)
    parts = gl.where(column > row + (first_query - first_key - window), parts, -float("inf"))
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@gluon.jit
def copy_tiles(inputs, buffers, barriers, sizes, pieces, heads, CONFIG: gl.constexpr):
    """What the copying warp does: keys and values of each piece, last ones first, each into a place
    that is free, and between them the queries of each group, before the tile that it begins with:
    the last group, which begins first, also ends first, and can go on to its next piece while the
    others are still at theirs.
    """
    q_tiles, k_tiles, v_tiles = inputs
    GROUPS: gl.constexpr = CONFIG.GROUPS
    copied = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        head, tile, newest, count = work_of(piece, sizes, CONFIG)
        batch, of_head = head // heads, head % heads
        turn = piece // gl.num_programs(0)
        for step in range(gl.maximum(count, GROUPS)):
            if step < GROUPS:
                piece_of_q = batch, of_head, tile
                copy_queries(
                    *(q_tiles, buffers, barriers, piece_of_q, GROUPS - 1 - step, turn, CONFIG)
                )
            if step < count:
                tiles, of_keys = (k_tiles, v_tiles), (batch, of_head, newest)
                copy_keys(tiles, buffers, barriers, of_keys, step, copied, CONFIG)
                copied += 1


@gluon.jit
def wait_for_tile(barriers, used, CONFIG: gl.constexpr):
    """Until a tile of keys has come, of so many before it."""
    _q_full, _q_free, full, _free, _tokens = barriers
    mbarrier.wait(full.index(used % CONFIG.STAGES), (used // CONFIG.STAGES) & 1)


@gluon.jit
def leave_tiles(barriers, begin, end, CONFIG: gl.constexpr):
    """Say of the tiles ``begin`` to ``end`` of the ring that this group does not need them: once
    they have come, so that it says so in the ring's right turn.
    """
    _q_full, _q_free, _full, free, _tokens = barriers
    for used in range(begin, end):
        wait_for_tile(barriers, used, CONFIG)
        mbarrier.arrive(free.index(used % CONFIG.STAGES), count=1)


@gluon.jit
def attend_tiles(
    q,
    p,
    sums,
    buffers,
    barriers,
    used,
    begin,
    end,
    numbers,
    SEEN: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """p and the sums as ``next_tile`` has them, once a group's tiles ``begin`` to ``end`` have
    passed.

    Args:
        used: tiles that the ring has had before the group's first one.
        numbers: the reference of each row, the factor of the scores, the group's first row, the
            first key of its first tile, and the window.
    """
    o, l, exact_l = sums
    reference, factor, first_query, first_key, window = numbers
    for step in range(begin, end):
        wait_for_tile(barriers, used + step, CONFIG)
        stages = (used + step - 1) % CONFIG.STAGES, (used + step) % CONFIG.STAGES
        rows = first_query, first_key - step * CONFIG.BLOCK_K, window
        p, o, l, exact_l = next_tile(
            *(q, p, (o, l, exact_l), buffers, barriers, None, stages),
            *(reference, factor, rows, SEEN, CONFIG),
        )
    return p, o, l, exact_l


@gluon.jit
def attend(
    o_tiles, pointers, buffers, barriers, sizes, call, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """What each group with queries does: its ROWS queries of every piece, over the keys that they
    see.
    """
    pieces, heads, rows, factor, keeps = call
    q_shared, k_shared, _v_shared, o_shared, _ones_shared = buffers
    q_full, q_free, _full, _free, _tokens = barriers
    D: gl.constexpr = CONFIG.D
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    STAGES: gl.constexpr = CONFIG.STAGES
    GROUPS: gl.constexpr = CONFIG.GROUPS
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OF_OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_OUTPUT, 2)
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    _query_tiles, queries, window, _together = sizes
    blocks = (queries + ROWS - 1) // ROWS
    q = q_shared.index(GROUP).reshape([ROWS, D])
    none = gl.zeros([ROWS, BLOCK_K], gl.float32, OF_SCORES)
    used = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        head, tile, newest, count = work_of(piece, sizes, CONFIG)
        block = tile * GROUPS + GROUP
        own, steps, inner = share_of(block * ROWS, newest, sizes, CONFIG)
        begin, end = used + newest - own, used + count
        leave_tiles(barriers, used, begin, CONFIG)
        used = begin
        mbarrier.wait(q_full.index(GROUP), piece // gl.num_programs(0) & 1)
        wait_for_tile(barriers, used, CONFIG)
        k = k_shared.index(used % STAGES).reshape([BLOCK_K, D]).permute([1, 0])
        s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        of_tile = block * ROWS, own * BLOCK_K, window
        s = of_window(of_own_rows(s, of_tile), of_tile)
        reference = gl.max(s, 1) * factor
        p = probabilities(s, reference, factor)
        exact_l = sums_of_lanes(p, BLOCK_K)
        p = gl.convert_layout(p.to(q.dtype), OF_OPERAND)
        l = gl.zeros([ROWS, 8], gl.float32, OF_SUMS)
        o = gl.zeros([ROWS, D], gl.float32, OF_OUTPUT)
        numbers = reference, factor, block * ROWS, own * BLOCK_K, window
        p, o, l, exact_l = attend_tiles(
            *(q, p, (o, l, exact_l), buffers, barriers, used, 1, inner, numbers),
            *(None, CONFIG),
        )
        p, o, l, exact_l = attend_tiles(
            *(q, p, (o, l, exact_l), buffers, barriers, used, inner, steps, numbers),
            *(of_window, CONFIG),
        )
        mbarrier.arrive(q_free.index(GROUP), count=1)
        used += steps
        o, l = last_tile(p, o, l, buffers, barriers, (used - 1) % STAGES, CONFIG)
        if block < blocks:
            total = gl.convert_layout(gl.max(l, 1), BY_ROW)
            exact_total = gl.convert_layout(gl.sum(exact_l, 1), BY_ROW)
            store_outputs(
                *(o_tiles, pointers, o_shared, (o, total, exact_total, reference)),
                *((head // heads, head % heads, block), (queries, blocks, heads, rows, keeps)),
                *(GROUP, CONFIG),
            )
        leave_tiles(barriers, used, end, CONFIG)
        used = end
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(
    do_not_specialize=(
        *("pieces", "queries", "heads", "rows", "query_tiles", "window", "together", "keeps"),
    )
)
def window_hopper_forward_kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    o_tiles,
    lse_ptr,
    softmax_ptr,
    o_low_ptr,
    flags_ptr,
    scale,
    pieces,
    queries,
    heads,
    rows,
    query_tiles,
    window,
    together,
    keeps,
    CONFIG: gl.constexpr,
):
    """A program takes every so many-th piece of work; tiles are tensor descriptors over
    [B, rows, H, D]. ``keeps``, 0 or 1, says whether ``o_low_ptr`` and ``softmax_ptr`` are
    written, and CONFIG whether ``lse_ptr`` is.
    """
    GROUPS: gl.constexpr = CONFIG.GROUPS
    inputs = (q_tiles, k_tiles, v_tiles)
    tiles = (q_tiles, k_tiles, v_tiles, o_tiles)
    buffers, barriers = buffers_and_barriers(tiles, CONFIG)
    pointers = (lse_ptr, softmax_ptr, o_low_ptr, flags_ptr)
    sizes = (query_tiles, queries, window, together)
    call = (pieces, heads, rows, scale * LOG2_E, keeps)
    REGISTERS: gl.constexpr = CONFIG.REGISTERS
    COPYING_REGISTERS: gl.constexpr = CONFIG.COPYING_REGISTERS
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 1, CONFIG)),
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 2, CONFIG)),
                (copy_tiles, (inputs, buffers, barriers, sizes, pieces, heads, CONFIG)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
                (attend, (o_tiles, pointers, buffers, barriers, sizes, call, 1, CONFIG)),
                (copy_tiles, (inputs, buffers, barriers, sizes, pieces, heads, CONFIG)),
            ],
            [4, 1],
            [REGISTERS, COPYING_REGISTERS],
        )
