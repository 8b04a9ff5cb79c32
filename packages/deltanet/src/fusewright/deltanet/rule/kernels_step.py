"""Triton kernel of gated_delta_rule_step:

S' = exp(g) S,  u = beta (v - S'^T k),  S <- S' + k u^T,  o = scale S^T q
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand


@triton.jit(do_not_specialize=("heads",))
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    o_ptr,
    end_ptr,
    scale,
    heads,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program updates BLOCK_V columns of one head's state by one token and reads them."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    state_index = (tl.program_id(0) // TILES).to(tl.int64)
    key_head = state_index // heads * (heads // GROUP) + state_index % heads // GROUP
    key = tl.arange(0, BLOCK_K)
    col = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < K)[:, None] & (col < V)[None, :]
    at = state_index * (K * V) + key[:, None] * V + col[None, :]
    q = tl.load(q_ptr + key_head * K + key, mask=key < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + key_head * K + key, mask=key < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + state_index * V + col, mask=col < V, other=0.0).to(tl.float32)
    state = tl.load(state_ptr + at, mask=inside, other=0.0)
    state *= tl.exp(tl.load(g_ptr + state_index))
    u = tl.load(beta_ptr + state_index) * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * u[None, :]
    o = as_operand(scale * tl.sum(state * q[:, None], 0), o_ptr.dtype.element_ty, UPCAST)
    tl.store(o_ptr + state_index * V + col, o, mask=col < V)
    tl.store(end_ptr + at, state, mask=inside)
