"""Gluon device functions of a product of matrices with an epilogue, for Hopper: c = a b.

``multiply_tiles`` is a kernel's whole body. A program is GROUPS groups of four warps, each with
ROWS rows of a tile of c in registers, and a warp that copies slices of a and b into a ring of
STAGES in shared memory. Programs stay and take tile after tile, those of the same rows one after
the other, so that what programs read at one time is in the L2 cache. The groups share the ring and
need not be at the same place of it: while one is at its epilogue, the other multiplies, and slices
of the next tile come in.

The epilogue is a device function, called once for each PART_COLS columns of a group's rows:

    EPILOGUE(c, row, col, operands, places, GROUP, CONFIG)

c: the sums, [ROWS, PART_COLS] in fp32; row and col: its first ones; operands: what
``multiply_tiles`` was handed; places: two places a group in shared memory, 2 GROUP and the next, by
which ``store_part`` and ``store_in_turn`` write tiles. What lies beyond the ends of a or b is zero
in sums, and beyond those of an output not stored. Sums are added in the order of a's columns.

CONFIG has GROUPS, ROWS, BLOCK_COLS, PART_COLS, STAGES, REGISTERS and COPYING_REGISTERS, and
COLS_FIRST: whether b lies as [columns of c, columns of a], as a linear layer's weight does, or as
[columns of a, columns of c].
"""

from __future__ import annotations

from .kernels_barriers import barriers_of
from .kernels_gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Columns of a in one slice.
SLICE = gl.constexpr(64)


@gluon.jit
def place_of(tile, sizes, CONFIG: gl.constexpr):
    """The first row and the first column of a tile of c."""
    _tiles, col_tiles, _steps = sizes
    row = tile // col_tiles * (CONFIG.GROUPS * CONFIG.ROWS)
    return row, tile % col_tiles * CONFIG.BLOCK_COLS


@gluon.jit
def copy_slices(descriptors, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the copying warp does: slices of each tile's rows of a and columns of b, each into a
    place of the ring that is free.
    """
    a_tiles, b_tiles = descriptors
    a_shared, b_shared = buffers
    full, free = barriers
    tiles, _col_tiles, steps = sizes
    GROUPS: gl.constexpr = CONFIG.GROUPS
    STAGES: gl.constexpr = CONFIG.STAGES
    copied = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = place_of(tile, sizes, CONFIG)
        for step in range(steps):
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), ((copied // STAGES) & 1) ^ 1)
            elements: gl.constexpr = (GROUPS * CONFIG.ROWS + CONFIG.BLOCK_COLS) * SLICE
            mbarrier.expect(full.index(stage), 2 * elements)
            at = step * SLICE
            for group in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    *(a_tiles, [row + group * CONFIG.ROWS, at], full.index(stage)),
                    a_shared.index(stage * GROUPS + group),
                )
            if CONFIG.COLS_FIRST:
                tma.async_copy_global_to_shared(
                    b_tiles, [col, at], full.index(stage), b_shared.index(stage)
                )
            else:
                tma.async_copy_global_to_shared(
                    b_tiles, [at, col], full.index(stage), b_shared.index(stage)
                )
            copied += 1


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
    b = b_shared.index(stage)
    if CONFIG.COLS_FIRST:
        b = b.permute([1, 0])
    return warpgroup_mma(a, b, c, use_acc=USE, is_async=True)


@gluon.jit
def halves_of(c):
    """The left and the right half of the columns: no number moves between registers."""
    ROWS: gl.constexpr = c.shape[0]
    HALF: gl.constexpr = c.shape[1] // 2
    return c.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()


@gluon.jit
def parts_of(c, PARTS: gl.constexpr):
    """The columns in so many parts: 1, 2 or 4."""
    gl.static_assert(PARTS == 1 or PARTS == 2 or PARTS == 4)
    if PARTS == 1:
        return (c,)
    elif PARTS == 2:
        return halves_of(c)
    else:
        left, right = halves_of(c)
        return halves_of(left) + halves_of(right)


@gluon.jit
def store_part(tiles, place, part, row, col):
    """Write a tile, rounded, through a place in shared memory that is free."""
    place.store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(tiles, [row, col], place)


@gluon.jit
def store_in_turn(tiles, places, part, row, col, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """Write a tile, the only one that an epilogue writes, through the one of both places that the
    last one has not taken.
    """
    # Where the last but one went from.
    tma.store_wait(1)
    place = 2 * GROUP + (col // CONFIG.PART_COLS) % 2
    store_part(tiles, places.index(place), part, row, col)


@gluon.jit
def multiply(
    buffers,
    barriers,
    places,
    sizes,
    operands,
    EPILOGUE: gl.constexpr,
    GROUP: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """What each group does: its ROWS rows of every tile, slice by slice, and the epilogue."""
    _full, free = barriers
    tiles, _col_tiles, steps = sizes
    ROWS: gl.constexpr = CONFIG.ROWS
    COLS: gl.constexpr = CONFIG.BLOCK_COLS
    STAGES: gl.constexpr = CONFIG.STAGES
    PARTS: gl.constexpr = COLS // CONFIG.PART_COLS
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    none = gl.zeros([ROWS, COLS], gl.float32, OF_C)
    used = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = place_of(tile, sizes, CONFIG)
        c = add_slice(none, used, buffers, barriers, False, GROUP, CONFIG)
        c = warpgroup_mma_wait(1, deps=(c,))
        for _ in range(1, steps):
            used += 1
            c = add_slice(c, used, buffers, barriers, True, GROUP, CONFIG)
            c = warpgroup_mma_wait(1, deps=(c,))
            mbarrier.arrive(free.index((used - 1) % STAGES), count=1)
        c = warpgroup_mma_wait(0, deps=(c,))
        mbarrier.arrive(free.index(used % STAGES), count=1)
        used += 1
        parts = parts_of(c, PARTS)
        for part in gl.static_range(PARTS):
            at = col + part * CONFIG.PART_COLS
            EPILOGUE(parts[part], row + GROUP * ROWS, at, operands, places, GROUP, CONFIG)
    tma.store_wait(0)


@gluon.jit
def multiply_tiles(a_tiles, b_tiles, sizes, operands, EPILOGUE: gl.constexpr, CONFIG: gl.constexpr):
    """A program takes every so many-th tile of c.

    Args:
        a_tiles: descriptor of a, [rows, columns], in tiles of [ROWS, SLICE].
        b_tiles: of b, in tiles of [BLOCK_COLS, SLICE] or, not COLS_FIRST, [SLICE, BLOCK_COLS].
        sizes: tiles of c, those of the same rows, and slices of a, at least 1.
        operands: what the epilogue reads and writes.
    """
    GROUPS: gl.constexpr = CONFIG.GROUPS
    STAGES: gl.constexpr = CONFIG.STAGES
    DTYPE: gl.constexpr = a_tiles.dtype
    gl.static_assert(GROUPS == 2)
    a_shared = gl.allocate_shared_memory(
        DTYPE, [STAGES * GROUPS, CONFIG.ROWS, SLICE], a_tiles.layout
    )
    B_ROWS: gl.constexpr = CONFIG.BLOCK_COLS if CONFIG.COLS_FIRST else SLICE
    B_COLS: gl.constexpr = SLICE if CONFIG.COLS_FIRST else CONFIG.BLOCK_COLS
    b_shared = gl.allocate_shared_memory(DTYPE, [STAGES, B_ROWS, B_COLS], b_tiles.layout)
    OF_PLACES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    places = gl.allocate_shared_memory(
        DTYPE, [2 * GROUPS, CONFIG.ROWS, CONFIG.PART_COLS], OF_PLACES
    )
    full, free = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    fence_async_shared()
    buffers, barriers = (a_shared, b_shared), (full, free)
    gl.warp_specialize(
        [
            (multiply, (buffers, barriers, places, sizes, operands, EPILOGUE, 0, CONFIG)),
            (multiply, (buffers, barriers, places, sizes, operands, EPILOGUE, 1, CONFIG)),
            (copy_slices, ((a_tiles, b_tiles), buffers, barriers, sizes, CONFIG)),
        ],
        [4, 1],
        [CONFIG.REGISTERS, CONFIG.COPYING_REGISTERS],
    )
