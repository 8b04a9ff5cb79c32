"""Gluon kernel of the pooled update's products over rows, for Hopper and one memory of many rows in
bf16.

    hidden      z = k w1^T + b1, h = act(z)
    residual    e = r = h w2^T + b2 - v; the loss of the tile
    slope       dh = e w2, p = dh * act'(z)
    p_bar       p_bar = k A1^T + a1, dh_bar = p_bar * act'(z), u = p_bar * dh * act''(z)
    e_bar       q = h A2^T + dh_bar w2^T + a2 + dloss e, dv = -c q
    z_bar       z_bar = (e A2 + q w2) * act'(z) + u
    dk          dk = c (p A1 + z_bar w1)

as in kernels.py and kernels_backward.py, but that u is kept and not p_bar: no launch reads more
than two tensors beside its operands. At many rows the products are what counts, and what follows
them waits for memory: so a program takes tiles in turn, and its two groups of four warps one tile
each. While one multiplies, the other finishes its tile. A further warp copies the operands of both
into one ring, another the tiles that are read beside them into the places that results are stored
from. There is one for each half of a tile, or, where two tensors are read, one of each for every
other quarter: as many bytes, so that the ring of operands stays as long.
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
from .._core.kernels_product_hopper import halves_of, store_part
from .._core.kernels_sigmoid import sigmoid, widened
from ..common.tiles import activated as activated_by_triton
from ..common.tiles import silu_of

# Products that one step of the ring adds.
DEPTH = gl.constexpr(64)
# Groups of four warps that multiply.
GROUPS = gl.constexpr(2)
# Parts of a tile that a group has places for: what follows takes PART_COLS columns at once.
PLACES = gl.constexpr(2)


@gluon.jit
def activated(z, CONFIG: gl.constexpr):
    """act, act' and act'' of z; SiLU's by the hardware's sigmoid."""
    if CONFIG.ACTIVATION == "silu":
        h, slope, curve = silu_of(z, sigmoid(z))
    else:
        h, slope, curve = activated_by_triton(z, CONFIG)
    return h, slope, curve


@gluon.jit
def copy_operands(a_tiles, b_tiles, copied, place, depth, buffers, barriers, CONFIG: gl.constexpr):
    """The operands of one tile's product, step by step, each into a place that is free; how many
    steps have been copied.
    """
    a_shared, b_shared, _ = buffers
    full, free, _, _, _ = barriers
    row, col = place
    BYTES: gl.constexpr = (CONFIG.BLOCK_M + CONFIG.BLOCK_N) * DEPTH * 2
    for start in range(0, depth, DEPTH):
        stage = copied % CONFIG.STAGES
        mbarrier.wait(free.index(stage), ((copied // CONFIG.STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        tma.async_copy_global_to_shared(
            a_tiles, [row, start], full.index(stage), a_shared.index(stage)
        )
        if CONFIG.TRANSPOSED:
            tma.async_copy_global_to_shared(
                b_tiles, [col, start], full.index(stage), b_shared.index(stage)
            )
        else:
            tma.async_copy_global_to_shared(
                b_tiles, [start, col], full.index(stage), b_shared.index(stage)
            )
        copied += 1
    return copied


@gluon.jit
def copy_tiles(descriptors, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the copying warp does."""
    a_tiles, b_tiles, c_tiles, d_tiles, _, _, _, _ = descriptors
    rows, cols, depth = sizes
    col_tiles = gl.cdiv(cols, CONFIG.BLOCK_N)
    tiles = gl.cdiv(rows, CONFIG.BLOCK_M) * col_tiles
    copied = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        place = tile // col_tiles * CONFIG.BLOCK_M, tile % col_tiles * CONFIG.BLOCK_N
        copied = copy_operands(a_tiles, b_tiles, copied, place, depth, buffers, barriers, CONFIG)
        if CONFIG.PAIRS == 2:
            copied = copy_operands(
                c_tiles, d_tiles, copied, place, depth, buffers, barriers, CONFIG
            )


@gluon.jit
def load_tiles(descriptors, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the loading warp does: tiles of one tensor or two, part by part, as soon as the places
    are free.
    """
    _, _, _, _, _, _, x_tiles, other_x_tiles = descriptors
    _, _, places = buffers
    _, _, _, loaded, taken = barriers
    PARTS: gl.constexpr = CONFIG.BLOCK_N // CONFIG.PART_COLS
    OTHERS: gl.constexpr = GROUPS * PLACES
    rows, cols, _ = sizes
    col_tiles = gl.cdiv(cols, CONFIG.BLOCK_N)
    tiles = gl.cdiv(rows, CONFIG.BLOCK_M) * col_tiles
    turn = 0
    if CONFIG.LOADS > 0:
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            row, col = tile // col_tiles * CONFIG.BLOCK_M, tile % col_tiles * CONFIG.BLOCK_N
            for part in gl.static_range(PARTS):
                place = turn % GROUPS * PLACES + part % PLACES
                number = turn // GROUPS * (PARTS // PLACES) + part // PLACES
                at = [row, col + part * CONFIG.PART_COLS]
                full = loaded.index(place)
                mbarrier.wait(taken.index(place), (number & 1) ^ 1)
                mbarrier.expect(full, CONFIG.LOADS * 2 * CONFIG.BLOCK_M * CONFIG.PART_COLS)
                tma.async_copy_global_to_shared(x_tiles, at, full, places.index(place))
                if CONFIG.LOADS > 1:
                    other = places.index(OTHERS + place)
                    tma.async_copy_global_to_shared(other_x_tiles, at, full, other)
            turn += 1


@gluon.jit
def finish_part(
    acc, tile, turn, pointers, factor, descriptors, places, barriers, sizes, PART: gl.constexpr,
    GROUP: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """What follows the products of part of a tile; the sum of its squares, of the residual."""
    bias_ptr, norm_ptr, dloss_ptr, sums_ptr, _ = pointers
    _, _, _, _, y_tiles, other_tiles, _, _ = descriptors
    _, _, _, loaded, taken = barriers
    rows, cols, _ = sizes
    KIND: gl.constexpr = CONFIG.KIND
    OF_PART: gl.constexpr = acc.type.layout
    PARTS: gl.constexpr = CONFIG.BLOCK_N // CONFIG.PART_COLS
    PLACE: gl.constexpr = GROUP * PLACES + PART % PLACES
    OTHER_PLACE: gl.constexpr = PLACE + (CONFIG.SETS - 1) * GROUPS * PLACES
    place, other_place = places.index(PLACE), places.index(OTHER_PLACE)
    col_tiles = gl.cdiv(cols, CONFIG.BLOCK_N)
    first_row = tile // col_tiles * CONFIG.BLOCK_M
    first_col = tile % col_tiles * CONFIG.BLOCK_N + PART * CONFIG.PART_COLS
    row = first_row + gl.arange(0, CONFIG.BLOCK_M, gl.SliceLayout(1, OF_PART))
    col = first_col + gl.arange(0, CONFIG.PART_COLS, gl.SliceLayout(0, OF_PART))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(col < cols, 0)
    squares = 0.0
    if CONFIG.BIAS:
        acc = acc + gl.expand_dims(gl.load(bias_ptr + col, mask=col < cols, other=0.0), 0)
    if CONFIG.BACKWARD:
        # A step that was skipped.
        finite = gl.abs(gl.load(norm_ptr)) < float("inf")
    if CONFIG.LOADS > 0:
        number = turn * (PARTS // PLACES) + PART // PLACES
        mbarrier.wait(loaded.index(PLACE), number & 1)
        x = widened(place.load(OF_PART))
    if CONFIG.LOADS > 1:
        z = widened(other_place.load(OF_PART))
    other = acc
    if KIND == "hidden":
        y, _, _ = activated(acc, CONFIG)
    elif KIND == "residual":
        y = gl.where(inside, acc - x, 0.0)
        squares = gl.sum(gl.sum(y * y, 1), 0)
    elif KIND == "slope":
        _, slope, _ = activated(x, CONFIG)
        y = gl.where(inside, acc * slope, 0.0)
    elif KIND == "p_bar":
        if CONFIG.CURVED:
            _, slope, curve = activated(z, CONFIG)
            other = acc * x * curve
        else:
            _, slope, _ = activated(x, CONFIG)
        y = gl.where(finite, acc * slope, 0.0)
    elif KIND == "e_bar":
        if CONFIG.FROM_LOSS:
            acc = acc + gl.load(dloss_ptr).to(gl.float32) * x
        y = gl.where(inside & finite, acc, 0.0)
        other = -factor * y
    elif KIND == "z_bar":
        if CONFIG.CURVED:
            _, slope, _ = activated(z, CONFIG)
            y = acc * slope + x
        else:
            _, slope, _ = activated(x, CONFIG)
            y = acc * slope
        y = gl.where(inside & finite, y, 0.0)
    else:
        y = gl.where(finite, factor * acc, 0.0)
    if CONFIG.SUMS:
        sums_at = sums_ptr + (tile // col_tiles) * cols + col
        gl.store(sums_at, gl.sum(y, 0), mask=col < cols)
    if CONFIG.LOADS > 0 and PART > 0 and PART + 1 < PARTS:
        # The part before has left its place, which the one behind this takes.
        tma.store_wait(0)
        mbarrier.arrive(taken.index(GROUP * PLACES + (PART - 1) % PLACES), count=1)
    if CONFIG.OTHER:
        store_part(other_tiles, other_place, other.to(places.dtype), first_row, first_col)
        if CONFIG.SETS == 1:
            tma.store_wait(0)
    store_part(y_tiles, place, y.to(places.dtype), first_row, first_col)
    return squares


@gluon.jit
def multiply(
    descriptors, pointers, factor, buffers, barriers, sizes, GROUP: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """What a group does: every other tile of the program, its products and what follows them. It
    multiplies when the other has seen all operands of its own tile: a barrier of the ring says only
    whether an odd or an even number of copies have come.
    """
    a_shared, b_shared, places = buffers
    full, free, turns, _, taken = barriers
    _, _, _, _, losses_ptr = pointers
    rows, cols, depth = sizes
    STAGES: gl.constexpr = CONFIG.STAGES
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    OF_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    tiles = gl.cdiv(rows, BLOCK_M) * gl.cdiv(cols, BLOCK_N)
    programs = gl.num_programs(0)
    steps = gl.cdiv(depth, DEPTH) * CONFIG.PAIRS
    used = GROUP * steps
    for tile in range(gl.program_id(0) + GROUP * programs, tiles, GROUPS * programs):
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, OF_ACC)
        turn = tile // (GROUPS * programs)
        mbarrier.wait(turns.index(GROUP), (turn & 1) ^ (1 - GROUP))
        for step in range(steps):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            b = b_shared.index(stage)
            if CONFIG.TRANSPOSED:
                b = b.permute([1, 0])
            acc = warpgroup_mma(a_shared.index(stage), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if step > 0:
                mbarrier.arrive(free.index((used - 1) % STAGES), count=1)
            elif turn > 0:
                # The last tile's results have left their places.
                tma.store_wait(0)
                if CONFIG.LOADS > 0:
                    for part in gl.static_range(PLACES):
                        mbarrier.arrive(taken.index(GROUP * PLACES + part), count=1)
            used += 1
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((used - 1) % STAGES), count=1)
        # The other group's.
        used += steps
        left, right = halves_of(acc)
        rest = (tile, turn, pointers, factor, descriptors, places, barriers, sizes)
        if CONFIG.PART_COLS * 2 == BLOCK_N:
            squares = finish_part(left, *rest, 0, GROUP, CONFIG)
            squares += finish_part(right, *rest, 1, GROUP, CONFIG)
        else:
            first, second = halves_of(left)
            third, fourth = halves_of(right)
            squares = finish_part(first, *rest, 0, GROUP, CONFIG)
            squares += finish_part(second, *rest, 1, GROUP, CONFIG)
            squares += finish_part(third, *rest, 2, GROUP, CONFIG)
            squares += finish_part(fourth, *rest, 3, GROUP, CONFIG)
        if CONFIG.KIND == "residual":
            gl.store(losses_ptr + tile, squares)
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("rows", "cols", "depth"))
def hopper_rows_kernel(
    a_tiles,
    b_tiles,
    c_tiles,
    d_tiles,
    y_tiles,
    other_tiles,
    x_tiles,
    other_x_tiles,
    bias_ptr,
    norm_ptr,
    dloss_ptr,
    sums_ptr,
    losses_ptr,
    factor,
    rows,
    cols,
    depth,
    CONFIG: gl.constexpr,
):
    """y [rows, cols] and, where there is one, another tensor like it, from a b or from a b + c d.
    The right operands are [depth, cols], with ``TRANSPOSED`` [cols, depth]. CONFIG says which
    pointers are read.
    """
    STAGES: gl.constexpr = CONFIG.STAGES
    DTYPE: gl.constexpr = a_tiles.dtype
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES, CONFIG.BLOCK_M, DEPTH], a_tiles.layout)
    B_ROWS: gl.constexpr = CONFIG.BLOCK_N if CONFIG.TRANSPOSED else DEPTH
    B_COLS: gl.constexpr = DEPTH if CONFIG.TRANSPOSED else CONFIG.BLOCK_N
    b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, B_ROWS, B_COLS], b_tiles.layout)
    places = gl.allocate_shared_memory(
        *(DTYPE, [CONFIG.SETS * GROUPS * PLACES, CONFIG.BLOCK_M, CONFIG.PART_COLS]),
        y_tiles.layout,
    )
    full, free = barriers_of(STAGES, 1), barriers_of(STAGES, 1)
    turns = barriers_of(GROUPS, 1)
    loaded, taken = barriers_of(GROUPS * PLACES, 1), barriers_of(GROUPS * PLACES, 1)
    fence_async_shared()
    descriptors = (
        a_tiles, b_tiles, c_tiles, d_tiles, y_tiles, other_tiles, x_tiles, other_x_tiles,
    )  # fmt: skip
    pointers = (bias_ptr, norm_ptr, dloss_ptr, sums_ptr, losses_ptr)
    buffers = (a_shared, b_shared, places)
    barriers = (full, free, turns, loaded, taken)
    sizes = (rows, cols, depth)
    gl.warp_specialize(
        [
            (multiply, (descriptors, pointers, factor, buffers, barriers, sizes, 0, CONFIG)),
            (multiply, (descriptors, pointers, factor, buffers, barriers, sizes, 1, CONFIG)),
            (copy_tiles, (descriptors, buffers, barriers, sizes, CONFIG)),
            (load_tiles, (descriptors, buffers, barriers, sizes, CONFIG)),
        ],
        [4, 1, 1],
        [CONFIG.REGISTERS, CONFIG.COPYING_REGISTERS, CONFIG.COPYING_REGISTERS],
    )
