"""Triton kernel of the first part of the backward pass over memories of three layers or more: the
reads of all chunks at once, layer by layer from the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import load_matrix, product, product_onto, store_matrix, zeros
from .tiles import COUNTS, chunk_of_program, load_seen, normalised, through_norm
from .tiles_deep import (
    DINPUTS,
    DRESIDUALS,
    KEYS,
    QUERIES,
    READS,
    RESIDUALS,
    biases_at,
    head_columns,
    load_columns,
    load_rows,
    load_tile,
    matrix_at,
    slot_at,
    store_columns,
    store_head_columns,
    sums_at,
)


@triton.jit(do_not_specialize=(*COUNTS, "layer"))
def deep_read_backward_kernel(
    dy_ptr,
    gamma_ptr,
    reach_ptr,
    rest_ptr,
    states_ptr,
    rows_ptr,
    wide_ptr,
    dq_ptr,
    dgamma_ptr,
    dreach_ptr,
    sums_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    layer,
    dy_batch_stride,
    dy_token_stride,
    dy_head_stride,
    CONFIG: tl.constexpr,
):
    """One program takes the gradient of z_q of one layer, of one chunk of one head, to that of z_q
    of the layer before, of the first layer to dq, and computes the gradients through the layer's
    reads of p, of the keys' x, of gamma, keep and carry. That of z_q takes the place of the slope,
    in the last layer that of the output of which the norm is taken; ``sums`` [places, 3, biases] is
    what it adds to those of the biases, of their momentum and of the rest's.

    What is the same for all blocks is the right operand of each product: a left one is held in
    registers, and ptxas overwrites them although the next iteration needs them.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_D
    BLOCK_C: tl.constexpr = CONFIG.BLOCK_C
    C: tl.constexpr = CONFIG.C
    DTYPE: tl.constexpr = dy_ptr.dtype.element_ty
    SIZE: tl.constexpr = CONFIG.SIZE
    IS_FIRST: tl.constexpr = CONFIG.KIND == "first"
    IS_LAST: tl.constexpr = CONFIG.KIND == "last"
    INPUTS: tl.constexpr = CONFIG.D if IS_FIRST else CONFIG.HIDDEN
    OUTPUTS: tl.constexpr = CONFIG.D if IS_LAST else CONFIG.HIDDEN
    local, own, chunk, at, count, there = chunk_of_program(
        first_chunk, chunks, tokens, heads, CONFIG
    )
    places = all_heads * chunks
    token = tl.arange(0, BLOCK_C)
    memory = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    matrix = matrix_at(memory, layer, CONFIG)
    keys = slot_at(rows_ptr, KEYS, layer - 1, places, local, CONFIG)
    residuals = slot_at(rows_ptr, RESIDUALS, layer - 1, places, local, CONFIG)
    queries = slot_at(rows_ptr, QUERIES, layer - 1, places, local, CONFIG)
    reads = slot_at(wide_ptr, READS, layer - 1, places, local, CONFIG)
    sums = sums_at(sums_ptr, local, 3, CONFIG)
    gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, CONFIG)
    dkeep = tl.zeros([BLOCK_C], tl.float32)
    dcarry = tl.zeros([BLOCK_C], tl.float32)
    if IS_LAST:
        dy_at = dy_ptr, dy_batch_stride, dy_token_stride, dy_head_stride
        dy = head_columns(dy_at, at, token, there, CONFIG)
        col = tl.arange(0, CONFIG.BLOCK_D)
        dy_wide = dy.to(tl.float32)
        if CONFIG.RESIDUAL_NORM:
            output = load_columns(reads, token, col, OUTPUTS, CONFIG)
            n, inverse = normalised(tl.trans(output), CONFIG)
            dy_wide = tl.trans(through_norm(tl.trans(dy_wide), n, inverse, CONFIG))
            # All threads have loaded what this overwrites.
            tl.debug_barrier()
        store_columns(reads, dy_wide, token, col, OUTPUTS, CONFIG)
        at_biases = memory, sums, at[1], layer
        more = through_biases(dy_wide, at_biases, rest_ptr, col, OUTPUTS, keep, carry, CONFIG)
        dkeep += more[0]
        dcarry += more[1]
        # All threads have stored what these load.
        tl.debug_barrier()
    matches = tl.full([BLOCK_C, BLOCK_C], 1.0, tl.float32)
    for start in tl.range(0, INPUTS, BLOCK, num_stages=1):
        col = start + tl.arange(0, BLOCK)
        x_q = load_rows(queries, token, col, INPUTS, CONFIG)
        x = load_rows(keys, token, col, INPUTS, CONFIG)
        matches = product_onto(matches, x_q, tl.trans(x), CONFIG)
    dmatches = zeros(BLOCK_C, BLOCK_C)
    for start in tl.range(0, OUTPUTS, BLOCK, num_stages=1):
        col = start + tl.arange(0, BLOCK)
        dz = load_rows(reads, token, col, OUTPUTS, CONFIG).to(DTYPE)
        p = load_rows(residuals, token, col, OUTPUTS, CONFIG)
        dmatches = product_onto(dmatches, dz, tl.trans(p), CONFIG)
    dgamma_at = dgamma_ptr + local * (C * C)
    dgamma = -matches * dmatches
    if not IS_LAST:
        dgamma += load_matrix(dgamma_at, token, token, C, C)
        tl.debug_barrier()
    store_matrix(dgamma_at, dgamma, token, token, C, C)
    matches = (-gamma * matches).to(DTYPE)
    dmatches = (-gamma * dmatches).to(DTYPE)

    dresiduals = slot_at(wide_ptr, DRESIDUALS, layer - 1, places, local, CONFIG)
    for start in tl.range(0, OUTPUTS, BLOCK, num_stages=1):
        col = start + tl.arange(0, BLOCK)
        dz = load_rows(reads, token, col, OUTPUTS, CONFIG).to(DTYPE)
        dp = product(tl.trans(dz), matches, CONFIG)
        store_columns(dresiduals, dp, token, col, OUTPUTS, CONFIG)
    keep_across = tl.trans(keep)
    carry_across = tl.trans(carry)
    dinputs = slot_at(wide_ptr, DINPUTS, layer - 1, places, local, CONFIG)
    for start in tl.range(0, INPUTS, BLOCK, num_stages=1):
        col = start + tl.arange(0, BLOCK)
        x_q = load_rows(queries, token, col, INPUTS, CONFIG)
        dx = product(tl.trans(x_q), dmatches, CONFIG)
        store_columns(dinputs, dx, token, col, INPUTS, CONFIG)
        x_wide = tl.trans(x_q).to(tl.float32)
        x = load_rows(keys, token, col, INPUTS, CONFIG)
        total = product(tl.trans(x), tl.trans(dmatches), CONFIG)
        dx = outputs_to_inputs(matrix, reads, token, col, INPUTS, OUTPUTS, DTYPE, CONFIG)
        total += keep_across * dx
        dkeep += tl.sum(x_wide * dx, 0)
        dx = outputs_to_inputs(matrix + SIZE, reads, token, col, INPUTS, OUTPUTS, DTYPE, CONFIG)
        total += carry_across * dx
        dcarry += tl.sum(x_wide * dx, 0)
        if rest_ptr is not None:
            rest_matrix = matrix_at(rest_ptr + at[1] * SIZE, layer, CONFIG)
            dx = outputs_to_inputs(rest_matrix, reads, token, col, INPUTS, OUTPUTS, DTYPE, CONFIG)
            total += (1.0 - keep_across) * dx
            dkeep -= tl.sum(x_wide * dx, 0)
        if IS_FIRST:
            if CONFIG.RESIDUAL_NORM:
                dy_at = dy_ptr, dy_batch_stride, dy_token_stride, dy_head_stride
                total += head_columns(dy_at, at, token, there, CONFIG).to(tl.float32)
            store_head_columns(dq_ptr, total, at, token, there, tokens, heads, CONFIG)
        else:
            before = slot_at(wide_ptr, READS, layer - 2, places, local, CONFIG)
            total *= load_columns(before, token, col, INPUTS, CONFIG)
            # All threads have loaded what this overwrites.
            tl.debug_barrier()
            store_columns(before, total, token, col, INPUTS, CONFIG)
            at_biases = memory, sums, at[1], layer - 1
            more = through_biases(total, at_biases, rest_ptr, col, INPUTS, keep, carry, CONFIG)
            dkeep += more[0]
            dcarry += more[1]
    dreach = dreach_ptr + local * (2 * C) + token
    if not IS_LAST:
        dkeep += tl.load(dreach, mask=token < C, other=0.0)
        dcarry += tl.load(dreach + C, mask=token < C, other=0.0)
    tl.debug_barrier()
    tl.store(dreach, dkeep, mask=token < C)
    tl.store(dreach + C, dcarry, mask=token < C)


@triton.jit
def outputs_to_inputs(
    matrix,
    dz_at,
    token,
    col,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """w_l^T dz^T of these inputs, [inputs, tokens]."""
    BLOCK: tl.constexpr = CONFIG.BLOCK_D
    total = zeros(BLOCK, CONFIG.BLOCK_C)
    for start in tl.range(0, OUTPUTS, BLOCK, num_stages=1):
        out = start + tl.arange(0, BLOCK)
        dz = load_rows(dz_at, token, out, OUTPUTS, CONFIG).to(DTYPE)
        if CONFIG.KIND == "first":
            w = load_tile(matrix, col, out, INPUTS, CONFIG).to(DTYPE)
        else:
            w = tl.trans(load_tile(matrix, out, col, OUTPUTS, CONFIG)).to(DTYPE)
        total = product_onto(total, w, tl.trans(dz), CONFIG)
    return total


@triton.jit
def through_biases(dz, at_biases, rest_ptr, unit, width, keep, carry, CONFIG: tl.constexpr):
    """What dz [units, tokens] of one layer adds, through its biases, to the gradients of keep and
    of carry; and stored, to those of the biases.
    """
    memory, sums, head, layer = at_biases
    BIASES: tl.constexpr = CONFIG.SIZE - CONFIG.MATRICES
    inside = unit < width
    keep = tl.trans(keep)
    at = biases_at(memory, layer, CONFIG) + unit
    b = tl.load(at, mask=inside, other=0.0)
    sb = tl.load(at + CONFIG.SIZE, mask=inside, other=0.0)
    to = sums + (layer - 1) * CONFIG.HIDDEN + unit
    tl.store(to, tl.sum(keep * dz, 1), mask=inside)
    tl.store(to + BIASES, tl.sum(tl.trans(carry) * dz, 1), mask=inside)
    if rest_ptr is not None:
        rest = biases_at(rest_ptr + head * CONFIG.SIZE, layer, CONFIG)
        b -= tl.load(rest + unit, mask=inside, other=0.0)
        tl.store(to + 2 * BIASES, tl.sum((1.0 - keep) * dz, 1), mask=inside)
    return tl.sum(dz * b[:, None], 0), tl.sum(dz * sb[:, None], 0)
