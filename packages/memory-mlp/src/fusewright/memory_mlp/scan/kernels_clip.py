"""Triton kernels of the scan's forward pass with a clip: what goes from chunk to chunk.

    n^2 = |p|^2 (|k|^2 + 1) + |e|^2 (|h|^2 + 1)    rho = min(1, limit / n), 0 where n is not finite
    e := rho e    W, S of the next chunk = W_t, S_t of the last token, or W, S where those are not
                  finite

with the names of ``kernels``. The norm of a token needs all hidden units before any of them may
change, so that a chunk takes two launches; each is repeated for every chunk, and programs count the
chunks in ``step``. No program waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    activated,
    load_b2,
    load_matrix,
    load_weights,
    product,
    product_onto,
    store_matrix,
    store_memory,
    token_rows,
    zeros,
)
from .tiles import (
    COUNTS,
    are_finite,
    hidden_of,
    hypotenuse,
    inner_gradient,
    is_reset,
    load_last,
    load_memory,
    load_written,
    norms_of_rows,
    sizes_of_rows,
    sums,
    token_numbers,
)

# Programs of a head, at most.
MOST_PROGRAMS = tl.constexpr(64)
# Numbers that are copied at once.
COPIED = tl.constexpr(1024)


@triton.jit
def copy_state(source, target, CONFIG: tl.constexpr):
    """One memory and its momentum."""
    number = tl.arange(0, COPIED)
    for start in tl.range(0, 2 * CONFIG.SIZE, COPIED):
        inside = start + number < 2 * CONFIG.SIZE
        x = tl.load(source + start + number, mask=inside)
        tl.store(target + start + number, x, mask=inside)


@triton.jit
def settle(pointers, own, chunk, tokens, heads, all_heads, programs, CONFIG: tl.constexpr):
    """Whether the chunk before this one was taken: where not, the state before it is copied over
    the one after it. Writes ``taken`` [B, chunks, heads], and returns the address of the state.
    """
    states_ptr, end_ptr, flags_ptr, taken_ptr = pointers
    SIZE: tl.constexpr = CONFIG.SIZE
    chunks = tl.cdiv(tokens, CONFIG.C)
    before = (tl.cast(chunk, tl.int64) - 1) * all_heads + own
    memory = states_ptr + (before + all_heads) * (2 * SIZE)
    if chunk == chunks:
        memory = end_ptr + own * (2 * SIZE)
    if chunk > 0:
        each = tl.arange(0, MOST_PROGRAMS)
        flags = tl.load(flags_ptr + own * programs + each, mask=each < programs, other=1)
        taken = tl.min(flags, 0) != 0
        at = (own // heads * chunks + chunk - 1) * heads + own % heads
        tl.store(taken_ptr + at, taken)
        if taken == 0:
            copy_state(states_ptr + before * (2 * SIZE), memory, CONFIG)
    # All threads see what any has stored.
    tl.debug_barrier()
    return memory


@triton.jit(do_not_specialize=(*COUNTS, "programs"))
def settle_kernel(
    states_ptr,
    end_ptr,
    flags_ptr,
    taken_ptr,
    step_ptr,
    tokens,
    heads,
    all_heads,
    programs,
    CONFIG: tl.constexpr,
):
    """One program settles the last chunk of one head."""
    own = tl.program_id(0).to(tl.int64)
    chunk = tl.load(step_ptr + own)
    pointers = states_ptr, end_ptr, flags_ptr, taken_ptr
    settle(pointers, own, chunk, tokens, heads, all_heads, programs, CONFIG)


@triton.jit(do_not_specialize=(*COUNTS, "programs"))
def clip_kernel(
    k_ptr,
    v_ptr,
    written_ptr,
    resets_ptr,
    states_ptr,
    end_ptr,
    flags_ptr,
    taken_ptr,
    step_ptr,
    e_ptr,
    factors_ptr,
    limit,
    tokens,
    heads,
    all_heads,
    programs,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    CONFIG: tl.constexpr,
):
    """One program settles the chunk before the next one of one head, and computes e [C, D] of that
    one, clipped, and the ``factors`` rho [B, tokens, heads]. If ``resets`` names that one, it
    begins with the state of the first.
    """
    C: tl.constexpr = CONFIG.C
    BLOCK_C: tl.constexpr = CONFIG.BLOCK_C
    own = tl.program_id(0).to(tl.int64)
    chunk = tl.load(step_ptr + own)
    pointers = states_ptr, end_ptr, flags_ptr, taken_ptr
    memory = settle(pointers, own, chunk, tokens, heads, all_heads, programs, CONFIG)
    if resets_ptr is not None:
        if is_reset(resets_ptr, own // heads, chunk, tokens, CONFIG):
            copy_state(states_ptr + own * (2 * CONFIG.SIZE), memory, CONFIG)
        tl.debug_barrier()
    k_at = k_ptr, k_batch_stride, k_token_stride, k_head_stride
    v_at = v_ptr, v_batch_stride, v_token_stride, v_head_stride
    first = chunk * C
    place = own // heads, own % heads, first
    there = tl.arange(0, BLOCK_C) < tl.minimum(tokens - first, C)
    written = load_written(written_ptr, place, there, tokens, heads, CONFIG)
    k = token_rows(k_at, place, written, CONFIG)
    v = token_rows(v_at, place, written, CONFIG)
    output = zeros(BLOCK_C, CONFIG.BLOCK_D)
    # The ones are the biases' gradients.
    h_norm = tl.full([BLOCK_C], 1.0, tl.float32)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        h, _, _ = activated(hidden_of(k, memory, block, CONFIG), CONFIG)
        h_norm = hypotenuse(h_norm, norms_of_rows(h))
        w2 = load_weights(memory, block, 2, CONFIG).to(k.dtype)
        output = product_onto(output, h.to(k.dtype), w2, CONFIG)
    output += load_b2(memory, CONFIG)[None, :]
    e, _ = inner_gradient(output, k, v, written, CONFIG)
    # Of one size, so that it can be rounded and squared however large it is.
    size = sizes_of_rows(e)
    e = e / size[:, None]
    e_rounded = e.to(k.dtype)
    p_norm = tl.zeros([BLOCK_C], tl.float32)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        _, slope, _ = activated(hidden_of(k, memory, block, CONFIG), CONFIG)
        w2 = load_weights(memory, block, 2, CONFIG).to(k.dtype)
        p = product(e_rounded, tl.trans(w2), CONFIG) * slope
        p_norm = hypotenuse(p_norm, norms_of_rows(p))
    k_norm = hypotenuse(norms_of_rows(k.to(tl.float32)), tl.full([BLOCK_C], 1.0, tl.float32))
    norm = hypotenuse(p_norm * k_norm, norms_of_rows(e) * h_norm)
    clipped = norm * size > limit
    # Neither infinite nor NaN.
    has_norm = norm * size < float("inf")
    factor = tl.where(has_norm, tl.where(clipped, limit / norm / size, 1.0), 0.0)
    at = token_numbers(factors_ptr, place, there, tokens, heads, CONFIG)
    tl.store(at, factor, mask=there)
    e *= tl.where(clipped, limit / norm, size)[:, None]
    e = tl.where((factor != 0.0)[:, None], e, 0.0)
    token = tl.arange(0, BLOCK_C)
    store_matrix(e_ptr + own * (C * CONFIG.D), e, token, tl.arange(0, CONFIG.BLOCK_D), C, CONFIG.D)
    tl.store(step_ptr + own, chunk + 1)


@triton.jit(do_not_specialize=COUNTS)
def advance_kernel(
    k_ptr,
    written_ptr,
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    rest_ptr,
    states_ptr,
    end_ptr,
    flags_ptr,
    step_ptr,
    e_ptr,
    factors_ptr,
    tokens,
    heads,
    all_heads,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_H hidden units of the memory and the momentum of one head after
    the chunk whose e is there, and whether they are finite. Weights are held as in
    ``scan_states_kernel``.
    """
    C: tl.constexpr = CONFIG.C
    SIZE: tl.constexpr = CONFIG.SIZE
    own = (tl.program_id(0) // CONFIG.BLOCKS).to(tl.int64)
    block = tl.program_id(0) % CONFIG.BLOCKS
    chunk = tl.load(step_ptr + own) - 1
    chunks = tl.cdiv(tokens, C)
    first = chunk * C
    place = own // heads, own % heads, first
    count = tl.minimum(tokens - first, C)
    token = tl.arange(0, CONFIG.BLOCK_C)
    there = token < count
    written = load_written(written_ptr, place, there, tokens, heads, CONFIG)
    at = token_numbers(factors_ptr, place, there, tokens, heads, CONFIG)
    written = written & (tl.load(at, mask=there, other=0.0) != 0.0)
    k_at = k_ptr, k_batch_stride, k_token_stride, k_head_stride
    k = token_rows(k_at, place, written, CONFIG)
    e = load_matrix(e_ptr + own * (C * CONFIG.D), token, tl.arange(0, CONFIG.BLOCK_D), C, CONFIG.D)
    gamma, nu, keep, carry, decay = load_last(
        (gamma_ptr, nu_ptr, reach_ptr), own * chunks + chunk, count, CONFIG
    )
    state = (tl.cast(chunk, tl.int64) * all_heads + own) * (2 * SIZE)
    memory = states_ptr + state
    w1, b1, w2, b2 = load_memory(memory, block, CONFIG)
    s1, sb1, s2, sb2 = load_memory(memory + SIZE, block, CONFIG)
    z = product(k, w1.to(k.dtype), CONFIG) + b1[None, :]  # [BLOCK_C, BLOCK_H]
    h, slope, _ = activated(z, CONFIG)
    p = product(e.to(k.dtype), w2.to(k.dtype), CONFIG) * slope

    # Rows of the gradients, times the factor with which each reaches the chunk's end.
    h_rounded = h.to(k.dtype)
    to_memory = -gamma[:, None] * e
    to_momentum = -nu[:, None] * e
    w1, b1 = keep * w1 + carry * s1, keep * b1 + carry * sb1
    w2, b2 = keep * w2 + carry * s2, keep * b2 + carry * sb2
    if rest_ptr is not None:
        r1, rb1, r2, rb2 = load_memory(rest_ptr + own % heads * SIZE, block, CONFIG)
        w1, b1 = w1 + (1.0 - keep) * r1, b1 + (1.0 - keep) * rb1
        w2, b2 = w2 + (1.0 - keep) * r2, b2 + (1.0 - keep) * rb2
    w2 = product_onto(w2, tl.trans(to_memory.to(k.dtype)), h_rounded, CONFIG)
    s2 = product_onto(decay * s2, tl.trans(to_momentum.to(k.dtype)), h_rounded, CONFIG)
    to_memory, to_momentum = sums(to_memory, to_momentum)
    b2 += to_memory
    sb2 = decay * sb2 + to_momentum
    k_transposed = tl.trans(k)
    to_memory = -gamma[:, None] * p
    to_momentum = -nu[:, None] * p
    w1 = product_onto(w1, k_transposed, to_memory.to(k.dtype), CONFIG)
    s1 = product_onto(decay * s1, k_transposed, to_momentum.to(k.dtype), CONFIG)
    to_memory, to_momentum = sums(to_memory, to_momentum)
    b1 += to_memory
    sb1 = decay * sb1 + to_momentum

    after = memory + all_heads * (2 * SIZE)
    if chunk == chunks - 1:
        after = end_ptr + own * (2 * SIZE)
    store_memory(after, (w1, b1, w2, b2), block, CONFIG)
    store_memory(after + SIZE, (s1, sb1, s2, sb2), block, CONFIG)
    good = are_finite((w1, b1, w2, b2), (s1, sb1, s2, sb2))
    tl.store(flags_ptr + tl.program_id(0), good)
