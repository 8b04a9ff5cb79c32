"""The forward pass of memory_scan: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._scan_configs import STATES
from ._scan_forward_kernels import _scan_states_kernel
from ._scan_problem import (
    Decays,
    Meeting,
    Problem,
    decays_launch,
    decays_memory,
    meeting_of,
    problem_of,
    read_launch,
    rows_shape,
    walks,
)
from .packing import packed_size

Tensor = torch.Tensor

# What the kernel of the reads writes for the backward pass alone.
NOT_KEPT = (None,) * 9


class Plan(NamedTuple):
    """One forward pass."""

    copies: tuple[bool, ...]
    decays: Decays
    find_decays: Launch
    write: Launch
    read: Launch
    y: Allocate
    states: Allocate
    end: Allocate
    meeting: Meeting


def launch_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, state after the last token, states with which the chunks began)``."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_scan(
                q, k, v, state, alpha, eta, theta, written, hidden, chunk, activation, read
            )
    problem = problem_of(q, hidden, chunk, activation, read, written is not None)
    if not q.numel():
        return q.new_empty(q.shape), state.clone(), state.new_empty(problem.chunks, *state.shape)
    plan = forward_plan(problem, kinds(q, k, v))
    q, k, v = copied((q, k, v), plan.copies)
    alpha, eta, theta = (gate.contiguous() for gate in (alpha, eta, theta))
    written = None if written is None else written.contiguous()
    gamma, nu, reach = plan.decays.made()
    tiles, arrived = plan.meeting.made()
    y, states, end = plan.y(), plan.states(), plan.end()
    plan.find_decays((alpha, eta, theta, written, gamma, nu, reach, None, arrived))
    ends = (gamma, nu, reach, state.contiguous(), states, end)
    plan.write((k, v, written, *ends, tiles, arrived))
    plan.read((q, k, v, written, gamma, reach, states, y, *NOT_KEPT))
    return y, end, states


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: Problem, operands: tuple[Kind, ...]) -> Plan:
    """The plan for operands of these kinds: q, k and v."""
    copies, strides = walks(problem, operands)
    chunks, device = problem.chunks, problem.device
    sizes = (problem.tokens, problem.heads, problem.all_heads)
    mask = dict(HAS_MASK=problem.has_mask)
    wide = functools.partial(memory, dtype=torch.float32, device=device)
    size = packed_size(problem.hidden, problem.width)
    serial = problem.sharing(STATES)
    return Plan(
        copies,
        decays_memory(problem, chunks),
        decays_launch(problem, 0, chunks, keep=False),
        Launch(
            _scan_states_kernel,
            (problem.all_heads * problem.blocks(serial),),
            device,
            (*sizes, *strides[1], *strides[2]),
            dict(num_warps=serial.num_warps),
            **mask,
            **problem.arithmetic,
            ACTIVATION=problem.activation,
            **problem.sizes(serial),
        ),
        read_launch(problem, strides, 0, chunks, keep=False),
        memory(rows_shape(problem), problem.dtype, device),
        wide((chunks, problem.batch, problem.heads, 2, size)),
        wide((problem.batch, problem.heads, 2, size)),
        meeting_of(problem, serial),
    )
