"""Triton kernel of the decode step, its plan and its launcher."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ._backends import interpreted
from ._configs import STEP_BLOCK_V
from ._launch import Launch, is_current
from ._tiles import as_operand

Tensor = torch.Tensor


@triton.jit(do_not_specialize=("heads",))
def _step_kernel(
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
    """One program takes one token into BLOCK_V columns of the state of one head."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    own = (tl.program_id(0) // TILES).to(tl.int64)
    shared = own // heads * (heads // GROUP) + own % heads // GROUP
    key = tl.arange(0, BLOCK_K)
    col = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < K)[:, None] & (col < V)[None, :]
    at = own * (K * V) + key[:, None] * V + col[None, :]
    q = tl.load(q_ptr + shared * K + key, mask=key < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + shared * K + key, mask=key < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + own * V + col, mask=col < V, other=0.0).to(tl.float32)
    state = tl.load(state_ptr + at, mask=inside, other=0.0)
    state *= tl.exp(tl.load(g_ptr + own))
    u = tl.load(beta_ptr + own) * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * u[None, :]
    o = as_operand(scale * tl.sum(state * q[:, None], 0), o_ptr.dtype.element_ty, UPCAST)
    tl.store(o_ptr + own * V + col, o, mask=col < V)
    tl.store(end_ptr + at, state, mask=inside)


def launch_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``(o, state after the token)``."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_step(q, k, v, g, beta, state, scale)
    operands = [x.contiguous() for x in (q, k, v, g, beta, state)]
    o, end = q.new_empty(v.shape), torch.empty_like(operands[-1])
    if end.numel():
        batch, heads, keys, width = state.shape
        plan = step_plan(batch, heads, heads // q.shape[1], keys, width, q.dtype, q.device)
        plan((*operands, o, end), (scale,))
    return o, end


@functools.lru_cache(maxsize=4096)
def step_plan(
    batch: int,
    heads: int,
    group: int,
    keys: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    """The launch for contiguous tensors of these sizes and this dtype."""
    return Launch(
        _step_kernel,
        (batch * heads * triton.cdiv(width, STEP_BLOCK_V),),
        device,
        (heads,),
        dict(num_warps=4),
        UPCAST=interpreted(),
        GROUP=group,
        K=keys,
        V=width,
        BLOCK_K=triton.next_power_of_2(keys),
        BLOCK_V=STEP_BLOCK_V,
    )
