"""Gluon kernel of the products of Newton-Schulz on Hopper, for a stack of matrices each:

    c = scale (a b + start b')    b' the rows of b that c has

A program is GROUPS groups of four warps, each with ROWS rows of a tile of c in registers, and a
warp that copies slices of a and b into a ring of STAGES in shared memory. Programs stay and take
tile after tile. Sums are added in the order of a's columns, from the tile's own rows of b on where
these are added too: they are in shared memory then, and c starts with them.

CONFIG, beside the sizes:

    ROWS_FIRST  a lies as [rows of c, columns of a], else as its transpose
    COLS_FIRST  b lies as [columns of c, columns of a], else as its transpose
    STARTS      start b' is added
    SYMMETRIC   c is: only tiles on and below the diagonal are computed, and written twice
    TRANSPOSED  c is written as its transpose
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
from .._core.kernels_product_hopper import halves_of

# Columns of a in one slice, and rows of a group: a slice of a is square.
SLICE = gl.constexpr(64)


@gluon.jit
def place_of(tile, sizes, CONFIG: gl.constexpr):
    """Which matrix a tile of c is of, and its first row and column there."""
    _tiles, tiles_of_matrix, row_tiles, _rows, _cols, _steps = sizes
    matrix = tile // tiles_of_matrix
    tile -= matrix * tiles_of_matrix
    if CONFIG.SYMMETRIC:
        gl.static_assert(CONFIG.BLOCK_COLS == 2 * CONFIG.GROUPS * CONFIG.ROWS)
        # Two rows of tiles have as many: 1 and 1, 2 and 2, so that p (p + 1) are above a pair. The
        # root is rounded.
        pair = (gl.sqrt(tile.to(gl.float32) + 0.25) - 0.5).to(gl.int32)
        pair -= (pair * (pair + 1) > tile).to(gl.int32)
        pair += ((pair + 1) * (pair + 2) <= tile).to(gl.int32)
        tile -= pair * (pair + 1)
        row_tile = 2 * pair + tile // (pair + 1)
        col_tile = tile % (pair + 1)
    else:
        # Those of the same columns one after the other: a is the smaller one.
        row_tile = tile % row_tiles
        col_tile = tile // row_tiles
    return matrix, row_tile * (CONFIG.GROUPS * CONFIG.ROWS), col_tile * CONFIG.BLOCK_COLS


@gluon.jit
def copy_slices(descriptors, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the copying warp does: slices of each tile's rows of a and columns of b, each into a
    place of the ring that is free.
    """
    a_tiles, b_tiles = descriptors
    a_shared, b_shared = buffers
    full, free = barriers
    tiles, _tiles_of_matrix, _row_tiles, rows, cols, steps = sizes
    GROUPS: gl.constexpr = CONFIG.GROUPS
    STAGES: gl.constexpr = CONFIG.STAGES
    copied = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, row, col = place_of(tile, sizes, CONFIG)
        # Of the stacked rows of a and b.
        terms = matrix * steps * SLICE
        a_row = matrix * rows + row if CONFIG.ROWS_FIRST else terms
        b_row = matrix * cols + col if CONFIG.COLS_FIRST else terms
        at = row if CONFIG.STARTS else 0
        for _ in range(steps):
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), ((copied // STAGES) & 1) ^ 1)
            elements: gl.constexpr = (GROUPS * CONFIG.ROWS + CONFIG.BLOCK_COLS) * SLICE
            mbarrier.expect(full.index(stage), 2 * elements)
            for group in gl.static_range(GROUPS):
                a = a_shared.index(stage * GROUPS + group)
                if CONFIG.ROWS_FIRST:
                    tma.async_copy_global_to_shared(
                        a_tiles, [a_row + group * CONFIG.ROWS, at], full.index(stage), a
                    )
                else:
                    tma.async_copy_global_to_shared(
                        a_tiles, [a_row + at, row + group * CONFIG.ROWS], full.index(stage), a
                    )
            b = b_shared.index(stage)
            if CONFIG.COLS_FIRST:
                tma.async_copy_global_to_shared(b_tiles, [b_row, at], full.index(stage), b)
            else:
                tma.async_copy_global_to_shared(b_tiles, [b_row + at, col], full.index(stage), b)
            at += SLICE
            if CONFIG.STARTS:
                at = gl.where(at == steps * SLICE, 0, at)
            copied += 1


@gluon.jit
def slice_of_b(b_shared, stage, CONFIG: gl.constexpr):
    """``[SLICE, BLOCK_COLS]``"""
    b = b_shared.index(stage)
    if CONFIG.COLS_FIRST:
        b = b.permute([1, 0])
    return b


@gluon.jit
def add_slice(c, used, buffers, barriers, USE: gl.constexpr, GROUP: gl.constexpr, CONFIG):
    """c with the product of the slices that are next in the ring, under way; without ``USE`` that
    product alone.
    """
    a_shared, b_shared = buffers
    full, _free = barriers
    stage = used % CONFIG.STAGES
    mbarrier.wait(full.index(stage), (used // CONFIG.STAGES) & 1)
    a = a_shared.index(stage * CONFIG.GROUPS + GROUP)
    if not CONFIG.ROWS_FIRST:
        a = a.permute([1, 0])
    return warpgroup_mma(a, slice_of_b(b_shared, stage, CONFIG), c, use_acc=USE, is_async=True)


@gluon.jit
def store_part(c_tiles, part, place, places, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """Write a square of c where it belongs, each through a place in shared memory of its own."""
    c_row, row, col, rows, cols = place
    direct, transposed = places.index(2 * GROUP), places.index(2 * GROUP + 1)
    if CONFIG.SYMMETRIC:
        if (col <= row) & (row < rows):
            # Where the last ones went from.
            tma.store_wait(0)
            direct.store(part)
            if col < row:
                transposed.permute([1, 0]).store(part)
            fence_async_shared()
            tma.async_copy_shared_to_global(c_tiles, [c_row + row, col], direct)
            if col < row:
                tma.async_copy_shared_to_global(c_tiles, [c_row + col, row], transposed)
    elif (row < rows) & (col < cols):
        tma.store_wait(0)
        if CONFIG.TRANSPOSED:
            transposed.permute([1, 0]).store(part)
            fence_async_shared()
            tma.async_copy_shared_to_global(c_tiles, [c_row + col, row], transposed)
        else:
            direct.store(part)
            fence_async_shared()
            tma.async_copy_shared_to_global(c_tiles, [c_row + row, col], direct)


@gluon.jit
def multiply(
    buffers,
    barriers,
    places,
    c_tiles,
    factors,
    sizes,
    GROUP: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """What each group does: its ROWS rows of every tile, slice by slice."""
    full, free = barriers
    _a_shared, b_shared = buffers
    start, scale = factors
    tiles, _tiles_of_matrix, _row_tiles, rows, cols, steps = sizes
    ROWS: gl.constexpr = CONFIG.ROWS
    COLS: gl.constexpr = CONFIG.BLOCK_COLS
    STAGES: gl.constexpr = CONFIG.STAGES
    PART: gl.constexpr = COLS // 4
    DTYPE: gl.constexpr = c_tiles.dtype
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    used = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, row, col = place_of(tile, sizes, CONFIG)
        row += GROUP * ROWS
        if CONFIG.STARTS:
            own = used + GROUP
            mbarrier.wait(full.index(own % STAGES), (own // STAGES) & 1)
            c = slice_of_b(b_shared, own % STAGES, CONFIG).load(OF_C).to(gl.float32) * start
        else:
            c = gl.zeros([ROWS, COLS], gl.float32, OF_C)
        c = add_slice(c, used, buffers, barriers, CONFIG.STARTS, GROUP, CONFIG)
        c = warpgroup_mma_wait(1, deps=(c,))
        for _ in range(1, steps):
            used += 1
            c = add_slice(c, used, buffers, barriers, True, GROUP, CONFIG)
            c = warpgroup_mma_wait(1, deps=(c,))
            mbarrier.arrive(free.index((used - 1) % STAGES), count=1)
        c = warpgroup_mma_wait(0, deps=(c,))
        mbarrier.arrive(free.index(used % STAGES), count=1)
        used += 1
        left, right = halves_of(c)
        parts = halves_of(left) + halves_of(right)
        c_row = matrix * (cols if CONFIG.TRANSPOSED else rows)
        for part in gl.static_range(4):
            place = c_row, row, col + part * PART, rows, cols
            rounded = (parts[part] * scale).to(DTYPE)
            store_part(c_tiles, rounded, place, places, GROUP, CONFIG)
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("tiles", "tiles_of_matrix", "row_tiles", "rows", "cols", "steps"))
def hopper_product_kernel(
    a_tiles,
    b_tiles,
    c_tiles,
    start,
    scale,
    tiles,
    tiles_of_matrix,
    row_tiles,
    rows,
    cols,
    steps,
    CONFIG: gl.constexpr,
):
    """A program takes every so many-th tile of c, of which each has ``rows`` and ``cols``."""
    GROUPS: gl.constexpr = CONFIG.GROUPS
    STAGES: gl.constexpr = CONFIG.STAGES
    DTYPE: gl.constexpr = a_tiles.dtype
    gl.static_assert(GROUPS == 2 and CONFIG.ROWS == SLICE)
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES * GROUPS, SLICE, SLICE], a_tiles.layout)
    B_ROWS: gl.constexpr = CONFIG.BLOCK_COLS if CONFIG.COLS_FIRST else SLICE
    B_COLS: gl.constexpr = SLICE if CONFIG.COLS_FIRST else CONFIG.BLOCK_COLS
    b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, B_ROWS, B_COLS], b_tiles.layout)
    places = gl.allocate_shared_memory(DTYPE, [2 * GROUPS, SLICE, SLICE], c_tiles.layout)
    full, free = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    fence_async_shared()
    buffers, barriers = (a_shared, b_shared), (full, free)
    sizes = tiles, tiles_of_matrix, row_tiles, rows, cols, steps
    factors = start, scale
    gl.warp_specialize(
        [
            (multiply, (buffers, barriers, places, c_tiles, factors, sizes, 0, CONFIG)),
            (multiply, (buffers, barriers, places, c_tiles, factors, sizes, 1, CONFIG)),
            (copy_slices, ((a_tiles, b_tiles), buffers, barriers, sizes, CONFIG)),
        ],
        [4, 1],
        [CONFIG.REGISTERS, CONFIG.COPYING_REGISTERS],
    )
