"""Triton kernels of the backward pass over memories of three layers or more after the reads: from
the last chunk to the first, three launches for each.

With dW, dS the gradients of the memory and the momentum with which a chunk ends, and g, nu the last
rows of gamma and nu:

    dp_l = -g (dW_l x_(l-1) + db_l) - nu (dS_l x_(l-1) + dc_l)        added to the reads'
    dx_(l-1) = -g dW_l^T p_l - nu dS_l^T p_l
    with a_l = dp_l * act'(z_l):  dp_(l+1) += w_(l+1) a_l             from p_1 to e
    dz_n = 2 de, or through the norm    dx_(l-1) += w_l^T dz_l
    dz_(l-1) = dx_(l-1) * act'(z_(l-1)) + dp_(l-1) * (w_l^T p_l) * act''(z_(l-1))
                                                                      from the last to the first
    dW_l = keep dW_l + (keep dz_q,l)^T x_q + p_l^T a_(l-1) + dz_l^T x_(l-1)
    dS_l = carry dW_l + decay dS_l + (carry dz_q,l)^T x_q             of where the chunk began
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import product_onto, zeros
from .kernels_deep import back_through, layer_of
from .tiles import COUNTS, FACTOR, is_reset, load_last, load_seen, through_inner_gradient
from .tiles_deep import (
    CURVES,
    DINPUTS,
    DKEYS,
    DRESIDUALS,
    DSLOPED,
    KEYS,
    LAST_OUTPUTS,
    QUERIES,
    READS,
    RESIDUALS,
    SLOPES,
    biases_at,
    by_sides,
    head_columns,
    load_columns,
    load_rows,
    load_tile,
    matrix_at,
    rows_of_layer,
    side_of,
    sides,
    slot_at,
    store_columns,
    store_head_columns,
    store_rows,
    store_tile,
    sums_at,
    tile_of,
    which_are_written,
)


@triton.jit(do_not_specialize=COUNTS)
def deep_ends_kernel(
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    dstate_ptr,
    rows_ptr,
    wide_ptr,
    dlast_ptr,
    step_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    CONFIG: tl.constexpr,
):
    """One program adds to the gradients of BLOCK_D columns of p or of x of one layer those through
    the chunk's end; and computes what these columns add to the gradients of the last rows of gamma
    and nu, ``dlast`` [places, SIDES, 2, C]. e is a factor of the whole gradient of a token, so its
    rounding would not average out of those: there it is in fp32.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_D
    C: tl.constexpr = CONFIG.C
    HIDDEN: tl.constexpr = CONFIG.HIDDEN
    SIZE: tl.constexpr = CONFIG.SIZE
    own = (tl.program_id(0) // CONFIG.SIDES).to(tl.int64)
    side = tl.program_id(0) % CONFIG.SIDES
    within = chunks - 1 - tl.load(step_ptr + own)
    place = own * chunks + within
    places = all_heads * chunks
    count = tl.minimum(tokens - (first_chunk + within) * C, C)
    gamma, nu, _, _, _ = load_last((gamma_ptr, nu_ptr, reach_ptr), place, count, CONFIG)
    layer, is_rows, block = side_of(side, CONFIG)
    is_first = layer == 1
    height = rows_of_layer(layer, CONFIG)
    token = tl.arange(0, CONFIG.BLOCK_C)
    unit = block * BLOCK + tl.arange(0, BLOCK)
    row_kind, col_kind = sides(layer, RESIDUALS, KEYS)
    row_side = slot_at(rows_ptr, row_kind, layer - 1, places, place, CONFIG)
    col_side = slot_at(rows_ptr, col_kind, layer - 1, places, place, CONFIG)
    memory = dstate_ptr + own * (2 * SIZE)
    at = matrix_at(memory, layer, CONFIG)
    by_memory = zeros(CONFIG.BLOCK_C, BLOCK)
    by_momentum = zeros(CONFIG.BLOCK_C, BLOCK)
    if is_rows:
        for start in tl.range(0, HIDDEN, BLOCK, num_stages=1):
            col = start + tl.arange(0, BLOCK)
            x = load_rows(col_side, token, col, HIDDEN, CONFIG)
            dw = load_tile(at, unit, col, height, CONFIG).to(x.dtype)
            by_memory = product_onto(by_memory, x, tl.trans(dw), CONFIG)
            dw = load_tile(at + SIZE, unit, col, height, CONFIG).to(x.dtype)
            by_momentum = product_onto(by_momentum, x, tl.trans(dw), CONFIG)
    else:
        for start in tl.range(0, height, BLOCK, num_stages=1):
            row = start + tl.arange(0, BLOCK)
            x = load_rows(row_side, token, row, height, CONFIG)
            dw = load_tile(at, row, unit, height, CONFIG).to(x.dtype)
            by_memory = product_onto(by_memory, x, dw, CONFIG)
            dw = load_tile(at + SIZE, row, unit, height, CONFIG).to(x.dtype)
            by_momentum = product_onto(by_momentum, x, dw, CONFIG)
    # p's side has the biases.
    of_residuals = is_rows != is_first
    width = tl.where(is_rows, height, HIDDEN)
    has_bias = of_residuals & (unit < width)
    at = biases_at(memory, layer, CONFIG) + unit
    db = tl.load(at, mask=has_bias, other=0.0)[None, :]
    dsb = tl.load(at + SIZE, mask=has_bias, other=0.0)[None, :]
    # Every product of a row, the matrix's gradient and a column counts once: with the rows.
    counts = tl.where(is_rows, 1.0, 0.0)
    kind = tl.where(of_residuals, RESIDUALS, KEYS)
    x = slot_at(rows_ptr, kind, layer - 1, places, place, CONFIG)
    x = load_rows(x, token, unit, width, CONFIG).to(tl.float32)
    is_e = is_rows & (layer == CONFIG.LAYERS)
    e = slot_at(wide_ptr, SLOPES, CONFIG.LAYERS - 1, places, place, CONFIG)
    e = load_rows(e, token, unit, tl.where(is_e, CONFIG.D, 0), CONFIG)
    x = tl.where(is_e, e, x)
    dgamma = -tl.sum(x * (counts * by_memory + db), 1)
    dnu = -tl.sum(x * (counts * by_momentum + dsb), 1)
    at = dlast_ptr + (place * CONFIG.SIDES + side) * (2 * C) + token
    tl.store(at, dgamma, mask=token < C)
    tl.store(at + C, dnu, mask=token < C)
    kind = tl.where(of_residuals, DRESIDUALS, DINPUTS)
    at = slot_at(wide_ptr, kind, layer - 1, places, place, CONFIG)
    total = load_rows(at, token, unit, width, CONFIG)
    total -= gamma[:, None] * (by_memory + db) + nu[:, None] * (by_momentum + dsb)
    # All threads have loaded what this overwrites.
    tl.debug_barrier()
    store_rows(at, total, token, unit, width, CONFIG)


@triton.jit(do_not_specialize=COUNTS)
def deep_rows_backward_kernel(
    v_ptr,
    written_ptr,
    rounded_ptr,
    rows_ptr,
    wide_ptr,
    dk_ptr,
    dv_ptr,
    sums_ptr,
    step_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes for TOKENS tokens of one chunk of one head the gradients of z of all
    layers, of k and of v, from those of p and x through the reads and the chunk's end; the sums of
    the former over its tokens are in ``sums`` [heads, TOKEN_BLOCKS, biases]. Tiles are [units,
    tokens], as in ``deep_rows_kernel``.
    """
    HIDDEN: tl.constexpr = CONFIG.HIDDEN
    D: tl.constexpr = CONFIG.D
    LAYERS: tl.constexpr = CONFIG.LAYERS
    own = (tl.program_id(0) // CONFIG.TOKEN_BLOCKS).to(tl.int64)
    block = tl.program_id(0) % CONFIG.TOKEN_BLOCKS
    step = tl.load(step_ptr + own)
    tl.store(step_ptr + all_heads + own, step, mask=block == 0)
    within = chunks - 1 - step
    place = own * chunks + within
    places = all_heads * chunks
    first = (first_chunk + within).to(tl.int64) * CONFIG.C
    token = block * CONFIG.TOKENS + tl.arange(0, CONFIG.TOKENS)
    there = token < tl.minimum(tokens - first, CONFIG.C)
    at = own // heads, own % heads, first
    written = which_are_written(written_ptr, at, token, there, tokens, heads)
    memory = rounded_ptr + own * CONFIG.MATRICES
    unit = tl.arange(0, CONFIG.BLOCK_HIDDEN)
    col = tl.arange(0, CONFIG.BLOCK_D)

    a = slot_at(rows_ptr, DSLOPED, 1, places, place, CONFIG)
    for layer in tl.static_range(1, LAYERS):
        x = slot_at(wide_ptr, DRESIDUALS, layer - 1, places, place, CONFIG)
        dp = load_columns(x, token, unit, HIDDEN, CONFIG)
        if layer > 1:
            w_at = matrix_at(memory, layer, CONFIG)
            dp = layer_of(dp, w_at, a, token, HIDDEN, CONFIG.BLOCK_HIDDEN, CONFIG)
        x = slot_at(wide_ptr, SLOPES, layer - 1, places, place, CONFIG)
        slope = load_columns(x, token, unit, HIDDEN, CONFIG)
        a = slot_at(rows_ptr, DSLOPED, layer, places, place, CONFIG)
        store_columns(a, dp * slope, token, unit, HIDDEN, CONFIG)
        x = slot_at(wide_ptr, CURVES, layer - 1, places, place, CONFIG)
        curve = dp * load_columns(x, token, unit, HIDDEN, CONFIG)
        # All threads have loaded what this overwrites, and stored what the next layer loads.
        tl.debug_barrier()
        store_columns(x, curve, token, unit, HIDDEN, CONFIG)
    x = slot_at(wide_ptr, DRESIDUALS, LAYERS - 1, places, place, CONFIG)
    de = load_columns(x, token, col, D, CONFIG)
    last = matrix_at(memory, LAYERS, CONFIG)
    de = layer_of(de, last, a, token, D, CONFIG.BLOCK_D, CONFIG)
    if CONFIG.RESIDUAL_NORM:
        x = slot_at(wide_ptr, LAST_OUTPUTS, LAYERS - 1, places, place, CONFIG)
        output = tl.trans(load_columns(x, token, col, D, CONFIG))
        x = slot_at(rows_ptr, KEYS, 0, places, place, CONFIG)
        k = tl.trans(load_columns(x, token, col, D, CONFIG))
        v_at = v_ptr, v_batch_stride, v_token_stride, v_head_stride
        v = tl.trans(head_columns(v_at, at, token, written, CONFIG))
        dr, dk_norm = through_inner_gradient(tl.trans(de), output, k, v, CONFIG)
        dr = tl.where(written[None, :], tl.trans(dr), 0.0)
        dk_norm = tl.where(written[None, :], tl.trans(dk_norm), 0.0)
    else:
        dr = tl.where(written[None, :], FACTOR * de, 0.0)
        dk_norm = dr
    store_head_columns(dv_ptr, -dk_norm, at, token, there, tokens, heads, CONFIG)
    sums = sums_at(sums_ptr, own * CONFIG.TOKEN_BLOCKS + block, 1, CONFIG)
    tl.store(sums + (LAYERS - 1) * HIDDEN + col, tl.sum(dr, 1), mask=col < D)
    dr = dr.to(rows_ptr.dtype.element_ty)
    dz = slot_at(rows_ptr, DKEYS, LAYERS - 1, places, place, CONFIG)
    store_columns(dz, dr, token, col, D, CONFIG)
    # All threads have stored the last of the curves.
    tl.debug_barrier()

    x = slot_at(wide_ptr, DINPUTS, LAYERS - 1, places, place, CONFIG)
    dx = load_columns(x, token, unit, HIDDEN, CONFIG)
    w = load_tile(last, col, unit, D, CONFIG)
    dx = product_onto(dx, tl.trans(w), dr, CONFIG)
    for back in tl.static_range(1, LAYERS):
        # The gradient of z of the layer ``LAYERS - back``.
        layer = LAYERS - back
        if back > 1:
            x = slot_at(wide_ptr, DINPUTS, layer, places, place, CONFIG)
            dx = load_columns(x, token, unit, HIDDEN, CONFIG)
            w_at = matrix_at(memory, layer + 1, CONFIG)
            dx = back_through(dx, w_at, dz, token, CONFIG)
        x = slot_at(wide_ptr, SLOPES, layer - 1, places, place, CONFIG)
        dx *= load_columns(x, token, unit, HIDDEN, CONFIG)
        x = slot_at(wide_ptr, CURVES, layer - 1, places, place, CONFIG)
        dx += load_columns(x, token, unit, HIDDEN, CONFIG)
        dz = slot_at(rows_ptr, DKEYS, layer - 1, places, place, CONFIG)
        store_columns(dz, dx, token, unit, HIDDEN, CONFIG)
        tl.store(sums + (layer - 1) * HIDDEN + unit, tl.sum(dx, 1), mask=unit < HIDDEN)
        # All threads have stored what the next layer loads.
        tl.debug_barrier()
    x = slot_at(wide_ptr, DINPUTS, 0, places, place, CONFIG)
    dk = load_columns(x, token, col, D, CONFIG)
    dk = layer_of(dk, memory, dz, token, D, CONFIG.BLOCK_D, CONFIG)
    if CONFIG.RESIDUAL_NORM:
        dk += dk_norm
    dk = tl.where(written[None, :], dk, 0.0)
    store_head_columns(dk_ptr, dk, at, token, there, tokens, heads, CONFIG)


@triton.jit
def two_sides(rows_ptr, kinds, layer, token, row, col, height, places, place, CONFIG: tl.constexpr):
    """Both sides of a layer, of two kinds, [tokens, columns] each."""
    row_kind, col_kind = kinds
    x = slot_at(rows_ptr, row_kind, layer - 1, places, place, CONFIG)
    y = slot_at(rows_ptr, col_kind, layer - 1, places, place, CONFIG)
    down = load_rows(x, token, row, height, CONFIG)
    return down, load_rows(y, token, col, CONFIG.HIDDEN, CONFIG)


@triton.jit
def add_to_tile(at, x, row, col, height, CONFIG: tl.constexpr):
    """A tile of a matrix, added to what is stored."""
    store_tile(at, load_tile(at, row, col, height, CONFIG) + x, row, col, height, CONFIG)


@triton.jit(do_not_specialize=COUNTS)
def deep_states_backward_kernel(
    gamma_ptr,
    reach_ptr,
    rest_ptr,
    states_ptr,
    rows_ptr,
    wide_ptr,
    dstate_ptr,
    drest_ptr,
    resets_ptr,
    dfirst_ptr,
    rounded_ptr,
    dends_ptr,
    read_sums_ptr,
    row_sums_ptr,
    step_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    CONFIG: tl.constexpr,
):
    """One program takes one tile of the gradient of the memory and the momentum of one head,
    ``dstate``, from a chunk's end to its start. For the chunk before, whose end that is, it rounds
    the tile of the memory with which that began, and computes what the tile adds to the gradients
    of the last keep, carry and decay, ``dends`` [chunks, heads, TILES, 3]. ``drest`` has every
    row's own. Without ``rows`` it does the latter for the last of all chunks. The gradient of the
    memory with which a chunk that ``resets`` names began is added to ``dfirst``, and none passes to
    the chunk before.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_D
    SIZE: tl.constexpr = CONFIG.SIZE
    BIASES: tl.constexpr = CONFIG.SIZE - CONFIG.MATRICES
    TOKEN_BLOCKS: tl.constexpr = CONFIG.TOKEN_BLOCKS
    own = (tl.program_id(0) // CONFIG.TILES).to(tl.int64)
    tile = tl.program_id(0) % CONFIG.TILES
    layer, row_block, col_block = tile_of(tile, CONFIG)
    is_first = layer == 1
    height = rows_of_layer(layer, CONFIG)
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    col = col_block * BLOCK + tl.arange(0, BLOCK)
    # Biases with the first tile of p's side.
    unit = tl.where(is_first, col, row)
    width = tl.where(layer == CONFIG.LAYERS, CONFIG.D, CONFIG.HIDDEN)
    has_bias = (unit < width) & (tl.where(is_first, row_block, col_block) == 0)
    dmemory = dstate_ptr + own * (2 * SIZE)
    at = matrix_at(dmemory, layer, CONFIG)
    dw = load_tile(at, row, col, height, CONFIG)
    ds = load_tile(at + SIZE, row, col, height, CONFIG)
    biases = biases_at(dmemory, layer, CONFIG) + unit
    db = tl.load(biases, mask=has_bias, other=0.0)
    dsb = tl.load(biases + SIZE, mask=has_bias, other=0.0)
    chunk = first_chunk + chunks - 1
    if rows_ptr is not None:
        step = tl.load(step_ptr + all_heads + own)
        tl.store(step_ptr + own, step + 1, mask=tile == 0)
        within = chunks - 1 - step
        place = own * chunks + within
        places = all_heads * chunks
        count = tl.minimum(tokens - (first_chunk + within) * CONFIG.C, CONFIG.C)
        token = tl.arange(0, CONFIG.BLOCK_C)
        _, seen_keep, seen_carry = load_seen(gamma_ptr, reach_ptr, place, count, CONFIG)
        end = reach_ptr + place * (3 * CONFIG.C) + CONFIG.C - 1
        keep = tl.load(end)
        carry = tl.load(end + CONFIG.C)
        decay = tl.load(end + 2 * CONFIG.C)
        if drest_ptr is not None:
            drest = matrix_at(drest_ptr + own * SIZE, layer, CONFIG)
            dr = load_tile(drest, row, col, height, CONFIG) + (1.0 - keep) * dw
            drest_biases = biases_at(drest_ptr + own * SIZE, layer, CONFIG) + unit
            drb = tl.load(drest_biases, mask=has_bias, other=0.0) + (1.0 - keep) * db
        ds = carry * dw + decay * ds
        dw = keep * dw
        dsb = carry * db + decay * dsb
        db = keep * db
        # The gradient of z on p's side, and x on the other.
        x = slot_at(wide_ptr, READS, layer - 1, places, place, CONFIG)
        dz = load_rows(x, token, unit, width, CONFIG)
        queries = slot_at(rows_ptr, QUERIES, layer - 1, places, place, CONFIG)
        other = tl.where(is_first, row, col)
        inputs = tl.where(is_first, CONFIG.D, CONFIG.HIDDEN)
        x_q = load_rows(queries, token, other, inputs, CONFIG).to(tl.float32)
        dtype: tl.constexpr = rows_ptr.dtype.element_ty
        bias = (layer - 1) * CONFIG.HIDDEN + unit
        sums = sums_at(read_sums_ptr, place, 3, CONFIG) + bias
        db += tl.load(sums, mask=has_bias, other=0.0)
        dsb += tl.load(sums + BIASES, mask=has_bias, other=0.0)
        for block in tl.static_range(TOKEN_BLOCKS):
            at_block = own * CONFIG.TOKEN_BLOCKS + block
            row_sums = sums_at(row_sums_ptr, at_block, 1, CONFIG) + bias
            db += tl.load(row_sums, mask=has_bias, other=0.0)
        down, across = by_sides(seen_keep * dz, x_q, is_first, dtype)
        dw = product_onto(dw, tl.trans(down), across, CONFIG)
        down, across = by_sides(seen_carry * dz, x_q, is_first, dtype)
        ds = product_onto(ds, tl.trans(down), across, CONFIG)
        if drest_ptr is not None:
            drb += tl.load(sums + 2 * BIASES, mask=has_bias, other=0.0)
            down, across = by_sides((1.0 - seen_keep) * dz, x_q, is_first, dtype)
            dr = product_onto(dr, tl.trans(down), across, CONFIG)
            store_tile(drest, dr, row, col, height, CONFIG)
            tl.store(drest_biases, drb, mask=has_bias)
        kinds = sides(layer, DKEYS, KEYS)
        down, across = two_sides(
            rows_ptr, kinds, layer, token, row, col, height, places, place, CONFIG
        )
        dw = product_onto(dw, tl.trans(down), across, CONFIG)
        if layer > 1:
            kinds = RESIDUALS, DSLOPED
            down, across = two_sides(
                rows_ptr, kinds, layer, token, row, col, height, places, place, CONFIG
            )
            dw = product_onto(dw, tl.trans(down), across, CONFIG)
        if resets_ptr is not None:
            reset = is_reset(resets_ptr, own // heads, first_chunk + within, tokens, CONFIG)
            if reset:
                first = matrix_at(dfirst_ptr + own * (2 * SIZE), layer, CONFIG)
                add_to_tile(first, dw, row, col, height, CONFIG)
                add_to_tile(first + SIZE, ds, row, col, height, CONFIG)
                first = biases_at(dfirst_ptr + own * (2 * SIZE), layer, CONFIG) + unit
                tl.store(first, tl.load(first, mask=has_bias) + db, mask=has_bias)
                first += SIZE
                tl.store(first, tl.load(first, mask=has_bias) + dsb, mask=has_bias)
            dw, ds = tl.where(reset, 0.0, dw), tl.where(reset, 0.0, ds)
            db, dsb = tl.where(reset, 0.0, db), tl.where(reset, 0.0, dsb)
        store_tile(at, dw, row, col, height, CONFIG)
        store_tile(at + SIZE, ds, row, col, height, CONFIG)
        tl.store(biases, db, mask=has_bias)
        tl.store(biases + SIZE, dsb, mask=has_bias)
        chunk = first_chunk + within - 1
    if chunk >= 0:
        memory = states_ptr + (tl.cast(chunk, tl.int64) * all_heads + own) * (2 * SIZE)
        at = matrix_at(memory, layer, CONFIG)
        w = load_tile(at, row, col, height, CONFIG)
        s = load_tile(at + SIZE, row, col, height, CONFIG)
        rounded = matrix_at(rounded_ptr + own * CONFIG.MATRICES, layer, CONFIG)
        store_tile(rounded, w, row, col, height, CONFIG)
        at = biases_at(memory, layer, CONFIG) + unit
        b = tl.load(at, mask=has_bias, other=0.0)
        sb = tl.load(at + SIZE, mask=has_bias, other=0.0)
        if rest_ptr is not None:
            rest = rest_ptr + (own % heads) * SIZE
            w -= load_tile(matrix_at(rest, layer, CONFIG), row, col, height, CONFIG)
            b -= tl.load(biases_at(rest, layer, CONFIG) + unit, mask=has_bias, other=0.0)
        at = dends_ptr + ((tl.cast(chunk, tl.int64) * all_heads + own) * CONFIG.TILES + tile) * 3
        tl.store(at, tl.sum(dw * w) + tl.sum(db * b))
        tl.store(at + 1, tl.sum(dw * s) + tl.sum(db * sb))
        tl.store(at + 2, tl.sum(ds * s) + tl.sum(dsb * sb))
