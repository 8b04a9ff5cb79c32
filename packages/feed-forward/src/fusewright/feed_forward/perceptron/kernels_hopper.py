"""Gluon kernels of a product with SiLU or its derivative in its epilogue, for Hopper.

    u = x A^T, rounded    h = SiLU(u)               forward
    dh = dy C             du = dh * SiLU'(u)        backward

dh is not rounded, and neither it nor, where no gradients are wanted, u is written.
"""

from __future__ import annotations

from .._core.kernels_gluon import gl, gluon, tma
from .._core.kernels_product_hopper import multiply_tiles, store_in_turn, store_part

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def sigmoid(u):
    return 1.0 / (1.0 + gl.exp2(u * -LOG2_E))


@gluon.jit
def store_silu(u, row, col, operands, places, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """A tile of u, where it is kept, and of h."""
    u_tiles, h_tiles = operands
    DTYPE: gl.constexpr = h_tiles.dtype
    # SiLU of what the backward pass finds.
    rounded = u.to(DTYPE)
    u = rounded.to(gl.float32)
    h = (u * sigmoid(u)).to(DTYPE)
    if CONFIG.KEEPS:
        # Where the last ones went from.
        tma.store_wait(0)
        store_part(h_tiles, places.index(2 * GROUP), h, row, col)
        store_part(u_tiles, places.index(2 * GROUP + 1), rounded, row, col)
    else:
        store_in_turn(h_tiles, places, h, row, col, GROUP, CONFIG)


@gluon.jit
def store_slope(dh, row, col, operands, places, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """A tile of du."""
    u_ptr, du_tiles, rows, cols = operands
    DTYPE: gl.constexpr = du_tiles.dtype
    LAYOUT: gl.constexpr = dh.type.layout
    u_row = row + gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, LAYOUT))
    u_col = col + gl.arange(0, CONFIG.PART_COLS, gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(u_row.to(gl.int64) * cols, 1) + gl.expand_dims(u_col, 0)
    inside = gl.expand_dims(u_row < rows, 1) & gl.expand_dims(u_col < cols, 0)
    u = gl.load(u_ptr + at, mask=inside, other=0.0).to(gl.float32)
    slope = sigmoid(u)
    du = (dh * (slope * (1.0 + u * (1.0 - slope)))).to(DTYPE)
    store_in_turn(du_tiles, places, du, row, col, GROUP, CONFIG)


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("tiles", "col_tiles", "steps"))
def hopper_silu_kernel(
    x_tiles, weight_tiles, u_tiles, h_tiles, tiles, col_tiles, steps, CONFIG: gl.constexpr
):
    """h and, where CONFIG says so, u; else ``u_tiles`` is not touched."""
    sizes, operands = (tiles, col_tiles, steps), (u_tiles, h_tiles)
    multiply_tiles(x_tiles, weight_tiles, sizes, operands, store_silu, CONFIG)


@gluon.jit(do_not_specialize=("rows", "tiles", "col_tiles", "steps"))
def hopper_silu_backward_kernel(
    dy_tiles,
    weight_tiles,
    du_tiles,
    u_ptr,
    rows,
    cols,
    tiles,
    col_tiles,
    steps,
    CONFIG: gl.constexpr,
):
    """du from dy, C and u, whose rows are contiguous and follow one another."""
    sizes, operands = (tiles, col_tiles, steps), (u_ptr, du_tiles, rows, cols)
    multiply_tiles(dy_tiles, weight_tiles, sizes, operands, store_slope, CONFIG)
