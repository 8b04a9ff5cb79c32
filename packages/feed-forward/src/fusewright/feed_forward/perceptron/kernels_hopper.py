"""Gluon kernels of a product with SiLU or its derivative in its epilogue, for Hopper.

    u = x A^T, rounded    h = SiLU(u)               forward
    dh = dy C             du = dh * SiLU'(u)        backward

dh is not rounded, and neither it nor, where no gradients are wanted, u is written.
"""

from __future__ import annotations

from .._core.kernels_gluon import gl, gluon, tma
from .._core.kernels_product_hopper import multiply_panels, store_part
from .._core.kernels_sigmoid import sigmoid, widened


@gluon.jit
def store_silu(u, row, col, operands, places, PART: gl.constexpr, GROUP, CONFIG: gl.constexpr):
    """A tile of u, where it is kept, and of h."""
    u_tiles, h_tiles = operands
    DTYPE: gl.constexpr = h_tiles.dtype
    # SiLU of what the backward pass finds.
    rounded = u.to(DTYPE)
    u = widened(rounded)
    h = (u * sigmoid(u)).to(DTYPE)
    # Both places in turn: the last tile but one has gone from there.
    tma.store_wait(1)
    if CONFIG.KEEPS:
        store_part(u_tiles, places.index(2 * GROUP), rounded, row, col)
        tma.store_wait(1)
        store_part(h_tiles, places.index(2 * GROUP + 1), h, row, col)
    else:
        store_part(h_tiles, places.index(2 * GROUP + PART), h, row, col)


@gluon.jit
def store_slope(dh, row, col, operands, places, PART: gl.constexpr, GROUP, CONFIG: gl.constexpr):
    """A tile of du, by the place that its tile of u has."""
    du_tiles = operands
    DTYPE: gl.constexpr = du_tiles.dtype
    place = places.index(2 * GROUP + PART)
    u = widened(place.load(dh.type.layout))
    slope = sigmoid(u)
    du = (dh * (slope * (1.0 + u * (1.0 - slope)))).to(DTYPE)
    store_part(du_tiles, place, du, row, col)


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("row_tiles", "col_tiles"))
def hopper_silu_kernel(
    x_tiles, weight_tiles, u_tiles, h_tiles, row_tiles, col_tiles, CONFIG: gl.constexpr
):
    """h and, where CONFIG says so, u; else ``u_tiles`` is not touched."""
    sizes, operands = (row_tiles, col_tiles), (u_tiles, h_tiles)
    # Nothing is loaded, and no panel brings anything.
    unused = (h_tiles, h_tiles, h_tiles)
    multiply_panels(x_tiles, weight_tiles, *unused, sizes, operands, store_silu, CONFIG)


@gluon.jit(do_not_specialize=("row_tiles", "col_tiles"))
def hopper_silu_backward_kernel(
    dy_tiles, weight_tiles, u_tiles, du_tiles, row_tiles, col_tiles, CONFIG: gl.constexpr
):
    """du from dy, C and u."""
    sizes = (row_tiles, col_tiles)
    loaded = (u_tiles, u_tiles, u_tiles)
    multiply_panels(dy_tiles, weight_tiles, *loaded, sizes, du_tiles, store_slope, CONFIG)
