"""The launches of gated_delta_rule's backward pass: its configurations and its plan."""

from __future__ import annotations

import functools
from operator import call
from typing import TYPE_CHECKING

import torch

from .._core.launches import LaunchCall, Layout, contiguous_where, launch_in_order, layouts
from .._core.lazy import lazy_module
from .._core.registration import empty_grad
from .launch import (
    NO_TABLES,
    Problem,
    RuleConfig,
    RulePlan,
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
F32 = torch.float32

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
    if not v.numel():
        grads = (torch.zeros_like(x) for x in (q, k, v, g, beta))
        return *grads, empty_grad(g) if state is None else dend.clone()
    do, dend, q, k, v, g, beta, state = aligned(do, dend, q, k, v, g, beta, state)
    problem = problem_of(q, v, state, cu_seqlens)
    plan = backward_plan(problem, layouts(do, q, k, v))
    do, q, k, v = contiguous_where((do, q, k, v), plan.copies)
    chunks, sequences = NO_TABLES if cu_seqlens is None else tables_of(problem, cu_seqlens)
    g, beta, dend = g.contiguous(), beta.contiguous(), dend.contiguous()
    state = None if state is None else state.contiguous()
    dstate = None if state is None else torch.empty_like(state)
    w, values, dvalues, dstates, *others = map(call, plan.memory)
    state_products, partial_dk, partial_dgates, scratch, dq, dk, dv, dg, dbeta = others
    recompute, carry_gradients, to_inputs, through_inverse = plan.launches
    local = (do, q, k, v, beta, inverses, states, decays, chunks)
    carried = (do, dend, q, k, w, decays, sequences, states, state)
    saved = (do, q, k, values, dvalues, states, dstates, state_products, decays, chunks)
    inverted = (k, v, g, beta, inverses, dvalues, w, decays, partial_dgates, chunks, partial_dk)
    launch_in_order(
        LaunchCall(recompute, (*local, w, values, dvalues, scratch), (scale,)),
        LaunchCall(carry_gradients, (*carried, dvalues, dstates, state_products, dstate), (scale,)),
        # dW is written over W.
        LaunchCall(to_inputs, (*saved, dq, partial_dk, w, partial_dgates), (scale,)),
        LaunchCall(through_inverse, (*inverted, scratch, dk, dv, dg, dbeta)),
    )
    if problem.group > 1:
        dq, dk = (sum_of_group(x, problem) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, empty_grad(g) if dstate is None else dstate


def sum_of_group(x: Tensor, problem: Problem) -> Tensor:
    """The sum of the gradients of the value heads that share a head."""
    return x.unflatten(2, (problem.heads, problem.group)).sum(3).to(problem.dtype)


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: Problem, operands: tuple[Layout, ...]) -> RulePlan:
    """The plan for operands of these layouts: do, q, k and v."""
    of_q, of_k, of_v = problem.operand_shapes()
    copies, (do, q, k, v) = read_strides(operands, (of_v, of_q, of_k, of_v))
    units, serial = problem.units, problem.serial(STATE_GRADIENTS, key_rows=3, value_rows=2)
    heads, value_tiles = problem.sequences * problem.value_heads, problem.tiles_v(serial)
    keys, width, key_tiles = problem.keys, problem.width, problem.tiles_k(INPUTS)
    first, second, launch = kernels_backward, kernels_backward_inputs, problem.launch
    launches = (
        launch(first.local_kernel, units, (do, q, k, v), LOCAL),
        launch(first.state_gradients_kernel, heads * value_tiles, (do, q, k), serial),
        launch(second.inputs_kernel, units * key_tiles, (do, q, k), INPUTS, parts=value_tiles),
        launch(second.through_kernel, units, (k, v), THROUGH, parts=key_tiles),
    )
    # Gradients of a shared head are added up before they are rounded.
    of_keys = problem.of_tokens(keys, dtype=problem.dtype if problem.group == 1 else F32)
    of_gates = problem.of_tokens(dtype=F32)
    memory = (
        problem.of_units(CHUNK, keys),
        *(problem.of_units(CHUNK, width),) * 2,
        problem.of_units(keys, width),
        # Sums of states times their gradients; parts of dk and of dg; tiles [C, C].
        problem.of_units(value_tiles, keys, dtype=F32),
        problem.of_units(CHUNK, keys, dtype=F32),
        problem.of_units(key_tiles, CHUNK, dtype=F32),
        problem.of_units(CHUNK, CHUNK),
        *(of_keys, of_keys, problem.of_tokens(width, dtype=problem.dtype), of_gates, of_gates),
    )
    return RulePlan(copies, launches, memory)
