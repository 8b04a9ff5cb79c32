"""Device functions of the scan's kernels: gates and written tokens of a chunk, blocks of a memory,
and the sum of what the programs of one head compute.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    load_b1,
    load_b2,
    load_weights,
    product,
)

# The gradient of |M(k) - v|^2 by M(k) is this times the residual.
FACTOR = tl.constexpr(2.0)
# Of the layer norm's variance, as in the reference.
EPS = tl.constexpr(1e-5)
# One machine code serves all lengths and all parts of a pass.
COUNTS = ("tokens", "heads", "all_heads", "first_chunk", "chunks")
# Tokens whose gates are loaded together: no load passes a store that stands before it, and the wait
# for one load is longer than all other work for a token.
TOKENS_AT_ONCE = tl.constexpr(8)


@triton.jit
def chunk_of_program(first_chunk, chunks, tokens, heads, CONFIG: tl.constexpr):
    """Of a program that takes one of the ``chunks`` chunks of one head: its place among them, which
    head of all rows it is, which chunk of all, (batch, head, first token), and which tokens exist.
    """
    local = tl.program_id(0).to(tl.int64)
    own = local // chunks
    chunk = first_chunk + local % chunks
    first = chunk * CONFIG.C
    count = tl.minimum(tokens - first, CONFIG.C)
    there = tl.arange(0, CONFIG.BLOCK_C) < count
    return local, own, chunk, (own // heads, own % heads, first), count, there


@triton.jit
def is_reset(resets_ptr, batch, chunk, tokens, CONFIG: tl.constexpr):
    """Whether a chunk begins with the memory with which its row did: ``resets`` is [B, chunks]."""
    return tl.load(resets_ptr + batch * tl.cdiv(tokens, CONFIG.C) + chunk) != 0


@triton.jit
def load_memory(memory, block, CONFIG: tl.constexpr):
    """One block of a memory: (w1^T [BLOCK_D, BLOCK_H], b1, w2 [BLOCK_D, BLOCK_H], b2)."""
    return (
        tl.trans(load_weights(memory, block, 1, CONFIG)),
        load_b1(memory, block, CONFIG),
        tl.trans(load_weights(memory, block, 2, CONFIG)),
        load_b2(memory, CONFIG),
    )


@triton.jit
def add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def sums(a, b):
    """The sums of a and of b over their rows, in one pass."""
    return tl.reduce((a, b), 0, add_pairs)


@triton.jit
def hidden_of(x, memory, block, CONFIG: tl.constexpr):
    """x w1^T + b1, one block of the hidden layer, [BLOCK_C, BLOCK_H]."""
    w1 = load_weights(memory, block, 1, CONFIG).to(x.dtype)
    b1 = load_b1(memory, block, CONFIG)
    return product(x, tl.trans(w1), CONFIG) + b1[None, :]


@triton.jit
def normalised(x, CONFIG: tl.constexpr):
    """(N(x), 1 / sqrt(var x + eps) [BLOCK_C, 1]) of rows, which are zero past column D."""
    inside = (tl.arange(0, CONFIG.BLOCK_D) < CONFIG.D)[None, :]
    centred = tl.where(inside, x - (tl.sum(x, 1) / CONFIG.D)[:, None], 0.0)
    inverse = (1.0 / tl.sqrt(tl.sum(centred * centred, 1) / CONFIG.D + EPS))[:, None]
    return centred * inverse, inverse


@triton.jit
def through_norm(g, n, inverse, CONFIG: tl.constexpr):
    """The gradient by x, of g by n = N(x)."""
    inside = (tl.arange(0, CONFIG.BLOCK_D) < CONFIG.D)[None, :]
    mean = (tl.sum(g, 1) / CONFIG.D)[:, None]
    along = (tl.sum(n * g, 1) / CONFIG.D)[:, None]
    return tl.where(inside, inverse * (g - mean - n * along), 0.0)


@triton.jit
def inner_gradient(output, k, v, written, CONFIG: tl.constexpr):
    """(e, M(k) - v): the first is the gradient of |M(k) - v|^2 by ``output``, which the two layers
    make of k.
    """
    if CONFIG.RESIDUAL_NORM:
        n, inverse = normalised(output, CONFIG)
        residual = k.to(tl.float32) + n - v.to(tl.float32)
        e = through_norm(residual * FACTOR, n, inverse, CONFIG)
    else:
        residual = output - v.to(tl.float32)
        e = residual * FACTOR
    return tl.where(written[:, None], e, 0.0), tl.where(written[:, None], residual, 0.0)


@triton.jit
def through_inner_gradient(de, output, k, v, CONFIG: tl.constexpr):
    """The gradients by ``output``, and by k, which is minus that by v, of ``de`` by e where there
    is a norm: e = N' r with r = 2 (k + N(output) - v), and N' = (1 - mean - n mean n) / sqrt(var).
    """
    n, inverse = normalised(output, CONFIG)
    # On the right: the interpreter makes a constant of the product with one on the left.
    r = (k.to(tl.float32) + n - v.to(tl.float32)) * FACTOR
    e = through_norm(r, n, inverse, CONFIG)
    dk = through_norm(de, n, inverse, CONFIG) * FACTOR
    # N' depends on n twice, and on the variance.
    by_r = (tl.sum(n * r, 1) / CONFIG.D)[:, None]
    by_de = (tl.sum(n * de, 1) / CONFIG.D)[:, None]
    dn = dk - inverse * (de * by_r + r * by_de)
    by_variance = (tl.sum(de * e, 1) / CONFIG.D)[:, None]
    return through_norm(dn, n, inverse, CONFIG) - inverse * n * by_variance, dk


@triton.jit
def load_written(written_ptr, place, there, tokens, heads, CONFIG: tl.constexpr):
    """Which tokens of a chunk exist and are written."""
    written = there
    if written_ptr is not None:
        batch, head, first = place
        token = (first + tl.arange(0, CONFIG.BLOCK_C)).to(tl.int64)
        row = (batch.to(tl.int64) * tokens + token) * heads + head
        written = there & (tl.load(written_ptr + row, mask=there, other=0) != 0)
    return written


@triton.jit
def load_last(decays, local, count, CONFIG: tl.constexpr):
    """(gamma, nu, keep, carry, decay) as the end of a chunk sees them: those of its last token.
    ``decays`` are the pointers to gamma, nu and the other three.
    """
    gamma_ptr, nu_ptr, reach_ptr = decays
    C: tl.constexpr = CONFIG.C
    token = tl.arange(0, CONFIG.BLOCK_C)
    row = local * (C * C) + (C - 1) * C + token
    gamma = tl.load(gamma_ptr + row, mask=token < count, other=0.0)
    nu = tl.load(nu_ptr + local * C + token, mask=token < count, other=0.0)
    end = reach_ptr + local * (3 * C) + C - 1
    return gamma, nu, tl.load(end), tl.load(end + C), tl.load(end + 2 * C)


@triton.jit
def load_seen(gamma_ptr, reach_ptr, local, count, CONFIG: tl.constexpr):
    """(gamma, keep, carry) as the reads of a chunk see them: each row that of its own token, or
    with SHIFT of the one before, whose first is what the chunk began with.
    """
    C: tl.constexpr = CONFIG.C
    row = tl.arange(0, CONFIG.BLOCK_C) - CONFIG.SHIFT
    inside = (row >= 0) & (row < count)
    col = tl.arange(0, CONFIG.BLOCK_C)
    at = gamma_ptr + local * (C * C) + row[:, None] * C + col[None, :]
    gamma = tl.load(at, mask=inside[:, None] & (col < count)[None, :], other=0.0)
    reach = reach_ptr + local * (3 * C) + row
    keep = tl.load(reach, mask=inside, other=1.0)
    carry = tl.load(reach + C, mask=inside, other=0.0)
    return gamma, keep[:, None], carry[:, None]


@triton.jit
def tiles_at(parts_ptr, own, step, CONFIG: tl.constexpr):
    """The address of the first of a head's tiles of a step."""
    row = tl.arange(0, CONFIG.BLOCK_C)[:, None]
    col = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    first = (own * 2 + step % 2) * (CONFIG.BLOCKS * CONFIG.BLOCK_C * CONFIG.BLOCK_D)
    return parts_ptr + first + row * CONFIG.BLOCK_D + col


@triton.jit
def store_part(x, parts_ptr, arrived_ptr, own, block, step, CONFIG: tl.constexpr):
    """Store a program's tile for ``sum_of_programs`` and count the program as arrived. The programs
    of a head are one after the other in the grid.

    Tiles of two steps are kept: a program stores its tile of the next step but one only after all
    others have arrived at the next one, and so have loaded those of this one.
    """
    at = tiles_at(parts_ptr, own, step, CONFIG)
    tl.store(at + block * (CONFIG.BLOCK_C * CONFIG.BLOCK_D), x)
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr + own, 1, sem="acq_rel")


@triton.jit
def sum_of_programs(parts_ptr, arrived_ptr, own, step, CONFIG: tl.constexpr):
    """The sum of the tiles of all programs of a head, in their order, so that it is the same in all
    of them; waits until all of them have arrived at this step.
    """
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    arrived = tl.atomic_add(arrived_ptr + own, 0, sem="acquire")
    while arrived < (step + 1) * BLOCKS:
        arrived = tl.atomic_add(arrived_ptr + own, 0, sem="acquire")
    tl.debug_barrier()
    at = tiles_at(parts_ptr, own, step, CONFIG)
    # Past the L1 cache, which may still hold the tiles of two steps ago.
    total = tl.load(at, cache_modifier=".cg")
    for other in tl.static_range(1, BLOCKS):
        tile = at + other * (CONFIG.BLOCK_C * CONFIG.BLOCK_D)
        total += tl.load(tile, cache_modifier=".cg")
    return total


@triton.jit
def hypotenuse(a, b):
    """sqrt(a^2 + b^2), where neither is negative; the squares do not overflow."""
    largest = tl.maximum(a, b)
    ratio = tl.minimum(a, b) / tl.where(largest > 0.0, largest, 1.0)
    return largest * tl.sqrt(1.0 + ratio * ratio)


@triton.jit
def sizes_of_rows(x):
    """The largest magnitude of each row, 1 for a row of zeros. What is not finite may be left out:
    divided by this it is not finite still, or was not counted.
    """
    largest = tl.max(tl.abs(x), 1)
    return tl.where(largest > 0.0, largest, 1.0)


@triton.jit
def norms_of_rows(x):
    """The norm of each row; the squares do not overflow."""
    largest = sizes_of_rows(x)
    x = x / largest[:, None]
    return largest * tl.sqrt(tl.sum(x * x, 1))


@triton.jit
def token_numbers(at, place, there, tokens, heads, CONFIG: tl.constexpr):
    """The addresses of one number for each token of a chunk, in a contiguous [B, tokens, heads]."""
    batch, head, first = place
    token = (first + tl.arange(0, CONFIG.BLOCK_C)).to(tl.int64)
    return at + (batch.to(tl.int64) * tokens + token) * heads + head


@triton.jit
def are_finite(weights, momentum):
    """Whether all numbers of one block of a memory and of its momentum are, as 1 or 0."""
    w1, b1, w2, b2 = weights
    s1, sb1, s2, sb2 = momentum
    infinity: tl.constexpr = float("inf")
    tiles = tl.maximum(tl.abs(w1), tl.abs(s1), propagate_nan=tl.PropagateNan.ALL)
    other = tl.maximum(tl.abs(w2), tl.abs(s2), propagate_nan=tl.PropagateNan.ALL)
    tiles = tl.maximum(tiles, other, propagate_nan=tl.PropagateNan.ALL)
    hidden = tl.maximum(tl.abs(b1), tl.abs(sb1), propagate_nan=tl.PropagateNan.ALL)
    output = tl.maximum(tl.abs(b2), tl.abs(sb2), propagate_nan=tl.PropagateNan.ALL)
    # A comparison with NaN is false.
    found = tl.min(tl.min((tiles < infinity).to(tl.int32), 1), 0)
    found = tl.minimum(found, tl.min((hidden < infinity).to(tl.int32), 0))
    return tl.minimum(found, tl.min((output < infinity).to(tl.int32), 0))
