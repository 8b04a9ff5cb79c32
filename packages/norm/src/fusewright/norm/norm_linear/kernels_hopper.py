"""Gluon kernel of a norm of rows and the linear layer behind it, for Hopper.

    z = x_hat * (norm_weight + weight_offset) + norm_bias,  rounded    y = z weight^T + bias

x_hat as in row_norm: the row divided by its root mean square or, with ``CENTER``, the centred row
by its standard deviation. A program has ROWS rows of x for each of its GROUPS of four warps in
shared memory, whole, and normalises them there: z is rounded as layer_norm and rms_norm round it,
and no tensor of its size is written or read. Tiles of weight pass by in a ring of STAGES that a
further warp fills, so that one reading of x serves all columns of y, and a tile of weight all rows
of the program. The ring has what x leaves, which for wide rows is little: there a tile of y goes to
memory in halves, whose place is smaller. Where rows are few, several programs normalise the same
ones, each for its part of the columns.

The groups share the ring and need not be at the same place of it: while one stores a tile of y, the
other multiplies.
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

# Rows of a group, and columns of x in one slice of shared memory.
ROWS = gl.constexpr(64)
SLICE = gl.constexpr(64)


@gluon.jit
def work_of(piece, sizes):
    """The block of rows of a piece of work, and the first of its tiles of columns and the one
    behind its last.
    """
    _pieces, parts, tiles = sizes
    part = piece % parts
    return piece // parts, part * tiles // parts, (part + 1) * tiles // parts


@gluon.jit
def copy_tiles(descriptors, buffers, barriers, sizes, CONFIG: gl.constexpr):
    """What the copying warp does: the rows of each piece, then tiles of weight, slice by slice,
    each into a place that is free.
    """
    x_tiles, weight_tiles, _ = descriptors
    x_shared, weight_shared, _ = buffers
    x_full, x_free, full, free = barriers
    SLICES: gl.constexpr = CONFIG.SLICES
    GROUPS: gl.constexpr = CONFIG.GROUPS
    copied = 0
    for piece in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        block, first, last = work_of(piece, sizes)
        turn = piece // gl.num_programs(0)
        for group in gl.static_range(GROUPS):
            mbarrier.wait(x_free.index(group), (turn & 1) ^ 1)
            mbarrier.expect(x_full.index(group), SLICES * ROWS * SLICE * 2)
            row = (block * GROUPS + group) * ROWS
            for part in gl.static_range(SLICES):
                tma.async_copy_global_to_shared(
                    *(x_tiles, [row, part * SLICE], x_full.index(group)),
                    x_shared.index(group * SLICES + part),
                )
        for tile in range(first, last):
            for step in range(SLICES):
                stage = copied % CONFIG.STAGES
                mbarrier.wait(free.index(stage), ((copied // CONFIG.STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), CONFIG.BLOCK_COLS * SLICE * 2)
                tma.async_copy_global_to_shared(
                    *(weight_tiles, [tile * CONFIG.BLOCK_COLS, step * SLICE], full.index(stage)),
                    weight_shared.index(stage),
                )
                copied += 1


@gluon.jit
def normalise(
    x_shared, pointers, floats, first_row, rows, keeps, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """z in place of a group's rows of x, and, where they are kept, the statistics of the rows."""
    norm_weight_ptr, norm_bias_ptr, _bias_ptr, mean_ptr, rstd_ptr = pointers
    eps, weight_offset = floats
    SLICES: gl.constexpr = CONFIG.SLICES
    DTYPE: gl.constexpr = x_shared.dtype
    BY_LANE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, BY_LANE)
    col = gl.arange(0, SLICE, gl.SliceLayout(0, BY_LANE))
    slices = ()
    # Columns of the last slice that are none of x are zeros.
    mean = gl.zeros([ROWS], gl.float32, BY_ROW)
    if CONFIG.CENTER:
        total = gl.zeros([ROWS, SLICE], gl.float32, BY_LANE)
    for part in gl.static_range(SLICES):
        x = x_shared.index(GROUP * SLICES + part).load(BY_LANE)
        slices += (x,)  # type: ignore[assignment]
        if CONFIG.CENTER:
            total += x.to(gl.float32)
    if CONFIG.CENTER:
        mean = gl.sum(total, 1) / CONFIG.COLS
    squares = gl.zeros([ROWS, SLICE], gl.float32, BY_LANE)
    for part in gl.static_range(SLICES):
        x = slices[part].to(gl.float32) - gl.expand_dims(mean, 1)
        if CONFIG.CENTER and (part + 1) * SLICE > CONFIG.COLS:
            within = (part * SLICE + col < CONFIG.COLS).to(gl.float32)
            x = x * gl.expand_dims(within, 0)
        squares += x * x
    rstd = gl.rsqrt(gl.sum(squares, 1) / CONFIG.COLS + eps)
    for part in gl.static_range(SLICES):
        at = part * SLICE + col
        inside = at < CONFIG.COLS
        z = (slices[part].to(gl.float32) - gl.expand_dims(mean, 1)) * gl.expand_dims(rstd, 1)
        if CONFIG.NORM_WEIGHT:
            norm_weight = gl.load(norm_weight_ptr + at, mask=inside, other=0.0).to(gl.float32)
            z = z * gl.expand_dims(norm_weight + weight_offset, 0)
        if CONFIG.NORM_BIAS:
            norm_bias = gl.load(norm_bias_ptr + at, mask=inside, other=0.0).to(gl.float32)
            z = z + gl.expand_dims(norm_bias, 0)
        if (part + 1) * SLICE > CONFIG.COLS:
            z = gl.where(gl.expand_dims(inside, 0) & (gl.zeros_like(z) == 0.0), z, 0.0)
        x_shared.index(GROUP * SLICES + part).store(z.to(DTYPE))
    if keeps:
        row = first_row + gl.arange(0, ROWS, BY_ROW)
        if CONFIG.CENTER:
            gl.store(mean_ptr + row, mean, mask=row < rows)
        gl.store(rstd_ptr + row, rstd, mask=row < rows)
    fence_async_shared()


@gluon.jit
def add_product(y, part, used, buffers, barriers, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """y with the product of a slice of the group's rows and the slice of weight that is next in the
    ring, under way.
    """
    x_shared, weight_shared, _ = buffers
    _, _, full, _ = barriers
    STAGES: gl.constexpr = CONFIG.STAGES
    stage = used % STAGES
    mbarrier.wait(full.index(stage), (used // STAGES) & 1)
    z = x_shared.index(GROUP * CONFIG.SLICES + part)
    w = weight_shared.index(stage).permute([1, 0])
    return warpgroup_mma(z, w, y, use_acc=part > 0, is_async=True)


@gluon.jit
def tile_of_y(y, at, bias_ptr, used, buffers, barriers, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """A tile of y, rounded, of whose products the first is under way; the places of the ring are
    free again. ``at``: where its columns are, and how many y has.
    """
    x_shared, _, _ = buffers
    _, _, _, free = barriers
    SLICES: gl.constexpr = CONFIG.SLICES
    STAGES: gl.constexpr = CONFIG.STAGES
    col, cols = at
    if CONFIG.BIAS:
        # On its way while the products are.
        bias = gl.load(bias_ptr + col, mask=col < cols, other=0.0)
    for part in gl.static_range(1, SLICES):
        y = add_product(y, part, used + part, buffers, barriers, GROUP, CONFIG)
        y = warpgroup_mma_wait(1, deps=(y,))
        mbarrier.arrive(free.index((used + part - 1) % STAGES), count=1)
    y = warpgroup_mma_wait(0, deps=(y,))
    mbarrier.arrive(free.index((used + SLICES - 1) % STAGES), count=1)
    if CONFIG.BIAS:
        y = y + gl.expand_dims(bias.to(gl.float32), 0)
    return y.to(x_shared.dtype)


@gluon.jit
def store_tile(y_tiles, y_shared, rounded, row, col, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """A group's rows of a tile of y to memory, whole or one half after the other."""
    if CONFIG.STORED_COLS == CONFIG.BLOCK_COLS:
        store_part(y_tiles, y_shared, rounded, row, col, GROUP)
    else:
        STORED_COLS: gl.constexpr = CONFIG.STORED_COLS
        halves = rounded.reshape([ROWS, 2, STORED_COLS]).permute(0, 2, 1)
        left, right = halves.split()
        store_part(y_tiles, y_shared, left, row, col, GROUP)
        store_part(y_tiles, y_shared, right, row, col + STORED_COLS, GROUP)


@gluon.jit
def store_part(y_tiles, y_shared, rounded, row, col, GROUP: gl.constexpr):
    # Where the last one went from.
    tma.store_wait(0)
    y_shared.index(GROUP).store(rounded)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_tiles, [row, col], y_shared.index(GROUP))


@gluon.jit
def multiply(
    descriptors, pointers, buffers, barriers, sizes, call, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """What each group does: its ROWS rows of every piece, normalised, times the tiles of weight."""
    _, _, y_tiles = descriptors
    x_shared, _, y_shared = buffers
    x_full, x_free, _, _ = barriers
    _, _, bias_ptr, _, _ = pointers
    rows, cols, eps, weight_offset = call
    BLOCK_COLS: gl.constexpr = CONFIG.BLOCK_COLS
    OF_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_COLS, 16])
    of_tile = gl.arange(0, BLOCK_COLS, gl.SliceLayout(0, OF_Y))
    none = gl.zeros([ROWS, BLOCK_COLS], gl.float32, OF_Y)
    used = 0
    for piece in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        block, first, last = work_of(piece, sizes)
        turn = piece // gl.num_programs(0)
        row = (block * CONFIG.GROUPS + GROUP) * ROWS
        mbarrier.wait(x_full.index(GROUP), turn & 1)
        floats = (eps, weight_offset)
        normalise(x_shared, pointers, floats, row, rows, first == 0, GROUP, CONFIG)
        for tile in range(first, last):
            y = add_product(none, 0, used, buffers, barriers, GROUP, CONFIG)
            at = (tile * BLOCK_COLS + of_tile, cols)
            rounded = tile_of_y(y, at, bias_ptr, used, buffers, barriers, GROUP, CONFIG)
            used += CONFIG.SLICES
            if tile == last - 1:
                mbarrier.arrive(x_free.index(GROUP), count=1)
            store_tile(y_tiles, y_shared, rounded, row, tile * BLOCK_COLS, GROUP, CONFIG)
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("rows", "cols", "pieces", "parts", "tiles"))
def hopper_norm_linear_kernel(
    x_tiles,
    weight_tiles,
    y_tiles,
    norm_weight_ptr,
    norm_bias_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    weight_offset,
    rows,
    cols,
    pieces,
    parts,
    tiles,
    CONFIG: gl.constexpr,
):
    """A program takes every so many-th piece of work: GROUPS * ROWS rows and one of ``parts`` parts
    of the ``tiles`` tiles of the ``cols`` columns of y. CONFIG says which pointers are read.
    """
    GROUPS: gl.constexpr = CONFIG.GROUPS
    SLICES: gl.constexpr = CONFIG.SLICES
    STAGES: gl.constexpr = CONFIG.STAGES
    DTYPE: gl.constexpr = x_tiles.dtype
    BLOCK_COLS: gl.constexpr = CONFIG.BLOCK_COLS
    x_shared = gl.allocate_shared_memory(DTYPE, [GROUPS * SLICES, ROWS, SLICE], x_tiles.layout)
    weight_shared = gl.allocate_shared_memory(
        DTYPE, [STAGES, BLOCK_COLS, SLICE], weight_tiles.layout
    )
    y_shared = gl.allocate_shared_memory(DTYPE, [GROUPS, ROWS, CONFIG.STORED_COLS], y_tiles.layout)
    x_full, x_free = barriers_of(GROUPS, 1), barriers_of(GROUPS, 1)
    full, free = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    fence_async_shared()
    descriptors = (x_tiles, weight_tiles, y_tiles)
    pointers = (norm_weight_ptr, norm_bias_ptr, bias_ptr, mean_ptr, rstd_ptr)
    buffers = (x_shared, weight_shared, y_shared)
    barriers = (x_full, x_free, full, free)
    sizes = (pieces, parts, tiles)
    call = (rows, cols, eps, weight_offset)
    gl.warp_specialize(
        [
            (multiply, (descriptors, pointers, buffers, barriers, sizes, call, 0, CONFIG)),
            (multiply, (descriptors, pointers, buffers, barriers, sizes, call, 1, CONFIG)),
            (copy_tiles, (descriptors, buffers, barriers, sizes, CONFIG)),
        ],
        [4, 1],
        [CONFIG.REGISTERS, CONFIG.COPYING_REGISTERS],
    )
