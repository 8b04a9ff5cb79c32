"""The backward pass of memory_scan: plans, allocates and launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from ._backends import card_of
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._scan_backward_kernels import _scan_keys_backward_kernel, _scan_states_backward_kernel
from ._scan_configs import KEYS_BACKWARD, READ_BACKWARD, STATES_BACKWARD
from ._scan_decays_kernels import _decays_backward_kernel
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
from ._scan_read_backward_kernels import _scan_read_backward_kernel
from .packing import packed_size

Tensor = torch.Tensor

# What the chunks that are computed together may take, beyond inputs and results.
TOGETHER_BYTES = 64 << 20


class Part(NamedTuple):
    """The backward pass of a few chunks of every head."""

    find_decays: Launch
    compute: Launch
    read: Launch
    write: Launch
    keys: Launch
    gates: Launch


class BackwardPlan(NamedTuple):
    """One backward pass: its parts, from the last chunks to the first."""

    copies: tuple[bool, ...]
    decays: Decays
    nus: Allocate
    parts: tuple[Part, ...]
    rows: Allocate
    gates: Allocate
    # What the forward's kernel keeps of a part's chunks; what their reads give to k, e,
    # gamma, the reach and the states; what their ends give to the last rows.
    kept: tuple[Allocate, ...]
    from_reads: tuple[Allocate, ...]
    from_ends: tuple[Allocate, ...]
    dbegin: Allocate
    meeting: Meeting


def launch_scan_backward(
    dy: Tensor,
    dend: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
) -> tuple[Tensor, ...]:
    """Gradients of (q, k, v, state, alpha, eta, theta)."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_scan_backward(
                *(dy, dend, q, k, v, states, alpha, eta, theta, written),
                *(hidden, chunk, activation, read),
            )
    problem = problem_of(q, hidden, chunk, activation, read, written is not None)
    if not q.numel():
        like = (q, k, v, alpha, eta, theta)
        zeros = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in like]
        return *zeros[:3], dend.clone(), *zeros[3:]
    plan = backward_plan(problem, kinds(dy, q, k, v))
    dy, q, k, v = copied((dy, q, k, v), plan.copies)
    alpha, eta, theta = (gate.contiguous() for gate in (alpha, eta, theta))
    written = None if written is None else written.contiguous()
    dq, dk, dv = (plan.rows() for _ in range(3))
    dgates = tuple(plan.gates() for _ in range(3))
    (gamma, nu, reach), nus = plan.decays.made(), plan.nus()
    tiles, arrived = plan.meeting.made()
    dstate, states = dend.contiguous(), states.contiguous()
    from_reads = tuple(allocate() for allocate in plan.from_reads)
    from_ends = tuple(allocate() for allocate in plan.from_ends)
    e, e_wide, h, slope, curve, p, read_h, read_slope, matches = kept = tuple(
        allocate() for allocate in plan.kept
    )
    dk_read, de, dgamma, dreach, dstates = from_reads
    # Of the reads nothing is known any more once their gradients are: these take its place.
    dh, dp = read_h, read_slope
    for part in plan.parts:
        part.find_decays((alpha, eta, theta, written, gamma, nu, reach, nus, arrived))
        part.compute((q, k, v, written, gamma, reach, states, None, *kept))
        reads = (e, h, p, read_h, read_slope, matches)
        found = (dq, dk_read, de, dh, dp, dgamma, dreach, dstates)
        part.read((dy, q, k, written, gamma, reach, states, *reads, *found))
        ends = (gamma, nu, reach, states)
        given = (h, slope, curve, e, de, dh, dp, dstates, dstate)
        dbegin = plan.dbegin()
        part.write((k, *ends, *given, dbegin, dv, written, tiles, arrived))
        part.keys((k, *ends, e_wide, h, p, dk_read, dh, dstates, dstate, written, dk, *from_ends))
        part.gates((alpha, eta, written, gamma, nus, reach, dgamma, dreach, *from_ends, *dgates))
        # The chunks before these end with what these began with.
        dstate = dbegin
    return dq, dk, dv, dstate, *dgates


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: Problem, operands: tuple[Kind, ...]) -> BackwardPlan:
    """The plan for operands of these kinds: dy, q, k and v."""
    copies, strides = walks(problem, operands)
    device, heads, chunk = problem.device, problem.all_heads, problem.chunk
    # As many chunks at once as fill the card twice, but for no more memory than that: what they
    # hand over is the pass's own.
    size = packed_size(problem.hidden, problem.width)
    chunk_bytes = heads * (8 * size + 6 * chunk * problem.hidden * problem.dtype.itemsize)
    together = triton.cdiv(2 * card_of(device).multiprocessors, heads)
    together = max(1, min(problem.chunks, together, TOGETHER_BYTES // chunk_bytes))
    starts = range(0, problem.chunks, together)
    wide = functools.partial(memory, dtype=torch.float32, device=device)
    own = functools.partial(memory, dtype=problem.dtype, device=device)
    layer = (heads, together, chunk, problem.width)
    hidden_layer = (heads, together, chunk, problem.hidden)
    square = (heads, together, chunk, chunk)
    return BackwardPlan(
        copies,
        decays_memory(problem, together),
        wide(square),
        tuple(
            backward_part(problem, strides, first, min(together, problem.chunks - first))
            for first in reversed(starts)
        ),
        memory(rows_shape(problem), problem.dtype, device),
        wide(rows_shape(problem)[:-1]),
        (own(layer), wide(layer), *[own(hidden_layer)] * 6, wide(square)),
        (
            *(wide(layer), wide(layer), wide(square)),
            *(wide((heads, together, 2, chunk)), wide((heads, together, 2, size))),
        ),
        (wide((heads, together, 2, chunk)), wide((heads, together, 3))),
        wide((problem.batch, problem.heads, 2, size)),
        meeting_of(problem, problem.sharing(STATES_BACKWARD)),
    )


def backward_part(
    problem: Problem, strides: Sequence[tuple[int, ...]], first: int, chunks: int
) -> Part:
    """The launches for ``chunks`` chunks from ``first`` on."""
    heads, device = problem.all_heads, problem.device
    sizes = (problem.tokens, problem.heads, heads, first, chunks)
    mask, shift = dict(HAS_MASK=problem.has_mask), dict(SHIFT=problem.shift)
    serial = problem.sharing(STATES_BACKWARD)
    return Part(
        decays_launch(problem, first, chunks, keep=True),
        read_launch(problem, strides[1:], first, chunks, keep=True),
        Launch(
            _scan_read_backward_kernel,
            (heads * chunks,),
            device,
            (*sizes, *strides[0], *strides[1], *strides[2]),
            dict(num_warps=READ_BACKWARD.num_warps),
            **mask,
            **shift,
            **problem.arithmetic,
            **problem.sizes(READ_BACKWARD),
        ),
        Launch(
            _scan_states_backward_kernel,
            (heads * problem.blocks(serial),),
            device,
            (*sizes, *strides[2]),
            dict(num_warps=serial.num_warps),
            **mask,
            **problem.arithmetic,
            **problem.sizes(serial),
        ),
        Launch(
            _scan_keys_backward_kernel,
            (heads * chunks,),
            device,
            (*sizes, *strides[2]),
            dict(num_warps=KEYS_BACKWARD.num_warps),
            **mask,
            **problem.arithmetic,
            **problem.sizes(KEYS_BACKWARD),
        ),
        Launch(
            _decays_backward_kernel,
            (heads * chunks,),
            device,
            (problem.tokens, problem.heads, first, chunks),
            dict(num_warps=1),
            **mask,
            **shift,
            C=problem.chunk,
            BLOCK_C=problem.block_c,
        ),
    )
