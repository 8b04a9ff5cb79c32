"""Gluon kernel of the backward pass of the narrow second layer of grouped heads, for Hopper.

    dh_g = dout_g C_g^T    du = dh * SiLU'(u)    dC_g = sum over rows of SiLU(u_g)^T dout_g

Both sums are products on the tensor cores, in bf16 with parts: a number is the sum of two of bf16,
its rounding and what that left, and of the four products of two such sums the smallest is left out.
``split_kernel`` writes the parts of three outputs, or of three weights, as 16 columns, most of them
zeros, so that dh is one product: (high, low, high) of dout times (high, high, low) of C. SiLU(u) is
rounded, as what a layer stores is.

A program has COLS hidden units of a head, whose weights stay in shared memory, and takes tiles of
ROWS rows. A copying warp brings u and dout; two groups of four warps take tiles in turn and write
du over u in shared memory, from where it is copied out. Sums for dC stay in registers until the
last row of the program; ``add_tiles_kernel`` adds those of all programs in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
from .._core.kernels_sigmoid import sigmoid

ROWS = gl.constexpr(64)
COLS = gl.constexpr(128)
HALF = gl.constexpr(64)
# Columns of the parts of three numbers.
TERMS = gl.constexpr(16)
GROUPS = gl.constexpr(2)


@triton.jit
def split_kernel(x_ptr, terms_ptr, size, OF_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Terms of ``size`` triples: high, low, high and zeros, or of weights high, high, low."""
    triple = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    term = tl.arange(0, 16)
    inside = (triple < size)[:, None]
    at = triple[:, None] * 3 + (term % 3)[None, :]
    x = tl.load(x_ptr + at, mask=inside & (term < 9)[None, :], other=0.0).to(tl.float32)
    high = x.to(terms_ptr.dtype.element_ty).to(tl.float32)
    first_low: tl.constexpr = 6 if OF_WEIGHTS else 3
    is_low = (term >= first_low) & (term < first_low + 3)
    terms = tl.where(is_low[None, :], x - high, high)
    # Of what is not finite the first part says all.
    terms = tl.where((high - high == 0.0) | (term < 3)[None, :], terms, 0.0)
    terms = terms.to(terms_ptr.dtype.element_ty)
    tl.store(terms_ptr + triple[:, None] * 16 + term[None, :], terms, mask=inside)


@gluon.jit
def tiles_of_program(sizes):
    """The first of a program's tiles and the one behind its last."""
    row_tiles, panels, _panels_of_head = sizes
    tiles = row_tiles * panels
    first = gl.program_id(0).to(gl.int64) * tiles // gl.num_programs(0)
    last = (gl.program_id(0).to(gl.int64) + 1) * tiles // gl.num_programs(0)
    return first.to(gl.int32), last.to(gl.int32)


@gluon.jit
def copy_tiles(descriptors, buffers, barriers, sizes, stored, STAGES: gl.constexpr):
    """What the copying warp does: the weights of each panel, and each tile's dout and u."""
    u_tiles, dout_tiles, weight_tiles = descriptors
    u_shared, dout_shared, weight_shared = buffers
    full, free, panel_full, panel_free = barriers
    row_tiles, _panels, panels_of_head = sizes
    first, last = tiles_of_program(sizes)
    first_panel = first // row_tiles
    for panel in range(first_panel, (last - 1) // row_tiles + 1):
        begin = gl.maximum(first, panel * row_tiles)
        end = gl.minimum(last, (panel + 1) * row_tiles)
        head = panel // panels_of_head
        col = panel % panels_of_head * COLS
        mbarrier.wait(panel_free, ((panel - first_panel) & 1) ^ 1)
        mbarrier.expect(panel_full, 2 * COLS * TERMS)
        tma.async_copy_global_to_shared(
            weight_tiles, [head * stored + col, 0], panel_full, weight_shared
        )
        for tile in range(begin, end):
            row = (tile - panel * row_tiles) * ROWS
            turn = tile - first
            count = turn // GROUPS
            stage = turn % GROUPS * STAGES + count % STAGES
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            arrival = full.index(stage)
            mbarrier.expect(arrival, 2 * ROWS * (COLS + TERMS))
            tma.async_copy_global_to_shared(
                dout_tiles, [row, head * TERMS], arrival, dout_shared.index(stage)
            )
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    *(u_tiles, [row, head, col + half * HALF], arrival),
                    u_shared.index(2 * stage + half),
                )


@gluon.jit
def halves_of(x):
    """The left and the right half of the columns: no number moves between registers."""
    return x.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()


@gluon.jit
def activate(dh, u_place, h_place):
    """du over u, and SiLU(u) in its place."""
    u = u_place.load(dh.type.layout)
    DTYPE: gl.constexpr = u.dtype
    u = u.to(gl.float32)
    s = sigmoid(u)
    h = u * s
    h_place.store(h.to(DTYPE))
    # s (1 + u (1 - s))
    u_place.store((dh * (s + (h - h * s))).to(DTYPE))


@gluon.jit
def compute(
    outputs,
    buffers,
    h_shared,
    barriers,
    sizes,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """What each group does: every other tile of the program."""
    du_tiles, sums_ptr, most = outputs
    u_shared, dout_shared, weight_shared = buffers
    full, free, panel_full, panel_free = barriers
    row_tiles, panels, panels_of_head = sizes
    OF_DH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TERMS, 16])
    unit = gl.arange(0, HALF, gl.SliceLayout(1, OF_SUMS))
    term = gl.arange(0, TERMS, gl.SliceLayout(0, OF_SUMS))
    at = gl.expand_dims(unit * TERMS, 1) + gl.expand_dims(term, 0)
    first, last = tiles_of_program(sizes)
    first_panel = first // row_tiles
    none = gl.zeros([ROWS, COLS], gl.float32, OF_DH)
    h_left, h_right = h_shared.index(2 * GROUP), h_shared.index(2 * GROUP + 1)
    before = GROUP * STAGES
    for panel in range(first_panel, (last - 1) // row_tiles + 1):
        begin = gl.maximum(first, panel * row_tiles)
        end = gl.minimum(last, (panel + 1) * row_tiles)
        head = panel // panels_of_head
        col = panel % panels_of_head * COLS
        mbarrier.wait(panel_full, (panel - first_panel) & 1)
        left_sums = gl.zeros([HALF, TERMS], gl.float32, OF_SUMS)
        right_sums = gl.zeros([HALF, TERMS], gl.float32, OF_SUMS)
        for tile in range(begin + ((GROUP + begin - first) & 1), end, GROUPS):
            turn = tile - first
            count = turn // GROUPS
            stage = GROUP * STAGES + count % STAGES
            row = (tile - panel * row_tiles) * ROWS
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            dout = dout_shared.index(stage)
            dh = warpgroup_mma(
                dout, weight_shared.permute([1, 0]), none, use_acc=False, is_async=True
            )
            dh = warpgroup_mma_wait(0, deps=(dh,))
            dh_left, dh_right = halves_of(dh)
            u_left, u_right = u_shared.index(2 * stage), u_shared.index(2 * stage + 1)
            activate(dh_left, u_left.reshape([ROWS, HALF]), h_left)
            activate(dh_right, u_right.reshape([ROWS, HALF]), h_right)
            fence_async_shared()
            left_sums = warpgroup_mma(h_left.permute([1, 0]), dout, left_sums, is_async=True)
            right_sums = warpgroup_mma(h_right.permute([1, 0]), dout, right_sums, is_async=True)
            tma.async_copy_shared_to_global(du_tiles, [row, head, col], u_left)
            tma.async_copy_shared_to_global(du_tiles, [row, head, col + HALF], u_right)
            left_sums, right_sums = warpgroup_mma_wait(0, deps=(left_sums, right_sums))
            # What the tile before left by is free.
            tma.store_wait(2)
            if count > 0:
                mbarrier.arrive(free.index(before), count=1)
            before = stage
        # The programs that have rows of a panel follow one another.
        tiles = (row_tiles * panels).to(gl.int64)
        first_program = ((panel * row_tiles + 1).to(gl.int64) * gl.num_programs(0) - 1) // tiles
        slot = panel * most + gl.program_id(0) - first_program.to(gl.int32)
        of_sums = sums_ptr + (slot * GROUPS + GROUP).to(gl.int64) * (COLS * TERMS)
        gl.store(of_sums + at, left_sums)
        gl.store(of_sums + HALF * TERMS + at, right_sums)
        mbarrier.arrive(panel_free, count=1)
    tma.store_wait(0)


# One compilation serves all sizes.
@gluon.jit(do_not_specialize=("row_tiles", "panels", "panels_of_head", "stored", "most"))
def hopper_silu_heads_backward_kernel(
    u_tiles,
    dout_tiles,
    weight_tiles,
    du_tiles,
    sums_ptr,
    row_tiles,
    panels,
    panels_of_head,
    stored,
    most,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPYING_REGISTERS: gl.constexpr,
):
    """A program takes its part of the tiles, those of the same hidden units one after the other.

    u and du: [rows, heads, stored]. dout: [rows, heads TERMS]. weight: [heads stored, TERMS].
    sums: [panels, most, GROUPS, COLS, TERMS]: ``most`` programs or fewer have rows of a panel.
    """
    DTYPE: gl.constexpr = u_tiles.dtype
    u_shared = gl.allocate_shared_memory(
        DTYPE, [2 * GROUPS * STAGES, ROWS, 1, HALF], u_tiles.layout
    )
    dout_shared = gl.allocate_shared_memory(
        DTYPE, [GROUPS * STAGES, ROWS, TERMS], dout_tiles.layout
    )
    weight_shared = gl.allocate_shared_memory(DTYPE, [COLS, TERMS], weight_tiles.layout)
    OF_H: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    h_shared = gl.allocate_shared_memory(DTYPE, [2 * GROUPS, ROWS, HALF], OF_H)
    full, free = barriers_of(GROUPS * STAGES, 1), barriers_of(GROUPS * STAGES, 1)
    panel_full, panel_free = barriers_of(1, 1), barriers_of(1, GROUPS)
    fence_async_shared()
    sizes = (row_tiles, panels, panels_of_head)
    descriptors = (u_tiles, dout_tiles, weight_tiles)
    buffers = (u_shared, dout_shared, weight_shared)
    barriers = (full, free, panel_full.index(0), panel_free.index(0))
    outputs = (du_tiles, sums_ptr, most)
    gl.warp_specialize(
        [
            (compute, (outputs, buffers, h_shared, barriers, sizes, 0, STAGES)),
            (compute, (outputs, buffers, h_shared, barriers, sizes, 1, STAGES)),
            (copy_tiles, (descriptors, buffers, barriers, sizes, stored, STAGES)),
        ],
        [4, 1],
        [REGISTERS, COPYING_REGISTERS],
    )


# One compilation serves all sizes, and none is a constant.
@triton.jit(
    do_not_specialize=("row_tiles", "panels", "panels_of_head", "programs", "stored", "most")
)
def add_tiles_kernel(
    sums_ptr, dweight_ptr, row_tiles, panels, panels_of_head, programs, stored, most
):
    """dweight of the units of a panel: the sums of all its programs and groups, in order."""
    panel = tl.program_id(0)
    unit, output = tl.arange(0, 128), tl.arange(0, 4)
    tiles = row_tiles.to(tl.int64) * panels
    start = panel.to(tl.int64) * row_tiles
    first = ((start + 1) * programs - 1) // tiles
    last = ((start + row_tiles) * programs - 1) // tiles
    total = tl.zeros([128, 4], tl.float32)
    within = (output < 3)[None, :]
    for part in range(0, (last - first + 1).to(tl.int32) * 2):
        slot = (panel.to(tl.int64) * most * 2 + part) * (128 * 16)
        at = sums_ptr + slot + unit[:, None] * 16 + output[None, :]
        total += tl.load(at, mask=within, other=0.0) + tl.load(at + 3, mask=within, other=0.0)
    col = panel % panels_of_head * 128 + unit
    to = dweight_ptr + ((panel // panels_of_head * stored + col) * 3)[:, None] + output[None, :]
    inside = within & (col < stored)[:, None]
    tl.store(to, total.to(dweight_ptr.dtype.element_ty), mask=inside)
