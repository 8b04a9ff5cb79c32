"""Device functions that several kernels of the rule call: where a chunk lies, tiles, products.

A unit is one chunk of one value head; units are numbered chunk by chunk, heads innermost. Tensors
of units are contiguous, [units, C, width] or [units, K, V]; in the last chunk of a sequence, rows
past the last token are zero.

On a GPU no tile has fewer than 64 rows. No result of a product is transposed and then a left
operand: triton 3.4 to 3.7.0 reads it wrongly on Hopper (triton's own fix is in 3.7.1). Nor is a
result of a product a left operand throughout a loop: ptxas, short of registers, overwrites it. Such
a tile goes through memory, where the program finds it in its caches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand, to_tf32

# Tokens of a chunk.
C = tl.constexpr(64)
# The logarithm of the least normal fp32 number: a lower decay leaves nothing of a state, and is a
# reset.
LEAST_DECAY = tl.constexpr(-87.33654475055310)
# As in the reference.
STEPS = tl.constexpr(16.0)
RESET = tl.constexpr(-8192.0)
# Arguments that change from call to call without a kernel of their own.
COUNTS = ("tokens", "heads", "chunks")


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr = None):
    """A tile of fp32. Triton takes no field of a record of constants into a list."""
    SHAPE: tl.constexpr = [ROWS] if COLUMNS is None else [ROWS, COLUMNS]
    return tl.zeros(SHAPE, tl.float32)


@triton.jit
def dot_onto(total, a, b, PRECISION: tl.constexpr):
    """total + a b in fp32."""
    if PRECISION == "tf32" and a.dtype.is_fp32():
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def product_onto(total, a, b, CONFIG: tl.constexpr):
    """The same. The interpreter multiplies only fp32 rightly: there operands are widened."""
    # Triton 3.6 hands no string of a record on to another function.
    PRECISION: tl.constexpr = CONFIG.PRECISION
    if CONFIG.UPCAST:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        total = dot_onto(total, a, b, PRECISION)
    return total


@triton.jit
def product(a, b, CONFIG: tl.constexpr):
    """a b in fp32."""
    return product_onto(zeros(a.shape[0], b.shape[1]), a, b, CONFIG)


@triton.jit
def locate_chunk(table_ptr, chunk, tokens, chunks):
    """Row of the batch, first token and number of tokens of a chunk."""
    if table_ptr is not None:
        batch = chunk * 0
        first = tl.load(table_ptr + 2 * chunk)
        count = tl.load(table_ptr + 2 * chunk + 1)
    else:
        batch = chunk // chunks
        first = chunk % chunks * C
        count = tl.minimum(tokens - first, C)
    return batch, first, count


@triton.jit
def locate_sequence(table_ptr, sequence, tokens, chunks):
    """Row of the batch, first token, number of tokens and first chunk of a sequence."""
    if table_ptr is not None:
        batch = sequence * 0
        first = tl.load(table_ptr + 3 * sequence)
        length = tl.load(table_ptr + 3 * sequence + 1)
        first_chunk = tl.load(table_ptr + 3 * sequence + 2)
    else:
        batch = sequence
        first = sequence * 0
        length = tokens
        first_chunk = sequence * chunks
    return batch, first, length, first_chunk


@triton.jit
def token_tile(rows, head, place, col, WIDTH: tl.constexpr):
    """Columns ``col`` of a chunk's tokens, of one head of [B, T, heads, WIDTH]; zero outside.
    ``rows``: a pointer, and the strides of batch, tokens and heads.
    """
    x_ptr, batch_stride, token_stride, head_stride = rows
    batch, first, count = place
    row = tl.arange(0, C)
    start = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    token = (first + row).to(tl.int64)
    at = x_ptr + start + token[:, None] * token_stride + col[None, :]
    return tl.load(at, mask=(row < count)[:, None] & (col < WIDTH)[None, :], other=0.0)


@triton.jit
def store_token_tile(
    x_ptr, x, place, head, tokens, heads, col, WIDTH: tl.constexpr, UPCAST: tl.constexpr
):
    """Store x at those columns of a contiguous [B, T, heads, WIDTH]."""
    batch, first, count = place
    row = tl.arange(0, C)
    token = batch.to(tl.int64) * tokens + first + row
    at = x_ptr + (token * heads + head)[:, None] * WIDTH + col[None, :]
    x = as_operand(x, x_ptr.dtype.element_ty, UPCAST)
    tl.store(at, x, mask=(row < count)[:, None] & (col < WIDTH)[None, :])


@triton.jit
def token_scalars(x_ptr, place, head, tokens, heads):
    """One number for each token of a chunk from a contiguous [B, T, heads]; zero outside."""
    batch, first, count = place
    row = tl.arange(0, C)
    at = x_ptr + (batch.to(tl.int64) * tokens + first + row) * heads + head
    return tl.load(at, mask=row < count, other=0.0)


@triton.jit
def store_token_scalars(x_ptr, x, place, head, tokens, heads):
    batch, first, count = place
    row = tl.arange(0, C)
    at = x_ptr + (batch.to(tl.int64) * tokens + first + row) * heads + head
    tl.store(at, x, mask=row < count)


@triton.jit
def unit_tile(x_ptr, unit, row, col, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows and columns of a unit's tile of a contiguous [units, ROWS, WIDTH]; zero outside."""
    at = x_ptr + unit * (ROWS * WIDTH) + row[:, None] * WIDTH + col[None, :]
    return tl.load(at, mask=(row < ROWS)[:, None] & (col < WIDTH)[None, :], other=0.0)


@triton.jit
def store_unit_tile(
    x_ptr, x, unit, row, col, ROWS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr
):
    at = x_ptr + unit * (ROWS * WIDTH) + row[:, None] * WIDTH + col[None, :]
    x = as_operand(x, x_ptr.dtype.element_ty, UPCAST)
    tl.store(at, x, mask=(row < ROWS)[:, None] & (col < WIDTH)[None, :])


@triton.jit
def through_memory(x_ptr, x, unit, UPCAST: tl.constexpr):
    """A unit's tile [C, C], stored and loaded again, in the dtype of its memory."""
    row = tl.arange(0, C)
    store_unit_tile(x_ptr, x, unit, row, row, C, C, UPCAST)
    # Threads load what other threads have stored.
    tl.debug_barrier()
    return unit_tile(x_ptr, unit, row, row, C, C)


@triton.jit
def cumulated(g, CONFIG: tl.constexpr):
    """The decays of a unit: G, the cumulated g, and where it is split a pair: of multiples of
    1 / STEPS, whose sums are exact, and of what is left of g, whose sums are small.
    """
    is_reset = g < LEAST_DECAY
    if CONFIG.SPLIT:
        coarse = tl.where(is_reset, RESET, tl.floor(g * STEPS + 0.5) * (1.0 / STEPS))
        rest = tl.where(is_reset, 0.0, g - coarse)
        decays = tl.cumsum(coarse, 0), tl.cumsum(rest, 0)
    else:
        decays = tl.cumsum(tl.where(is_reset, LEAST_DECAY, g), 0)
    return decays


@triton.jit
def store_decays(decays_ptr, decays, unit, CONFIG: tl.constexpr):
    """[units, 2, C] where they are split, else [units, C]."""
    row = tl.arange(0, C)
    if CONFIG.SPLIT:
        coarse, rest = decays
        at = decays_ptr + unit * (2 * C) + row
        tl.store(at, coarse)
        tl.store(at + C, rest)
    else:
        tl.store(decays_ptr + unit * C + row, decays)


@triton.jit
def load_decays(decays_ptr, unit, row, CONFIG: tl.constexpr):
    """Those of some tokens of a unit, as they were stored."""
    if CONFIG.SPLIT:
        at = decays_ptr + unit * (2 * C) + row
        decays = tl.load(at), tl.load(at + C)
    else:
        decays = tl.load(decays_ptr + unit * C + row)
    return decays


@triton.jit
def unit_decays(decays_ptr, unit, CONFIG: tl.constexpr):
    """Those of all tokens."""
    return load_decays(decays_ptr, unit, tl.arange(0, C), CONFIG)


@triton.jit
def last_decays(decays_ptr, unit, CONFIG: tl.constexpr):
    """Those of the last token."""
    return load_decays(decays_ptr, unit, C - 1, CONFIG)


@triton.jit
def decay_from_start(decays, CONFIG: tl.constexpr):
    """What is left at a token of the state at the chunk's start: exp(G)."""
    if CONFIG.SPLIT:
        coarse, rest = decays
        decays = coarse + rest
    return tl.exp(decays)


@triton.jit
def decay_to_end(decays, last, CONFIG: tl.constexpr):
    """What is left of a token at the chunk's end."""
    if CONFIG.SPLIT:
        coarse, rest = decays
        last_coarse, last_rest = last
        between = (last_coarse - coarse) + (last_rest - rest)
    else:
        between = last - decays
    return tl.exp(between)


@triton.jit
def decay_between(decays, CONFIG: tl.constexpr):
    """L_ij = exp(G_i - G_j) for i >= j, 0 above: exp may overflow there, so the mask is first."""
    row = tl.arange(0, C)
    if CONFIG.SPLIT:
        coarse, rest = decays
        between = (coarse[:, None] - coarse[None, :]) + (rest[:, None] - rest[None, :])
    else:
        between = decays[:, None] - decays[None, :]
    return tl.exp(tl.where(row[:, None] >= row[None, :], between, float("-inf")))


@triton.jit
def decay_between_transposed(decays, CONFIG: tl.constexpr):
    """The transpose of L."""
    row = tl.arange(0, C)
    if CONFIG.SPLIT:
        coarse, rest = decays
        between = (coarse[None, :] - coarse[:, None]) + (rest[None, :] - rest[:, None])
    else:
        between = decays[None, :] - decays[:, None]
    return tl.exp(tl.where(row[:, None] <= row[None, :], between, float("-inf")))


@triton.jit
def sum_between_tokens(x):
    """For each token t the sum of x_ij over i >= t > j: with x_ij the gradient of the log decay
    between tokens i and j, this is its part of dg_t. A running sum of row sums minus column sums
    would be the same, but most of its terms cancel.
    """
    row = tl.arange(0, C)
    before = tl.cumsum(x, 1) - x
    return tl.sum(tl.where(row[:, None] >= row[None, :], before, 0.0), 0)


@triton.jit
def sum_from_token_on(x):
    """For each token the sum of x over it and all later ones."""
    row = tl.arange(0, C)
    return tl.sum(tl.where(row[None, :] >= row[:, None], x[None, :], 0.0), 1)


@triton.jit
def unit_triangular_inverse(a, CONFIG: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a.

    Where D inverts the blocks of ``size`` rows on the diagonal and E is the part of a between two
    neighbours, D - D E D inverts the blocks of twice as many rows. Unlike a sum of powers of a this
    adds no numbers larger than the result's: TF32 errs less than the rounding of the result to
    bf16, and three products of TF32 parts err as little as a solution in fp32, with equal keys too.
    """
    PRECISION: tl.constexpr = CONFIG.INVERSE
    row = tl.arange(0, C)
    block = row >> 1
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    inverse -= tl.where(block[:, None] == block[None, :], a, 0.0)
    # 64 rows: blocks of 4, 8, 16, 32 and 64.
    for level in range(2, 7):
        larger = row >> level
        pair = (larger[:, None] == larger[None, :]) & (block[:, None] != block[None, :])
        between = tl.where(pair, a, 0.0)
        between = dot_onto(zeros(C, C), inverse, between, PRECISION)
        inverse -= dot_onto(zeros(C, C), between, inverse, PRECISION)
        block = larger
    return inverse
