"""A Gluon kernel of grouped heads for Hopper: the narrow second layers in the epilogue of the
product of the first ones.

    u = x A^T    parts = SiLU(u) C, summed over BLOCK_COLS hidden units of a head

u is rounded and written where a backward pass follows; its activation is that of the unrounded
sums, which stay in registers. A panel of A brings its columns of C into shared memory. The outputs
of a head are the sums of its parts, which another kernel adds in the order of the hidden units.
"""

from __future__ import annotations

from .._core.kernels_gluon import gl, gluon, tma
from .._core.kernels_product_hopper import halves_of, multiply_panels, store_part
from .._core.kernels_sigmoid import sigmoid

OUTPUTS = gl.constexpr(3)


@gluon.jit
def store_parts(u, row, col, operands, places, PART, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """The parts of a tile's columns, for each head that has some of them, and u where it is kept.
    Most tiles are of one head whole, and need no masks.

    ``parts`` is [PARTS, HEADS, 3, rows] in fp32, a head's first part at 0.
    """
    u_tiles, columns, parts, rows = operands
    if CONFIG.KEEPS:
        left, right = halves_of(u)
        # The last tile has gone from there.
        tma.store_wait(0)
        place = CONFIG.PLACES * GROUP
        store_part(u_tiles, places.index(place), left.to(u_tiles.dtype), row, col)
        right_col = col + CONFIG.PART_COLS
        store_part(u_tiles, places.index(place + 1), right.to(u_tiles.dtype), row, right_col)
    hidden = u * sigmoid(u)
    of_columns: gl.constexpr = gl.SliceLayout(0, u.type.layout)
    cols = col + gl.arange(0, CONFIG.BLOCK_COLS, of_columns)
    at = row + gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, u.type.layout))
    first, last = col // CONFIG.STORED, (col + CONFIG.BLOCK_COLS - 1) // CONFIG.STORED
    if first == last:
        out = parts_of(parts, first, col, rows, CONFIG)
        for output in gl.static_range(OUTPUTS):
            c = columns.index(output).load(u.type.layout)
            gl.store(out + at, gl.sum(hidden * c, 1), mask=at < rows)
            out += rows
    else:
        for head in range(first, gl.minimum(last + 1, CONFIG.HEADS)):
            begin = head * CONFIG.STORED
            inside = (cols >= begin) & (cols < begin + CONFIG.STORED)
            out = parts_of(parts, head, col, rows, CONFIG)
            for output in gl.static_range(OUTPUTS):
                c = columns.index(output).load(u.type.layout)
                # Of other heads neither units nor weights, where they are no numbers.
                own = gl.where(inside[None, :], hidden * c, 0.0)
                gl.store(out + at, gl.sum(own, 1), mask=at < rows)
                out += rows


@gluon.jit
def parts_of(parts, head, col, rows, CONFIG: gl.constexpr):
    """Where the part of a head begins that a tile from ``col`` on adds."""
    part = col // CONFIG.BLOCK_COLS - head * CONFIG.STORED // CONFIG.BLOCK_COLS
    return parts + (part * CONFIG.HEADS + head).to(gl.int64) * OUTPUTS * rows


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("row_tiles", "col_tiles", "rows"))
def hopper_heads_kernel(
    x_tiles,
    weight_tiles,
    u_tiles,
    columns_tiles,
    parts,
    row_tiles,
    col_tiles,
    rows,
    CONFIG: gl.constexpr,
):
    """Parts of the outputs and, where CONFIG says so, u; else ``u_tiles`` is not touched."""
    columns = gl.allocate_shared_memory(
        gl.float32, [OUTPUTS, 1, CONFIG.BLOCK_COLS], columns_tiles.layout
    )
    multiply_panels(
        *(x_tiles, weight_tiles, x_tiles, columns_tiles, columns),
        *((row_tiles, col_tiles), (u_tiles, columns, parts, rows), store_parts, CONFIG),
    )


@gluon.jit(do_not_specialize=("rows",))
def add_outputs_kernel(
    parts,
    out,
    rows,
    HEADS: gl.constexpr,
    STORED: gl.constexpr,
    BLOCK_COLS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
):
    """One program adds the parts of the outputs of one head for BLOCK_ROWS rows, in the order of
    the hidden units.
    """
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    head = gl.program_id(0) // blocks
    of_rows: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.program_id(0) % blocks * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, of_rows)
    first = gl.zeros([BLOCK_ROWS], gl.float32, of_rows)
    second = gl.zeros([BLOCK_ROWS], gl.float32, of_rows)
    third = gl.zeros([BLOCK_ROWS], gl.float32, of_rows)
    begin = head * STORED
    count = (begin + STORED - 1) // BLOCK_COLS - begin // BLOCK_COLS + 1
    for part in range(count):
        at = parts + (part * HEADS + head).to(gl.int64) * 3 * rows
        first += gl.load(at + row, mask=row < rows, other=0.0)
        second += gl.load(at + rows + row, mask=row < rows, other=0.0)
        third += gl.load(at + rows + rows + row, mask=row < rows, other=0.0)
    at = out + (row.to(gl.int64) * HEADS + head) * 3
    gl.store(at, first, mask=row < rows)
    gl.store(at + 1, second, mask=row < rows)
    gl.store(at + 2, third, mask=row < rows)
