"""The launches of gated_delta_rule's backward pass: its configurations and its plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocate,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.registration import empty_grad
from .launch import (
    NO_TABLES,
    Problem,
    RuleConfig,
    SerialConfig,
    aligned,
    problem_of,
    read_strides,
    tables_of,
)
from .reference import CHUNK

if TYPE_CHECKING:
    from . import kernels_backward, kernels_backward_inputs
else:
    kernels_backward = lazy_module(__package__, "kernels_backward")
    kernels_backward_inputs = lazy_module(__package__, "kernels_backward_inputs")

Tensor = torch.Tensor

# Source of all lines: results/tuning-h200-torch2.11-triton3.6.csv; unmeasured on other GPUs.
LOCAL = RuleConfig(block_k=64, block_v=128, num_warps=4, num_stages=2)
INPUTS = RuleConfig(block_k=64, block_v=64, num_warps=4, num_stages=3, without_wgmma=32)
THROUGH = RuleConfig(block_k=64, block_v=64, num_warps=4, num_stages=2)
# Read as STATES of the forward pass.
STATE_GRADIENTS = (
    SerialConfig(block_v=64, num_warps=4, num_stages=3),
    SerialConfig(block_v=32, num_warps=4, num_stages=3),
    SerialConfig(block_v=16, num_warps=4, num_stages=3),
)


class BackwardPlan(NamedTuple):
    """One backward pass: which operands it copies first, its four launches, and the memory of what
    they write. ``w`` is W, then dW; ``state_products`` are sums of states times their gradients;
    ``partial_dk`` and ``partial_dgates`` are parts of dk and dg, ``scratch`` tiles [C, C].
    """

    copies: tuple[bool, ...]
    local_launch: Launch
    state_gradients_launch: Launch
    inputs_launch: Launch
    through_launch: Launch
    w: Allocator
    values: Allocator
    dstates: Allocator
    state_products: Allocator
    partial_dk: Allocator
    scratch: Allocator
    partial_dgates: Allocator
    dq: Allocator
    dk: Allocator
    dv: Allocator
    dgate: Allocator
    dstate: Allocator | None


def rule_backward(
    do: Tensor,
    dend: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    inverses: Tensor,
    states: Tensor,
    decays: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, dg, dbeta, dstate)``, the last empty where there is no state."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return rule_backward(
                do, dend, q, k, v, g, beta, state, cu_seqlens, inverses, states, decays, scale
            )
    if not v.numel():
        grads = (torch.zeros_like(x) for x in (q, k, v, g, beta))
        return *grads, empty_grad(g) if state is None else dend.clone()
    do, dend, q, k, v, g, beta, state = aligned(do, dend, q, k, v, g, beta, state)
    problem = problem_of(q, v, state, cu_seqlens)
    plan = backward_plan(problem, layouts(do, q, k, v))
    do, q, k, v = contiguous_where((do, q, k, v), plan.copies)
    tables = NO_TABLES if cu_seqlens is None else tables_of(problem, cu_seqlens)
    chunks, sequences = tables
    g, beta, dend = g.contiguous(), beta.contiguous(), dend.contiguous()
    state = None if state is None else state.contiguous()
    w, values, dvalues, dstates = plan.w(), plan.values(), plan.values(), plan.dstates()
    dstate, dq, dk, dv = allocate(plan.dstate), plan.dq(), plan.dk(), plan.dv()
    dg, dbeta, partial_dgates = plan.dgate(), plan.dgate(), plan.partial_dgates()
    partial_dk, state_products, scratch = plan.partial_dk(), plan.state_products(), plan.scratch()
    inputs: tuple[Tensor | None, ...] = (do, q, k, v, beta, inverses, states, decays, chunks)
    plan.local_launch((*inputs, w, values, dvalues, scratch), (scale,))
    inputs = (do, dend, q, k, w, decays, sequences, states, state)
    plan.state_gradients_launch((*inputs, dvalues, dstates, state_products, dstate), (scale,))
    # dW is written over W.
    dw = w
    inputs = (do, q, k, values, dvalues, states, dstates, state_products, decays, chunks)
    plan.inputs_launch((*inputs, dq, partial_dk, dw, partial_dgates), (scale,))
    inputs = (k, v, g, beta, inverses, dvalues, dw, decays, partial_dgates, chunks, partial_dk)
    plan.through_launch((*inputs, scratch, dk, dv, dg, dbeta))
    if problem.group > 1:
        dq, dk = (sum_of_group(x, problem) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, empty_grad(g) if dstate is None else dstate


def sum_of_group(x: Tensor, problem: Problem) -> Tensor:
    """The sum of the gradients of the value heads that share a head."""
    return x.unflatten(2, (problem.heads, problem.group)).sum(3).to(problem.dtype)


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: Problem, operands: tuple[Layout, ...]) -> BackwardPlan:
    """The plan for operands of these layouts: do, q, k and v."""
    of_q, of_k, of_v = problem.operand_shapes()
    copies, (do, q, k, v) = read_strides(operands, (of_v, of_q, of_k, of_v))
    units, serial = problem.units, problem.serial(STATE_GRADIENTS, key_rows=3, value_rows=2)
    heads, value_tiles = problem.sequences * problem.value_heads, problem.tiles_v(serial)
    keys, width, key_tiles = problem.keys, problem.width, problem.tiles_k(INPUTS)
    # Gradients of a shared head are added up before they are rounded.
    partial = problem.dtype if problem.group == 1 else torch.float32
    return BackwardPlan(
        copies,
        local_launch=problem.launch(kernels_backward.local_kernel, units, (do, q, k, v), LOCAL),
        state_gradients_launch=problem.launch(
            kernels_backward.state_gradients_kernel, heads * value_tiles, (do, q, k), serial
        ),
        inputs_launch=problem.launch(
            kernels_backward_inputs.inputs_kernel,
            units * key_tiles,
            (do, q, k),
            INPUTS,
            VALUE_TILES=value_tiles,
        ),
        through_launch=problem.launch(
            kernels_backward_inputs.through_kernel, units, (k, v), THROUGH, KEY_TILES=key_tiles
        ),
        w=problem.of_units(CHUNK, keys),
        values=problem.of_units(CHUNK, width),
        dstates=problem.of_units(keys, width),
        state_products=problem.of_units(value_tiles, keys, dtype=torch.float32),
        partial_dk=problem.of_units(CHUNK, keys, dtype=torch.float32),
        scratch=problem.of_units(CHUNK, CHUNK),
        partial_dgates=problem.of_units(key_tiles, CHUNK, dtype=torch.float32),
        dq=problem.of_tokens(keys, dtype=partial),
        dk=problem.of_tokens(keys, dtype=partial),
        dv=problem.of_tokens(width, dtype=problem.dtype),
        dgate=problem.of_tokens(dtype=torch.float32),
        dstate=problem.of_states() if problem.has_state else None,
    )
