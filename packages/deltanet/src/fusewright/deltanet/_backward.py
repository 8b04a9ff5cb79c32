"""The backward pass of gated_delta_rule: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ._backward_kernels import _local_kernel, _state_gradients_kernel
from ._configs import INPUTS, LOCAL, STATE_GRADIENTS, THROUGH
from ._forward import shapes_of
from ._input_gradients_kernels import _inputs_kernel, _through_kernel
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, made, memory
from ._problem import Problem, aligned, problem_of, tables_of, walks
from ._registration import empty_grad
from .reference import CHUNK

Tensor = torch.Tensor


class Plan(NamedTuple):
    """One backward pass."""

    copies: tuple[bool, ...]
    again: Launch
    walk: Launch
    inputs: Launch
    through: Launch
    keys: Allocate
    values: Allocate
    dstates: Allocate
    kept: Allocate
    other_dk: Allocate
    squares: Allocate
    dgates: Allocate
    dq: Allocate
    dk: Allocate
    dv: Allocate
    dgate: Allocate
    dstate: Allocate | None


def launch_rule_backward(
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
            return launch_rule_backward(
                *(do, dend, q, k, v, g, beta, state, cu_seqlens),
                *(inverses, states, decays, scale),
            )
    if not v.numel():
        grads = (torch.zeros_like(x) for x in (q, k, v, g, beta))
        return *grads, empty_grad(g) if state is None else dend.clone()
    do, dend, q, k, v, g, beta, state = aligned(do, dend, q, k, v, g, beta, state)
    problem = problem_of(q, v, state, cu_seqlens)
    plan = backward_plan(problem, kinds(do, q, k, v))
    do, q, k, v = copied((do, q, k, v), plan.copies)
    tables = tables_of(problem, cu_seqlens)
    g, beta, dend = g.contiguous(), beta.contiguous(), dend.contiguous()
    keys, values, dvalues, dstates = plan.keys(), plan.values(), plan.values(), plan.dstates()
    dstate, dq, dk, dv = made(plan.dstate), plan.dq(), plan.dk(), plan.dv()
    other_dk, dgates, dg, dbeta = plan.other_dk(), plan.dgates(), plan.dgate(), plan.dgate()
    squares, kept = plan.squares(), plan.kept()
    state = None if state is None else state.contiguous()
    chunks = (decays, tables.chunks)
    found = (keys, values, dvalues, squares)
    plan.again((do, q, k, v, beta, inverses, states, *chunks, *found), (scale,))
    began = (decays, tables.sequences, states, state)
    plan.walk((do, dend, q, k, keys, *began, dvalues, dstates, kept, dstate), (scale,))
    # dW takes the place of W.
    taken = (values, dvalues, states, dstates, kept, *chunks)
    plan.inputs((do, q, k, *taken, dq, other_dk, keys, dgates), (scale,))
    known = (dvalues, keys, decays, dgates, tables.chunks, other_dk, squares)
    plan.through((k, v, g, beta, inverses, *known, dk, dv, dg, dbeta))
    if problem.group > 1:
        dq, dk = (of_shared_heads(x, problem) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, empty_grad(g) if dstate is None else dstate


def of_shared_heads(x: Tensor, problem: Problem) -> Tensor:
    """The sum of what the value heads that share a head say of it."""
    return x.unflatten(2, (problem.heads, problem.group)).sum(3).to(problem.dtype)


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: Problem, operands: tuple[Kind, ...]) -> Plan:
    """The plan for operands of these kinds: do, q, k and v."""
    of_q, of_k, of_v = shapes_of(problem)
    copies, (do, q, k, v) = walks(operands, (of_v, of_q, of_k, of_v))
    units, serial = problem.units, problem.serial(STATE_GRADIENTS, key_rows=3, value_rows=2)
    heads, tiles = problem.sequences * problem.value_heads, problem.tiles_v(serial)
    keys, width, shares = problem.keys, problem.width, problem.tiles_k(INPUTS)
    # What value heads share is added up before it is rounded.
    partial = problem.dtype if problem.group == 1 else torch.float32
    dstate = (problem.sequences, problem.value_heads, keys, width)
    return Plan(
        copies,
        problem.launch(_local_kernel, units, (do, q, k, v), LOCAL),
        problem.launch(_state_gradients_kernel, heads * tiles, (do, q, k), serial),
        problem.launch(_inputs_kernel, units * shares, (do, q, k), INPUTS, SERIAL=tiles),
        problem.launch(_through_kernel, units, (k, v), THROUGH, SHARES=shares),
        problem.of_units(CHUNK, keys),
        problem.of_units(CHUNK, width),
        problem.of_units(keys, width),
        problem.of_units(tiles, keys, dtype=torch.float32),
        problem.of_units(CHUNK, keys, dtype=torch.float32),
        problem.of_units(CHUNK, CHUNK),
        problem.of_units(shares, CHUNK, dtype=torch.float32),
        problem.of_tokens(keys, dtype=partial),
        problem.of_tokens(keys, dtype=partial),
        problem.of_tokens(width, dtype=problem.dtype),
        problem.of_tokens(dtype=torch.float32),
        memory(dstate, torch.float32, problem.device) if problem.has_state else None,
    )
