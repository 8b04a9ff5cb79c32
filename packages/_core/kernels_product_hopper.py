"""Gluon device functions of a product of matrices with an epilogue, for Hopper: c = a b, for few
columns of a.

``multiply_panels`` is a kernel's whole body. A program holds a panel of b in shared memory, all
rows of BLOCK_COLS columns, and rows of a pass by, slice by slice, each into a place that a warp of
its own fills again as soon as it is free: a number of a that is read serves all columns of the
panel, and the panel all rows that the program has. Two groups of four warps take tiles of ROWS rows
in turn. There are places for the slices of ROUNDS tiles, 1 or 2: one group multiplies while the
other is at its epilogue, and the tensor cores do not wait for it.

Programs share the tiles, those of the same columns one after the other, in equal parts: most have
rows of one panel, and programs with the same rows of different panels read them at about the same
time, from the L2 cache.

The epilogue is a device function, called once for each PART_COLS columns of a tile or, where
CONFIG.WHOLE, for all of them at once, PART being 0:

    EPILOGUE(c, row, col, operands, places, PART, GROUP, CONFIG)

c: the sums, [ROWS, PART_COLS] in fp32; row and col: its first ones; operands: what
``multiply_panels`` was handed; places: PLACES a group in shared memory, from PLACES GROUP on, by
which ``store_part`` writes tiles. Where CONFIG.LOADS, the place PLACES GROUP + PART holds the same
tile of the matrix that ``loaded`` describes, and its own result may take that place. What lies
beyond the ends of a or b is zero in sums, and beyond those of an output not stored. Sums are added
in the order of a's columns. Where CONFIG.COLUMNS is not 0, a panel brings so many numbers in fp32
for each of its columns, which the epilogue finds in shared memory.

CONFIG has SLICES, the slices of a's columns, ROWS, BLOCK_COLS, PART_COLS, ROUNDS, PLACES, LOADS,
WHOLE, COLUMNS, REGISTERS and COPYING_REGISTERS, and COLS_FIRST: whether b lies as [columns of c,
columns of a], as a linear layer's weight does, or as [columns of a, columns of c].
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
GROUPS = gl.constexpr(2)


@gluon.jit
def tiles_of_program(sizes):
    """The first of a program's tiles and the one behind its last."""
    row_tiles, col_tiles = sizes
    tiles = row_tiles * col_tiles
    first = (gl.program_id(0).to(gl.int64) * tiles // gl.num_programs(0)).to(gl.int32)
    last = ((gl.program_id(0).to(gl.int64) + 1) * tiles // gl.num_programs(0)).to(gl.int32)
    return first, last


@gluon.jit
def copy_tiles(descriptors, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the copying warp does: each panel, with what it brings for its columns, and slices of
    each tile's rows of a, each into a place that is free; where CONFIG.LOADS, the tile that the
    epilogue reads behind them.
    """
    a_tiles, b_tiles, loaded_tiles, columns_tiles = descriptors
    a_shared, panel, places, columns = buffers
    full, free, panel_full, panel_free, loaded, stored = barriers
    SLICES: gl.constexpr = CONFIG.SLICES
    ROUNDS: gl.constexpr = CONFIG.ROUNDS
    COLUMNS: gl.constexpr = CONFIG.COLUMNS
    row_tiles, _col_tiles = sizes
    first, last = tiles_of_program(sizes)
    first_panel = first // row_tiles
    for number in range(first_panel, (last - 1) // row_tiles + 1):
        begin = gl.maximum(first, number * row_tiles)
        end = gl.minimum(last, (number + 1) * row_tiles)
        col = number * CONFIG.BLOCK_COLS
        # All products with the last panel are done.
        mbarrier.wait(panel_free, ((number - first_panel) & 1) ^ 1)
        for tile in range(begin, end):
            row = (tile - number * row_tiles) * CONFIG.ROWS
            turn = tile - first
            group = turn % GROUPS
            for step in gl.static_range(SLICES):
                if tile == begin:
                    OF_COLUMNS: gl.constexpr = 4 * COLUMNS if step == 0 else 0
                    mbarrier.expect(
                        panel_full.index(step), CONFIG.BLOCK_COLS * (2 * SLICE + OF_COLUMNS)
                    )
                    if step == 0:
                        for which in gl.static_range(COLUMNS):
                            tma.async_copy_global_to_shared(
                                *(columns_tiles, [which, col], panel_full.index(step)),
                                columns.index(which),
                            )
                    if CONFIG.COLS_FIRST:
                        tma.async_copy_global_to_shared(
                            *(b_tiles, [col, step * SLICE], panel_full.index(step)),
                            panel.index(step),
                        )
                    else:
                        tma.async_copy_global_to_shared(
                            *(b_tiles, [step * SLICE, col], panel_full.index(step)),
                            panel.index(step),
                        )
                stage = turn % ROUNDS * SLICES + step
                mbarrier.wait(free.index(stage), ((turn // ROUNDS) & 1) ^ 1)
                arrival = full.index(group * SLICES + step)
                mbarrier.expect(arrival, 2 * CONFIG.ROWS * SLICE)
                tma.async_copy_global_to_shared(
                    a_tiles, [row, step * SLICE], arrival, a_shared.index(stage)
                )
            if CONFIG.LOADS:
                PARTS: gl.constexpr = CONFIG.BLOCK_COLS // CONFIG.PART_COLS
                mbarrier.wait(stored.index(group), ((turn // GROUPS) & 1) ^ 1)
                mbarrier.expect(loaded.index(group), 2 * CONFIG.ROWS * CONFIG.BLOCK_COLS)
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        *(loaded_tiles, [row, col + part * CONFIG.PART_COLS], loaded.index(group)),
                        places.index(CONFIG.PLACES * group + part),
                    )


@gluon.jit
def halves_of(c):
    """The left and the right half of the columns: no number moves between registers."""
    ROWS: gl.constexpr = c.shape[0]
    HALF: gl.constexpr = c.shape[1] // 2
    return c.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()


@gluon.jit
def store_part(tiles, place, part, row, col):
    """Write a tile, rounded, through a place in shared memory that is free."""
    place.store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(tiles, [row, col], place)


@gluon.jit
def multiply(
    buffers,
    barriers,
    sizes,
    operands,
    EPILOGUE: gl.constexpr,
    GROUP: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """What each group does: every other tile of the program, slice by slice, and the epilogue."""
    a_shared, panel, places, _columns = buffers
    full, free, panel_full, panel_free, loaded, stored = barriers
    ROWS: gl.constexpr = CONFIG.ROWS
    COLS: gl.constexpr = CONFIG.BLOCK_COLS
    PART_COLS: gl.constexpr = CONFIG.PART_COLS
    SLICES: gl.constexpr = CONFIG.SLICES
    # This group's tiles have the same places every time, but they may be the other's, too: each
    # has barriers of its own for what has come.
    STAGE: gl.constexpr = GROUP % CONFIG.ROUNDS * SLICES
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    gl.static_assert(PART_COLS * 2 == COLS)
    row_tiles, _col_tiles = sizes
    first, last = tiles_of_program(sizes)
    first_panel = first // row_tiles
    for number in range(first_panel, (last - 1) // row_tiles + 1):
        begin = gl.maximum(first, number * row_tiles)
        end = gl.minimum(last, (number + 1) * row_tiles)
        col = number * COLS
        for tile in range(begin + ((GROUP + begin - first) & 1), end, GROUPS):
            turn = tile - first
            row = (tile - number * row_tiles) * ROWS
            c = gl.zeros([ROWS, COLS], gl.float32, OF_C)
            for step in gl.static_range(SLICES):
                mbarrier.wait(panel_full.index(step), (number - first_panel) & 1)
                mbarrier.wait(full.index(GROUP * SLICES + step), (turn // GROUPS) & 1)
                a = a_shared.index(STAGE + step)
                b = panel.index(step)
                if CONFIG.COLS_FIRST:
                    b = b.permute([1, 0])
                c = warpgroup_mma(a, b, c, use_acc=step > 0, is_async=True)
                if step > 0:
                    c = warpgroup_mma_wait(1, deps=(c,))
                    mbarrier.arrive(free.index(STAGE + step - 1), count=1)
            c = warpgroup_mma_wait(0, deps=(c,))
            mbarrier.arrive(free.index(STAGE + SLICES - 1), count=1)
            if CONFIG.LOADS:
                mbarrier.wait(loaded.index(GROUP), (turn // GROUPS) & 1)
            if CONFIG.WHOLE:
                EPILOGUE(c, row, col, operands, places, 0, GROUP, CONFIG)
            else:
                left, right = halves_of(c)
                EPILOGUE(left, row, col, operands, places, 0, GROUP, CONFIG)
                EPILOGUE(right, row, col + PART_COLS, operands, places, 1, GROUP, CONFIG)
            if CONFIG.LOADS:
                tma.store_wait(0)
                mbarrier.arrive(stored.index(GROUP), count=1)
        # A group without a tile of this panel lets it pass, too: barriers tell even turns from odd
        # ones and no more.
        for step in gl.static_range(SLICES):
            mbarrier.wait(panel_full.index(step), (number - first_panel) & 1)
        mbarrier.arrive(panel_free, count=1)
    tma.store_wait(0)


@gluon.jit
def multiply_panels(
    a_tiles,
    b_tiles,
    loaded_tiles,
    columns_tiles,
    columns,
    sizes,
    operands,
    EPILOGUE: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """A program takes its part of the tiles of c.

    Args:
        a_tiles: descriptor of a, [rows, columns], in tiles of [ROWS, SLICE].
        b_tiles: of b, in tiles of [BLOCK_COLS, SLICE] or, not COLS_FIRST, [SLICE, BLOCK_COLS].
        loaded_tiles: where CONFIG.LOADS, of a matrix of c's shape in tiles of [ROWS, PART_COLS].
        columns_tiles: where CONFIG.COLUMNS, of a matrix in fp32 with so many rows, in tiles of
            [1, BLOCK_COLS].
        columns: the places of such tiles in shared memory, [COLUMNS, 1, BLOCK_COLS].
        sizes: tiles of c's rows and of its columns.
        operands: what the epilogue reads and writes.
    """
    SLICES: gl.constexpr = CONFIG.SLICES
    STAGES: gl.constexpr = CONFIG.ROUNDS * SLICES
    DTYPE: gl.constexpr = a_tiles.dtype
    a_shared = gl.allocate_shared_memory(DTYPE, [STAGES, CONFIG.ROWS, SLICE], a_tiles.layout)
    B_ROWS: gl.constexpr = CONFIG.BLOCK_COLS if CONFIG.COLS_FIRST else SLICE
    B_COLS: gl.constexpr = SLICE if CONFIG.COLS_FIRST else CONFIG.BLOCK_COLS
    panel = gl.allocate_shared_memory(DTYPE, [SLICES, B_ROWS, B_COLS], b_tiles.layout)
    OF_PLACES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    places = gl.allocate_shared_memory(
        DTYPE, [CONFIG.PLACES * GROUPS, CONFIG.ROWS, CONFIG.PART_COLS], OF_PLACES
    )
    full, free = barriers_of(GROUPS * SLICES, 1), barriers_of(STAGES, 1)
    panel_full, panel_free = barriers_of(SLICES, 1), barriers_of(1, GROUPS)
    loaded, stored = barriers_of(GROUPS, 1), barriers_of(GROUPS, 1)
    fence_async_shared()
    buffers = (a_shared, panel, places, columns)
    barriers = (full, free, panel_full, panel_free.index(0), loaded, stored)
    descriptors = (a_tiles, b_tiles, loaded_tiles, columns_tiles)
    gl.warp_specialize(
        [
            (multiply, (buffers, barriers, sizes, operands, EPILOGUE, 0, CONFIG)),
            (multiply, (buffers, barriers, sizes, operands, EPILOGUE, 1, CONFIG)),
            (copy_tiles, (descriptors, buffers, barriers, sizes, CONFIG)),
        ],
        [4, 1],
        [CONFIG.REGISTERS, CONFIG.COPYING_REGISTERS],
    )
