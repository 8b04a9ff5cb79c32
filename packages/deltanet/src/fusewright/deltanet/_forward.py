"""The forward pass of gated_delta_rule: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ._configs import OUTPUTS, PREPARE, STATES
from ._forward_kernels import _outputs_kernel, _prepare_kernel, _states_kernel
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._problem import Problem, aligned, problem_of, tables_of, walks
from .reference import CHUNK

Tensor = torch.Tensor


class Plan(NamedTuple):
    """One forward pass."""

    copies: tuple[bool, ...]
    prepare: Launch
    walk: Launch
    read: Launch
    keys: Allocate
    values: Allocate
    inverses: Allocate
    states: Allocate
    decays: Allocate
    end: Allocate
    o: Allocate


def launch_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(o, end, inverses, states, decays)``."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_rule(q, k, v, g, beta, state, cu_seqlens, scale)
    q, k, v, g, beta, state = aligned(q, k, v, g, beta, state)
    problem = problem_of(q, v, state, cu_seqlens)
    plan = forward_plan(problem, kinds(q, k, v))
    o, end, inverses = plan.o(), plan.end(), plan.inverses()
    states, decays = plan.states(), plan.decays()
    if not v.numel():
        return o, copy_of_start(end, state), inverses, states, decays
    q, k, v = copied((q, k, v), plan.copies)
    state = None if state is None else state.contiguous()
    tables = tables_of(problem, cu_seqlens)
    keys, values = plan.keys(), plan.values()
    gates = g.contiguous(), beta.contiguous()
    plan.prepare((k, v, *gates, tables.chunks, keys, values, inverses, decays))
    plan.walk((k, keys, values, decays, state, tables.sequences, states, end))
    plan.read((q, k, values, states, decays, tables.chunks, o), (scale,))
    return o, end, inverses, states, decays


def copy_of_start(end: Tensor, state: Tensor | None) -> Tensor:
    """The state after no token."""
    return end.zero_() if state is None else end.copy_(state)


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: Problem, operands: tuple[Kind, ...]) -> Plan:
    """The plan for operands of these kinds: q, k and v."""
    copies, (q, k, v) = walks(operands, shapes_of(problem))
    units, serial = problem.units, problem.serial(STATES, key_rows=2, value_rows=1)
    heads = problem.sequences * problem.value_heads
    state = (problem.keys, problem.width)
    return Plan(
        copies,
        problem.launch(_prepare_kernel, units, (k, v), PREPARE, INVERSE=problem.inverse_precision),
        problem.launch(_states_kernel, heads * problem.tiles_v(serial), (k,), serial),
        problem.launch(_outputs_kernel, units * problem.tiles_v(OUTPUTS), (q, k), OUTPUTS),
        problem.of_units(CHUNK, problem.keys),
        problem.of_units(CHUNK, problem.width),
        problem.of_units(CHUNK, CHUNK),
        problem.of_units(*state),
        problem.of_units(CHUNK, dtype=torch.float32),
        memory((problem.sequences, problem.value_heads, *state), torch.float32, problem.device),
        problem.of_tokens(problem.width, dtype=problem.dtype),
    )


def shapes_of(problem: Problem) -> list[tuple[int, ...]]:
    """Of q, k and v."""
    lead = problem.batch, problem.tokens
    key = (*lead, problem.heads, problem.keys)
    return [key, key, (*lead, problem.value_heads, problem.width)]
