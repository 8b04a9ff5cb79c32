"""Triton kernels of the forward pass over memories of three layers or more, in the order in which
they run. With the names of ``kernels``, x_0 = k and e = p_n:

    z_l = w_l x_(l-1) + b_l    x_l = act(z_l)    e = 2 (z_n - v)
    p_l = (w_(l+1)^T p_(l+1)) * act'(z_l)                          of a chunk's tokens
    W, S of the next chunk = W_t, S_t of the last token            chunk after chunk
    z_q,l = keep (w_l x_q + b_l) + carry (s_l x_q + c_l) + (1 - keep) (r_l x_q + d_l)
            - (gamma * (x_q x_(l-1)^T + 1)) p_l                    all chunks at once

with R, to which the memory forgets, zero where it is absent; with RESIDUAL_NORM what is read is
q + N of the last layer, and e the gradient through k + N of it. A token's x and p need no other
token of its chunk, and of what comes next every tile of every matrix no other tile: a chunk is two
launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    activated,
    load_vector,
    product,
    product_onto,
    store_token_rows,
    token_rows,
    zeros,
)
from .tiles import COUNTS, inner_gradient, is_reset, load_last, load_seen, normalised
from .tiles_deep import (
    CURVES,
    KEYS,
    LAST_OUTPUTS,
    QUERIES,
    READS,
    RESIDUALS,
    SLOPES,
    WIDE_RESIDUALS,
    biases_at,
    by_sides,
    head_columns,
    load_columns,
    load_rows,
    load_tile,
    matrix_at,
    rows_of_layer,
    slot_at,
    store_columns,
    store_rows,
    store_tile,
    sums_at,
    tile_of,
    which_are_written,
)


@triton.jit
def layer_of(total, matrix, x, token, rows, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """total + w x^T of the first ``rows`` of ROWS rows of a matrix, [ROWS, tokens]."""
    row = tl.arange(0, ROWS)
    for start in tl.range(0, CONFIG.LOOP, CONFIG.STEP, num_stages=CONFIG.STAGES):
        col = start + tl.arange(0, CONFIG.STEP)
        w = load_tile(matrix, row, col, rows, CONFIG)
        part = load_columns(x, token, col, CONFIG.HIDDEN, CONFIG)
        total = product_onto(total, w.to(part.dtype), part, CONFIG)
    return total


@triton.jit
def back_through(total, matrix, p, token, CONFIG: tl.constexpr):
    """total + w^T p^T of a matrix between hidden layers, [BLOCK_HIDDEN, tokens]."""
    col = tl.arange(0, CONFIG.BLOCK_HIDDEN)
    for start in tl.range(0, CONFIG.LOOP, CONFIG.STEP, num_stages=CONFIG.STAGES):
        row = start + tl.arange(0, CONFIG.STEP)
        w = load_tile(matrix, row, col, CONFIG.HIDDEN, CONFIG)
        part = load_columns(p, token, row, CONFIG.HIDDEN, CONFIG)
        total = product_onto(total, tl.trans(w).to(part.dtype), part, CONFIG)
    return total


@triton.jit(do_not_specialize=COUNTS)
def deep_rows_kernel(
    k_ptr,
    v_ptr,
    written_ptr,
    gamma_ptr,
    nu_ptr,
    rounded_ptr,
    states_ptr,
    rows_ptr,
    wide_ptr,
    sums_ptr,
    loss_ptr,
    step_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes x and p of all layers for TOKENS tokens of one chunk of one head. With
    ``step`` [2, heads] the chunk is the one that the first of its rows counts, the matrices are
    read from ``rounded`` [heads, MATRICES], in q's dtype, ``wide`` has one place for each head, and
    ``sums`` [heads, TOKEN_BLOCKS, 2, biases] is what the tokens' p add to the biases and to their
    momentum, and ``loss`` [B, tokens, heads] is |M(k) - v|^2; without, a program takes one of
    ``chunks`` chunks from ``first_chunk`` on and writes what the backward pass needs besides. Tiles
    are [units, tokens], so that few tokens fill them.
    """
    HIDDEN: tl.constexpr = CONFIG.HIDDEN
    D: tl.constexpr = CONFIG.D
    SIZE: tl.constexpr = CONFIG.SIZE
    LAYERS: tl.constexpr = CONFIG.LAYERS
    KEEPS: tl.constexpr = step_ptr is None
    program = (tl.program_id(0) // CONFIG.TOKEN_BLOCKS).to(tl.int64)
    block = tl.program_id(0) % CONFIG.TOKEN_BLOCKS
    places = all_heads * chunks
    if KEEPS:
        own = program // chunks
        chunk = first_chunk + program % chunks
        place = program
        wide_place = place
        wide_places = places
    else:
        own = program
        chunk = tl.load(step_ptr + own).to(tl.int64)
        tl.store(step_ptr + all_heads + own, chunk.to(tl.int32), mask=block == 0)
        place = own * chunks + chunk
        wide_place = own
        wide_places = all_heads
    first = chunk * CONFIG.C
    token = block * CONFIG.TOKENS + tl.arange(0, CONFIG.TOKENS)
    there = token < tl.minimum(tokens - first, CONFIG.C)
    at = own // heads, own % heads, first
    written = which_are_written(written_ptr, at, token, there, tokens, heads)
    k_at = k_ptr, k_batch_stride, k_token_stride, k_head_stride
    v_at = v_ptr, v_batch_stride, v_token_stride, v_head_stride
    biases = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    memory = biases
    if not KEEPS:
        memory = rounded_ptr + own * CONFIG.MATRICES
        at_end = gamma_ptr + place * (CONFIG.C * CONFIG.C) + (CONFIG.C - 1) * CONFIG.C
        gamma = tl.load(at_end + token, mask=there, other=0.0)[None, :]
        nu = tl.load(nu_ptr + place * CONFIG.C + token, mask=there, other=0.0)[None, :]
        sums = sums_at(sums_ptr, own * CONFIG.TOKEN_BLOCKS + block, 2, CONFIG)
    unit = tl.arange(0, CONFIG.BLOCK_HIDDEN)
    col = tl.arange(0, CONFIG.BLOCK_D)

    k = head_columns(k_at, at, token, written, CONFIG)
    store_columns(slot_at(rows_ptr, KEYS, 0, places, place, CONFIG), k, token, col, D, CONFIG)
    w = load_tile(memory, col, unit, D, CONFIG)
    z = product(tl.trans(w).to(k.dtype), k, CONFIG)
    x = slot_at(rows_ptr, KEYS, 1, places, place, CONFIG)
    for layer in tl.static_range(1, LAYERS):
        if layer > 1:
            # All threads have stored x of the layer before.
            tl.debug_barrier()
            z = zeros(CONFIG.BLOCK_HIDDEN, CONFIG.TOKENS)
            w_at = matrix_at(memory, layer, CONFIG)
            z = layer_of(z, w_at, x, token, HIDDEN, CONFIG.BLOCK_HIDDEN, CONFIG)
        z += load_vector(biases_at(biases, layer, CONFIG), unit, HIDDEN)[:, None]
        h, slope, curve = activated(z, CONFIG)
        x = slot_at(rows_ptr, KEYS, layer, places, place, CONFIG)
        store_columns(x, h.to(k.dtype), token, unit, HIDDEN, CONFIG)
        slopes = slot_at(wide_ptr, SLOPES, layer - 1, wide_places, wide_place, CONFIG)
        store_columns(slopes, slope, token, unit, HIDDEN, CONFIG)
        if KEEPS:
            curves = slot_at(wide_ptr, CURVES, layer - 1, wide_places, wide_place, CONFIG)
            store_columns(curves, curve, token, unit, HIDDEN, CONFIG)
    tl.debug_barrier()
    last = matrix_at(memory, LAYERS, CONFIG)
    output = zeros(CONFIG.BLOCK_D, CONFIG.TOKENS)
    output = layer_of(output, last, x, token, D, CONFIG.BLOCK_D, CONFIG)
    output += load_vector(biases_at(biases, LAYERS, CONFIG), col, D)[:, None]
    v = head_columns(v_at, at, token, written, CONFIG)
    if CONFIG.RESIDUAL_NORM:
        # Again, rather than held through all layers.
        k = head_columns(k_at, at, token, written, CONFIG)
    e, residual = inner_gradient(tl.trans(output), tl.trans(k), tl.trans(v), written, CONFIG)
    e = tl.trans(e)
    if KEEPS:
        if CONFIG.RESIDUAL_NORM:
            outputs = slot_at(wide_ptr, LAST_OUTPUTS, LAYERS - 1, wide_places, wide_place, CONFIG)
            store_columns(outputs, output, token, col, D, CONFIG)
        residuals = slot_at(wide_ptr, SLOPES, LAYERS - 1, wide_places, wide_place, CONFIG)
        store_columns(residuals, e, token, col, D, CONFIG)
    else:
        exact = slot_at(wide_ptr, WIDE_RESIDUALS, LAYERS - 1, wide_places, wide_place, CONFIG)
        store_columns(exact, e, token, col, D, CONFIG)
        store_sums(sums, -gamma * e, -nu * e, LAYERS, col, D, CONFIG)
        row = (at[0].to(tl.int64) * tokens + first + token) * heads + at[1]
        tl.store(loss_ptr + row, tl.sum(residual * residual, 1), mask=there)
    e = e.to(k.dtype)
    p = slot_at(rows_ptr, RESIDUALS, LAYERS - 1, places, place, CONFIG)
    store_columns(p, e, token, col, D, CONFIG)

    w = load_tile(last, col, unit, D, CONFIG)
    by_x = product(tl.trans(w).to(k.dtype), e, CONFIG)
    for back in tl.static_range(1, LAYERS):
        # p of the layer ``LAYERS - back``.
        layer = LAYERS - back
        if back > 1:
            # All threads have stored p of the layer behind.
            tl.debug_barrier()
            by_x = zeros(CONFIG.BLOCK_HIDDEN, CONFIG.TOKENS)
            w_at = matrix_at(memory, layer + 1, CONFIG)
            by_x = back_through(by_x, w_at, p, token, CONFIG)
        slopes = slot_at(wide_ptr, SLOPES, layer - 1, wide_places, wide_place, CONFIG)
        slope = load_columns(slopes, token, unit, HIDDEN, CONFIG)
        p = slot_at(rows_ptr, RESIDUALS, layer - 1, places, place, CONFIG)
        by_z = by_x * slope
        store_columns(p, by_z, token, unit, HIDDEN, CONFIG)
        if not KEEPS:
            exact = slot_at(wide_ptr, WIDE_RESIDUALS, layer - 1, wide_places, wide_place, CONFIG)
            store_columns(exact, by_z, token, unit, HIDDEN, CONFIG)
            store_sums(sums, -gamma * by_z, -nu * by_z, layer, unit, HIDDEN, CONFIG)
        else:
            curves = slot_at(wide_ptr, CURVES, layer - 1, wide_places, wide_place, CONFIG)
            curve = by_x * load_columns(curves, token, unit, HIDDEN, CONFIG)
            # All threads have loaded what this overwrites.
            tl.debug_barrier()
            store_columns(curves, curve, token, unit, HIDDEN, CONFIG)


@triton.jit
def store_sums(at, to_memory, to_momentum, layer, unit, width, CONFIG: tl.constexpr):
    """Sums over tokens of [units, tokens], for the biases of a layer."""
    at += (layer - 1) * CONFIG.HIDDEN + unit
    tl.store(at, tl.sum(to_memory, 1), mask=unit < width)
    at += CONFIG.SIZE - CONFIG.MATRICES
    tl.store(at, tl.sum(to_momentum, 1), mask=unit < width)


@triton.jit(do_not_specialize=COUNTS)
def deep_advance_kernel(
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    rest_ptr,
    resets_ptr,
    rows_ptr,
    wide_ptr,
    states_ptr,
    end_ptr,
    rounded_ptr,
    sums_ptr,
    step_ptr,
    tokens,
    heads,
    all_heads,
    chunks,
    CONFIG: tl.constexpr,
):
    """One program computes one tile of the memory and the momentum of one head after a chunk, and
    its rounding in ``rounded``; if ``resets`` names the next one, that of the first.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_D
    SIZE: tl.constexpr = CONFIG.SIZE
    TOKEN_BLOCKS: tl.constexpr = CONFIG.TOKEN_BLOCKS
    own = (tl.program_id(0) // CONFIG.TILES).to(tl.int64)
    tile = tl.program_id(0) % CONFIG.TILES
    chunk = tl.load(step_ptr + all_heads + own)
    tl.store(step_ptr + own, chunk + 1, mask=tile == 0)
    place = own * chunks + chunk
    places = all_heads * chunks
    count = tl.minimum(tokens - chunk * CONFIG.C, CONFIG.C)
    gamma, nu, keep, carry, decay = load_last((gamma_ptr, nu_ptr, reach_ptr), place, count, CONFIG)
    memory = states_ptr + (tl.cast(chunk, tl.int64) * all_heads + own) * (2 * SIZE)
    after = memory + all_heads * (2 * SIZE)
    if chunk == chunks - 1:
        after = end_ptr + own * (2 * SIZE)
    layer, row_block, col_block = tile_of(tile, CONFIG)
    is_first = layer == 1
    height = rows_of_layer(layer, CONFIG)
    token = tl.arange(0, CONFIG.BLOCK_C)
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    col = col_block * BLOCK + tl.arange(0, BLOCK)
    # p's side and x's.
    unit = tl.where(is_first, col, row)
    width = tl.where(layer == CONFIG.LAYERS, CONFIG.D, CONFIG.HIDDEN)
    p = slot_at(wide_ptr, WIDE_RESIDUALS, layer - 1, all_heads, own, CONFIG)
    p = load_rows(p, token, unit, width, CONFIG)
    other = tl.where(is_first, row, col)
    x = slot_at(rows_ptr, KEYS, layer - 1, places, place, CONFIG)
    x = load_rows(x, token, other, tl.where(is_first, CONFIG.D, CONFIG.HIDDEN), CONFIG)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    # The weight goes to p, the larger of the two: on x it made numbers too small for float16.
    down_memory, across_memory = by_sides(-gamma[:, None] * p, x, is_first, dtype)
    down_momentum, across_momentum = by_sides(-nu[:, None] * p, x, is_first, dtype)

    at = matrix_at(memory, layer, CONFIG)
    w = load_tile(at, row, col, height, CONFIG)
    s = load_tile(at + SIZE, row, col, height, CONFIG)
    w = keep * w + carry * s
    if rest_ptr is not None:
        rest = rest_ptr + (own % heads) * SIZE
        r = load_tile(matrix_at(rest, layer, CONFIG), row, col, height, CONFIG)
        w += (1.0 - keep) * r
    w = product_onto(w, tl.trans(down_memory), across_memory, CONFIG)
    s = product_onto(decay * s, tl.trans(down_momentum), across_momentum, CONFIG)
    first = states_ptr + own * (2 * SIZE)
    if resets_ptr is not None:
        following = tl.minimum(chunk + 1, chunks - 1)
        reset = is_reset(resets_ptr, own // heads, following, tokens, CONFIG)
        # What the last chunk leaves is no chunk's beginning.
        reset = reset & (chunk < chunks - 1)
        if reset:
            at = matrix_at(first, layer, CONFIG)
            w = load_tile(at, row, col, height, CONFIG)
            s = load_tile(at + SIZE, row, col, height, CONFIG)
    at = matrix_at(after, layer, CONFIG)
    store_tile(at, w, row, col, height, CONFIG)
    store_tile(at + SIZE, s, row, col, height, CONFIG)
    rounded = matrix_at(rounded_ptr + own * CONFIG.MATRICES, layer, CONFIG)
    store_tile(rounded, w, row, col, height, CONFIG)

    # Biases with the first tile of p's side.
    inside = (unit < width) & (tl.where(is_first, row_block, col_block) == 0)
    at = biases_at(memory, layer, CONFIG) + unit
    b = tl.load(at, mask=inside, other=0.0)
    sb = tl.load(at + SIZE, mask=inside, other=0.0)
    b = keep * b + carry * sb
    sb = decay * sb
    if rest_ptr is not None:
        r = tl.load(biases_at(rest, layer, CONFIG) + unit, mask=inside, other=0.0)
        b += (1.0 - keep) * r
    for block in tl.static_range(TOKEN_BLOCKS):
        at = sums_at(sums_ptr, own * CONFIG.TOKEN_BLOCKS + block, 2, CONFIG)
        at += (layer - 1) * CONFIG.HIDDEN + unit
        b += tl.load(at, mask=inside, other=0.0)
        sb += tl.load(at + (SIZE - CONFIG.MATRICES), mask=inside, other=0.0)
    if resets_ptr is not None:
        at = biases_at(first, layer, CONFIG) + unit
        if reset:
            b = tl.load(at, mask=inside, other=0.0)
            sb = tl.load(at + SIZE, mask=inside, other=0.0)
    at = biases_at(after, layer, CONFIG) + unit
    tl.store(at, b, mask=inside)
    tl.store(at + SIZE, sb, mask=inside)


@triton.jit(do_not_specialize=(*COUNTS, "layer"))
def deep_read_kernel(
    q_ptr,
    gamma_ptr,
    reach_ptr,
    rest_ptr,
    states_ptr,
    rows_ptr,
    wide_ptr,
    y_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    layer,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_D columns of one layer of what the queries of one chunk of one
    head read: of the last layer y, or if KEEPS what the norm is taken of; of the others x_q, and
    act'(z_q) if KEEPS.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_C: tl.constexpr = CONFIG.BLOCK_C
    SIZE: tl.constexpr = CONFIG.SIZE
    IS_FIRST: tl.constexpr = CONFIG.KIND == "first"
    IS_LAST: tl.constexpr = CONFIG.KIND == "last"
    INPUTS: tl.constexpr = CONFIG.D if IS_FIRST else CONFIG.HIDDEN
    OUTPUTS: tl.constexpr = CONFIG.D if IS_LAST else CONFIG.HIDDEN
    OUTPUT_BLOCKS: tl.constexpr = 1 if IS_LAST else CONFIG.BLOCKS
    program = tl.program_id(0) // OUTPUT_BLOCKS
    block = tl.program_id(0) % OUTPUT_BLOCKS
    place, own, chunk, at, count, there = chunk_of_place(
        program, first_chunk, chunks, tokens, heads, CONFIG
    )
    places = all_heads * chunks
    token = tl.arange(0, BLOCK_C)
    out = block * BLOCK + tl.arange(0, BLOCK)
    gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, place, count, CONFIG)
    memory = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    matrix = matrix_at(memory, layer, CONFIG)
    keys = slot_at(rows_ptr, KEYS, layer - 1, places, place, CONFIG)
    queries = slot_at(rows_ptr, QUERIES, layer - 1, places, place, CONFIG)
    if rest_ptr is not None:
        rest = rest_ptr + (own % heads) * SIZE
        rest_matrix = matrix_at(rest, layer, CONFIG)
    matches = tl.full([BLOCK_C, BLOCK_C], 1.0, tl.float32)
    by_memory = zeros(BLOCK_C, BLOCK)
    by_momentum = zeros(BLOCK_C, BLOCK)
    if rest_ptr is not None:
        by_rest = zeros(BLOCK_C, BLOCK)
    for start in tl.range(0, INPUTS, BLOCK, num_stages=1):
        col = start + tl.arange(0, BLOCK)
        x = load_rows(keys, token, col, INPUTS, CONFIG)
        if IS_FIRST:
            q_at = q_ptr, q_batch_stride, q_token_stride, q_head_stride
            x_q = token_rows(q_at, at, there, CONFIG)
            if CONFIG.KEEPS:
                own_row = tl.where(block == 0, token, CONFIG.C)
                store_rows(queries, x_q, own_row, col, INPUTS, CONFIG)
        else:
            x_q = load_rows(queries, token, col, INPUTS, CONFIG)
        matches = product_onto(matches, x_q, tl.trans(x), CONFIG)
        w = inputs_to_outputs(matrix, col, out, INPUTS, OUTPUTS, CONFIG).to(x.dtype)
        by_memory = product_onto(by_memory, x_q, w, CONFIG)
        w = inputs_to_outputs(matrix + SIZE, col, out, INPUTS, OUTPUTS, CONFIG).to(x.dtype)
        by_momentum = product_onto(by_momentum, x_q, w, CONFIG)
        if rest_ptr is not None:
            w = inputs_to_outputs(rest_matrix, col, out, INPUTS, OUTPUTS, CONFIG).to(x.dtype)
            by_rest = product_onto(by_rest, x_q, w, CONFIG)
    b = load_vector(biases_at(memory, layer, CONFIG), out, OUTPUTS)
    z = keep * (by_memory + b[None, :])
    b = load_vector(biases_at(memory + SIZE, layer, CONFIG), out, OUTPUTS)
    z += carry * (by_momentum + b[None, :])
    if rest_ptr is not None:
        b = load_vector(biases_at(rest, layer, CONFIG), out, OUTPUTS)
        z += (1.0 - keep) * (by_rest + b[None, :])
    # The ones carry the biases.
    p = slot_at(rows_ptr, RESIDUALS, layer - 1, places, place, CONFIG)
    p = load_rows(p, token, out, OUTPUTS, CONFIG)
    z = product_onto(z, (-gamma * matches).to(p.dtype), p, CONFIG)
    if IS_LAST and CONFIG.KEEPS:
        outputs = slot_at(wide_ptr, READS, layer - 1, places, place, CONFIG)
        store_rows(outputs, z, token, out, OUTPUTS, CONFIG)
    elif IS_LAST:
        if CONFIG.RESIDUAL_NORM:
            n, _ = normalised(z, CONFIG)
            q_at = q_ptr, q_batch_stride, q_token_stride, q_head_stride
            z = token_rows(q_at, at, there, CONFIG).to(tl.float32) + n
        store_token_rows(y_ptr, z, at, there, tokens, heads, CONFIG)
    else:
        h, slope, _ = activated(z, CONFIG)
        x = slot_at(rows_ptr, QUERIES, layer, places, place, CONFIG)
        store_rows(x, h, token, out, OUTPUTS, CONFIG)
        if CONFIG.KEEPS:
            slopes = slot_at(wide_ptr, READS, layer - 1, places, place, CONFIG)
            store_rows(slopes, slope, token, out, OUTPUTS, CONFIG)


@triton.jit
def inputs_to_outputs(
    matrix, col, out, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CONFIG: tl.constexpr
):
    """w_l^T for these inputs and outputs."""
    if CONFIG.KIND == "first":
        w = load_tile(matrix, col, out, INPUTS, CONFIG)
    else:
        w = tl.trans(load_tile(matrix, out, col, OUTPUTS, CONFIG))
    return w


@triton.jit
def chunk_of_place(place, first_chunk, chunks, tokens, heads, CONFIG: tl.constexpr):
    """``chunk_of_program`` where several programs take one chunk of one head."""
    place = place.to(tl.int64)
    own = place // chunks
    chunk = first_chunk + place % chunks
    first = chunk * CONFIG.C
    count = tl.minimum(tokens - first, CONFIG.C)
    there = tl.arange(0, CONFIG.BLOCK_C) < count
    return place, own, chunk, (own // heads, own % heads, first), count, there
