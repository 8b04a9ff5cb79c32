"""Device functions of the kernels for memories of three layers or more.

``memory`` points to the first number of one half of a packed memory: w1^T [D, HIDDEN], w2 ..
w(n-1) [HIDDEN, HIDDEN], wn [D, HIDDEN], b1 .. bn. Every matrix has rows of HIDDEN numbers; those of
w1^T are the layer's inputs, those of the others its outputs. A layer thus has two sides, each with
matrices of one row for each token: the rows' side, of D columns in the first layer and the last,
and the columns' side. p is on the rows' side but in the first layer, x on the other.

All matrices of tokens are in one tensor ``rows`` [slots, places, C, STRIDE] in q's dtype, and those
kept in fp32 in ``wide``, of the same shape; a place is one chunk of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Slots of ``rows``, in units of LAYERS: of keys x_0 .. x_(n-1) and p_1 .. p_n; of queries x_0 ..
# x_(n-1); the gradients of the keys' z_1 .. z_n, and those of p_1 .. p_(n-1) times the slope, from
# the second slot on.
KEYS = tl.constexpr(0)
RESIDUALS = tl.constexpr(1)
QUERIES = tl.constexpr(2)
DKEYS = tl.constexpr(3)
DSLOPED = tl.constexpr(4)
# Slots of ``wide``: act'(z_l) and, last, e; what act''(z_l) multiplies and, last, with a norm z_n,
# or in the forward pass p_1 .. p_n; the gradients of p_1 .. p_n and of x_0 .. x_(n-1); those of the
# queries' z_1 .. z_n, and before them act'(z_l) and with a norm z_n.
SLOPES = tl.constexpr(0)
CURVES = tl.constexpr(1)
LAST_OUTPUTS = tl.constexpr(1)
WIDE_RESIDUALS = tl.constexpr(1)
DRESIDUALS = tl.constexpr(2)
DINPUTS = tl.constexpr(3)
READS = tl.constexpr(4)


@triton.jit
def slot_at(at, kind, number, places, place, CONFIG: tl.constexpr):
    """The address of the matrix ``number`` of a kind, counted from 0, at one place."""
    slot = kind * CONFIG.LAYERS + number
    return at + (tl.cast(slot, tl.int64) * places + place) * (CONFIG.C * CONFIG.STRIDE)


@triton.jit
def load_rows(at, token, col, width, CONFIG: tl.constexpr):
    """[tokens, columns] of a slot; zero outside."""
    inside = (token < CONFIG.C)[:, None] & (col < width)[None, :]
    return tl.load(at + token[:, None] * CONFIG.STRIDE + col[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(at, x, token, col, width, CONFIG: tl.constexpr):
    inside = (token < CONFIG.C)[:, None] & (col < width)[None, :]
    to = at + token[:, None] * CONFIG.STRIDE + col[None, :]
    tl.store(to, x.to(at.dtype.element_ty), mask=inside)


@triton.jit
def load_columns(at, token, col, width, CONFIG: tl.constexpr):
    """The transpose, [columns, tokens]."""
    inside = (col < width)[:, None] & (token < CONFIG.C)[None, :]
    return tl.load(at + token[None, :] * CONFIG.STRIDE + col[:, None], mask=inside, other=0.0)


@triton.jit
def store_columns(at, x, token, col, width, CONFIG: tl.constexpr):
    inside = (col < width)[:, None] & (token < CONFIG.C)[None, :]
    to = at + token[None, :] * CONFIG.STRIDE + col[:, None]
    tl.store(to, x.to(at.dtype.element_ty), mask=inside)


@triton.jit
def head_columns(x, place, token, there, CONFIG: tl.constexpr):
    """Tokens of one head of x [B, T, heads, D], a pointer and its strides, as [BLOCK_D, tokens];
    zero where they are not ``there``.
    """
    x_ptr, batch_stride, token_stride, head_stride = x
    batch, head, first = place
    col = tl.arange(0, CONFIG.BLOCK_D)
    start = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    at = x_ptr + start + (first + token).to(tl.int64)[None, :] * token_stride + col[:, None]
    return tl.load(at, mask=(col < CONFIG.D)[:, None] & there[None, :], other=0.0)


@triton.jit
def store_head_columns(x_ptr, x, place, token, there, tokens, heads, CONFIG: tl.constexpr):
    """The same into a contiguous [B, T, heads, D]."""
    batch, head, first = place
    col = tl.arange(0, CONFIG.BLOCK_D)
    row = (batch.to(tl.int64) * tokens + (first + token).to(tl.int64)) * heads + head
    at = x_ptr + row[None, :] * CONFIG.D + col[:, None]
    mask = (col < CONFIG.D)[:, None] & there[None, :]
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def which_are_written(written_ptr, place, token, there, tokens, heads):
    """Which of these tokens of a chunk exist and are written."""
    written = there
    if written_ptr is not None:
        batch, head, first = place
        row = (batch.to(tl.int64) * tokens + (first + token).to(tl.int64)) * heads + head
        written = there & (tl.load(written_ptr + row, mask=there, other=0) != 0)
    return written


@triton.jit
def matrix_at(memory, layer, CONFIG: tl.constexpr):
    """The address of a layer's matrix; layers are counted from 1."""
    later = tl.maximum(layer - 2, 0) * (CONFIG.HIDDEN * CONFIG.HIDDEN)
    return memory + (tl.minimum(layer - 1, 1) * (CONFIG.D * CONFIG.HIDDEN) + later)


@triton.jit
def load_tile(at, row, col, rows, CONFIG: tl.constexpr):
    """A tile of a matrix of so many rows; zero outside."""
    inside = (row < rows)[:, None] & (col < CONFIG.HIDDEN)[None, :]
    return tl.load(at + row[:, None] * CONFIG.HIDDEN + col[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(at, x, row, col, rows, CONFIG: tl.constexpr):
    inside = (row < rows)[:, None] & (col < CONFIG.HIDDEN)[None, :]
    to = at + row[:, None] * CONFIG.HIDDEN + col[None, :]
    tl.store(to, x.to(at.dtype.element_ty), mask=inside)


@triton.jit
def biases_at(memory, layer, CONFIG: tl.constexpr):
    return memory + (CONFIG.MATRICES + (layer - 1) * CONFIG.HIDDEN)


@triton.jit
def sums_at(at, place, NUMBERS: tl.constexpr, CONFIG: tl.constexpr):
    """The address of so many sums for every bias, of one place."""
    return at + place * (NUMBERS * (CONFIG.SIZE - CONFIG.MATRICES))


@triton.jit
def rows_of_layer(layer, CONFIG: tl.constexpr):
    """How many rows the matrix of a layer has, D or HIDDEN."""
    middle = (layer > 1) & (layer < CONFIG.LAYERS)
    return tl.where(middle, CONFIG.HIDDEN, CONFIG.D)


@triton.jit
def sides(layer, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Which of two kinds, one of a layer's outputs and one of its inputs, is on the rows' side, and
    which on the columns'.
    """
    is_first = layer == 1
    return tl.where(is_first, INPUTS, OUTPUTS), tl.where(is_first, OUTPUTS, INPUTS)


@triton.jit
def by_sides(outputs, inputs, is_first, DTYPE: tl.constexpr):
    """Tiles of a layer's outputs and inputs, as tiles of the rows' side and of the columns'."""
    down = tl.where(is_first, inputs, outputs)
    across = tl.where(is_first, outputs, inputs)
    return down.to(DTYPE), across.to(DTYPE)


@triton.jit
def tile_of(tile, CONFIG: tl.constexpr):
    """(layer, block of rows, block of columns) of one tile of a memory's matrices."""
    ACROSS: tl.constexpr = CONFIG.BLOCKS
    MIDDLE: tl.constexpr = CONFIG.BLOCKS * CONFIG.BLOCKS
    inner = tile - ACROSS
    layer = tl.minimum(2 + tl.maximum(inner, 0) // MIDDLE, CONFIG.LAYERS)
    layer = tl.where(tile < ACROSS, 1, layer)
    within = tl.where(tile < ACROSS, tile, inner - (layer - 2) * MIDDLE)
    return layer, within // ACROSS, within % ACROSS


@triton.jit
def side_of(side, CONFIG: tl.constexpr):
    """(layer, whether it is the rows' side, which block) of one block of one side of a layer."""
    ACROSS: tl.constexpr = CONFIG.BLOCKS
    inner = side - (1 + ACROSS)
    layer = tl.minimum(2 + tl.maximum(inner, 0) // (2 * ACROSS), CONFIG.LAYERS)
    layer = tl.where(side < 1 + ACROSS, 1, layer)
    within = tl.where(layer == 1, side, inner - (layer - 2) * (2 * ACROSS))
    down = tl.where((layer == 1) | (layer == CONFIG.LAYERS), 1, ACROSS)
    is_rows = within < down
    return layer, is_rows, tl.where(is_rows, within, within - down)
