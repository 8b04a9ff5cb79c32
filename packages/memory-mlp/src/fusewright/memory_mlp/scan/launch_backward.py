"""The backward pass of memory_scan: its tables, its plan, its launches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import (
    Allocator,
    Launch,
    LaunchCall,
    Layout,
    cdiv,
    contiguous_where,
    launch,
    launch_in_order,
    layouts,
    prepare,
)
from .._core.lazy import lazy_module
from ..common.operands import head_strides, product_precision
from .launch import (
    PROGRAMS_AT_ONCE,
    Options,
    Problem,
    ScanConfig,
    decays_launch,
    intermediate_tensors,
    problem_of,
    read_launch,
)

if TYPE_CHECKING:
    from . import kernels, kernels_backward, kernels_ends_backward, kernels_read_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")
    kernels_ends_backward = lazy_module(__package__, "kernels_ends_backward")
    kernels_read_backward = lazy_module(__package__, "kernels_read_backward")

Tensor = torch.Tensor

# Source: docs/decisions/0005-memory-scan-h200.csv. From the line of the most programs to that of
# the fewest.
STATES_BACKWARD = (
    ScanConfig(block_h=16, num_warps=4, splits_heads=True),
    ScanConfig(block_h=32, num_warps=4, splits_heads=True),
)
READ_BACKWARD = ScanConfig(block_h=64, num_warps=4)
KEYS_BACKWARD = ScanConfig(block_h=64, num_warps=4)
# Memory for the chunks of a part, beyond inputs and results, and of how many parts at once.
PART_BYTES = 128 << 20
PLACES = 2
# What the kernel of the states takes for a clip where there is none, but for the limit, and for a
# norm.
NO_CLIP = (None,) * 5
NO_NORM = (None,) * 3
# y and the loss, which the recomputation does not write.
NO_READ = (None,) * 2


class Part(NamedTuple):
    """The launches of a few chunks of all heads, in their order."""

    find_decays: Launch
    recompute: Launch
    read: Launch
    write: Launch
    keys: Launch
    gates: Launch
    rest: Launch


class PartCalls(NamedTuple):
    """What a part launches before it goes from chunk to chunk, for that, and afterwards."""

    before: tuple[LaunchCall, ...]
    write: LaunchCall
    after: tuple[LaunchCall, ...]


class Place(NamedTuple):
    """The intermediate results of a part, as in ``BackwardPlan``."""

    intermediate: tuple[Tensor | None, ...]
    nus: Tensor
    kept: tuple[Tensor, ...]
    from_reads: tuple[Tensor, ...]
    from_ends: tuple[Tensor, ...]
    clip: tuple[Tensor, ...]
    norm: tuple[Tensor, ...]
    drests: Tensor | None


class BackwardPlan(NamedTuple):
    """One backward pass: which operands it copies first, its parts, from the last chunks to the
    first, for how many of them at once there is place, and the allocators of its tensors.
    """

    copies: tuple[bool, ...]
    parts: tuple[Part, ...]
    places: int
    intermediate: tuple[Allocator | None, ...]
    nus: Allocator
    # Gradients of q, k, v, alpha, eta and theta.
    results: tuple[Allocator, ...]
    # The forward kernel's results for a part's chunks; gradients through their reads of k, e,
    # gamma, the reach and the states; gradients through their ends of the last rows.
    kept: tuple[Allocator, ...]
    from_reads: tuple[Allocator, ...]
    from_ends: tuple[Allocator, ...]
    dbegin: Allocator
    # With a clip: its pull at e, and tau.
    clip: tuple[Allocator, ...]
    # With a norm: what the layers make of keys and of queries, and the gradient of k through it.
    norm: tuple[Allocator, ...]
    # With a rest: its gradient through the reads of a part, and through all.
    rest: tuple[Allocator, ...]


def scan_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of (q, k, v, state, alpha, eta, theta, rest), the last without a number where there
    is no rest.

    Args:
        arguments: the gradients of y and of the last state, q, k, v, the packed state before the
            first token, the states with which the chunks began; then as for ``scan_forward``.
    """
    dy, dend, q, k, v, _, states, alpha, eta, theta, written, rest, resets, *options = arguments
    if not q.numel():
        return without_tokens(dend, rest, q, k, v, alpha, eta, theta)
    operands = dy, q, k, v, dend, states, alpha, eta, theta, written, rest, resets
    return launched_backward(operands, options, None, ())


def clipped_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The same with a clip.

    Args:
        arguments: as for ``scan_backward``, the factors and which chunks were taken behind the
            states; then the largest norm.
    """
    dy, dend, q, k, v, _, states, factors, taken, *gates, written, rest, resets = arguments[:15]
    *options, limit = arguments[15:]
    if not q.numel():
        return without_tokens(dend, rest, q, k, v, *gates)
    # A chunk that was not taken has written nothing, and nothing passes through its reads.
    chunk = min(options[1], q.shape[1])
    seen = taken.unsqueeze(2).expand(-1, -1, chunk, -1).flatten(1, 2)[:, : q.shape[1]]
    dy = torch.where(seen.unsqueeze(-1), dy, 0.0)
    written = seen.contiguous() if written is None else written & seen
    operands = dy, q, k, v, dend, states, *gates, written, rest, resets
    return launched_backward(operands, options, factors, (limit,))


def without_tokens(dend: Tensor, rest: Tensor | None, *like: Tensor) -> tuple[Tensor, ...]:
    zeros = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in like]
    drest = dend.new_zeros(0 if rest is None else rest.shape)
    return *zeros[:3], dend.clone(), *zeros[3:], drest


def launched_backward(
    operands: tuple, options: Sequence[Any], factors: Tensor | None, limit: tuple[float, ...]
) -> tuple[Tensor, ...]:
    q = operands[1]
    precise = *options, product_precision(q.dtype)
    plan = backward_plan(q.shape, precise, layouts(*operands), q.device, bool(limit))
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    dy, q, k, v, dstate, states, alpha, eta, theta, written, rest, resets = operands
    dq, dk, dv, *dgates = [allocate() for allocate in plan.results]
    # With a clip the gates of a token count whose gradient has no norm, and nothing else of it.
    rows_written = written
    if factors is not None:
        rows_written = written & (factors != 0.0)
    drest = dstate.new_zeros(0) if rest is None else plan.rest[1]().zero_()
    dfirst = None if resets is None else plan.dbegin().zero_()
    no_limit = () if limit else (None,)
    places = [place_of(plan) for _ in range(plan.places)]
    calls = []
    for part, place in zip(plan.parts, itertools.cycle(places)):
        gamma, nu, reach, tiles, arrived = place.intermediate
        e, e_wide, h, slope, curve, p, read_h, read_slope, matches = place.kept
        dk_read, de, dgamma, dreach, dstates = place.from_reads
        # The reads' own results are not needed once their gradients exist: these overwrite them.
        dh, dp = read_h, read_slope
        pull, tau = None, None
        clip: tuple[Tensor | None, ...] = NO_CLIP
        if factors is not None:
            pull, tau = place.clip
            clip = factors, e_wide, p, pull, tau
        output, read_output, dk_norm = place.norm or NO_NORM
        norm = NO_NORM if output is None else (v, output, dk_norm)
        decays = alpha, eta, theta, written, gamma, nu, reach, place.nus, arrived
        remade = *place.kept, output, read_output
        again = q, k, v, rows_written, gamma, reach, states, rest, *NO_READ, *remade, pull, factors
        reads = (e, h, p, read_h, read_slope, matches, read_output)
        dreads = (dq, dk_read, de, dh, dp, dgamma, dreach, dstates, place.drests)
        ends = (gamma, nu, reach, states)
        rows = (h, slope, curve, e, de, dh, dp, dstates, dstate)
        dbegin = plan.dbegin()
        begins = dbegin, resets, dfirst
        writes = k, *ends, *rows, *begins, dv, rows_written, tiles, arrived, *clip, *norm, *no_limit
        from_ends = place.from_ends
        drows = dk_read, dh, dstates, dstate, rows_written, dk, *from_ends
        gates = alpha, eta, written, gamma, place.nus, reach, dgamma, dreach, *from_ends, *dgates
        read = dy, q, k, rows_written, gamma, reach, states, rest, *reads, *dreads
        after = [
            LaunchCall(part.keys, (k, *ends, e_wide, h, p, *drows, tau, rest, dk_norm)),
            LaunchCall(part.gates, gates),
        ]
        if rest is not None:
            sums = reach, dstates, dstate, place.drests, drest
            after.append(LaunchCall(part.rest, sums))
        calls.append(
            PartCalls(
                (
                    LaunchCall(part.find_decays, decays),
                    LaunchCall(part.recompute, again),
                    LaunchCall(part.read, read),
                ),
                LaunchCall(part.write, writes, limit),
                tuple(after),
            )
        )
        # The chunks before these end with the state with which these began.
        dstate = dbegin
    if len(places) == 1:
        for part_calls in calls:
            launch_in_order(*part_calls.before, part_calls.write, *part_calls.after)
    else:
        launch_beside(calls, q.device)
    if dfirst is not None:
        dstate = dstate + dfirst
    # One rest serves all rows.
    return dq, dk, dv, dstate, *dgates, drest if rest is None else drest.sum(0)


def place_of(plan: BackwardPlan) -> Place:
    # No call of ``allocate`` for each of them.
    return Place(
        tuple([None if x is None else x() for x in plan.intermediate]),
        plan.nus(),
        tuple([allocate() for allocate in plan.kept]),
        tuple([allocate() for allocate in plan.from_reads]),
        tuple([allocate() for allocate in plan.from_ends]),
        tuple([allocate() for allocate in plan.clip]),
        tuple([allocate() for allocate in plan.norm]),
        plan.rest[0]() if plan.rest else None,
    )


def launch_beside(parts: list[PartCalls], device: torch.device) -> None:
    """The parts one after the other, with two places by turns: while a part goes from chunk to
    chunk, which leaves most of a GPU idle, the part before it is finished and the one behind it
    begun.

    ``parts`` holds all tensors until both streams have met.
    """
    main = torch.cuda.current_stream(device)
    side = stream_beside(device, main.cuda_stream)
    events: list[torch.Event] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if not events:
            prepare(*part.before, part.write, *part.after)
            launch(part.before)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            launch([part.write])
            events.append(side.record_event())
        # The place of the part behind is free once the one before is finished.
        if len(events) > 1:
            main.wait_event(events[-2])
            launch(parts[len(events) - 2].after)
        if following is not None:
            prepare(*following.before, following.write, *following.after)
            launch(following.before)
    main.wait_event(events[-1])
    launch(parts[-1].after)


@functools.lru_cache(maxsize=64)
def stream_beside(device: torch.device, stream: int) -> torch.cuda.Stream:
    """A second stream for what runs beside this one, whose programs are placed first: those of one
    head wait for one another.
    """
    return torch.cuda.Stream(device, priority=-1)


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, int, int, int],
    options: Options,
    operands: tuple[Layout, ...],
    device: torch.device,
    clips: bool = False,
) -> BackwardPlan:
    """The plan for operands of these layouts: dy, q, k, v, dend, the states, alpha, eta, theta,
    which tokens are written, rest and which chunks are reset, None where there is none.
    """
    rows, (dend, states, *gates, rest, resets) = operands[:4], operands[4:]
    problem = problem_of(shape, options, rows[0], device)
    all_heads, state = problem.all_heads, problem.state_shape
    chunk, hidden = problem.chunk, problem.hidden
    ends = (state, dend), ((problem.chunks, *state), states)
    optional = (problem.rest_shape, rest), (problem.resets_shape, resets)
    others = *ends, *((shape[:3], gate) for gate in gates), *optional
    copies, strides = head_strides(shape, rows, *others)
    # As many chunks at once as fill the GPU, within the memory that their intermediate results may
    # take.
    chunk_bytes = all_heads * (8 * state[-1] + 6 * chunk * hidden * problem.dtype.itemsize)
    part_chunks = PROGRAMS_AT_ONCE * device_properties(device).multiprocessors // all_heads
    part_chunks = max(1, min(problem.chunks, part_chunks, PART_BYTES // chunk_bytes))
    starts = range(0, problem.chunks, part_chunks)
    wide, narrow = problem.wide, problem.narrow
    lead = all_heads, part_chunks
    return BackwardPlan(
        copies,
        tuple(
            backward_part(problem, strides, first, min(part_chunks, problem.chunks - first))
            for first in reversed(starts)
        ),
        PLACES if len(starts) > 1 and device.type == "cuda" else 1,
        intermediate_tensors(problem, problem.sharing(STATES_BACKWARD), part_chunks),
        nus=wide(*lead, chunk, chunk),
        results=(*[narrow(*shape)] * 3, *[wide(*shape[:3])] * 3),
        kept=(
            narrow(*lead, chunk, problem.width),
            wide(*lead, chunk, problem.width),
            *[narrow(*lead, chunk, hidden)] * 6,
            wide(*lead, chunk, chunk),
        ),
        from_reads=(
            wide(*lead, chunk, problem.width),
            wide(*lead, chunk, problem.width),
            wide(*lead, chunk, chunk),
            wide(*lead, 2, chunk),
            wide(*lead, *state[2:]),
        ),
        from_ends=(wide(*lead, 2, chunk), wide(*lead, 3)),
        dbegin=wide(*state),
        clip=(wide(*lead, chunk, problem.width), wide(*lead, chunk)) if clips else (),
        norm=(wide(*lead, chunk, problem.width),) * 3 if problem.residual_norm else (),
        rest=()
        if rest is None
        else (
            wide(*lead, state[-1]),
            wide(problem.batch, *problem.rest_shape),
        ),
    )


def backward_part(
    problem: Problem, strides: Sequence[tuple[int, ...]], first: int, chunks: int
) -> Part:
    """The launches for ``chunks`` chunks from ``first`` on."""
    heads = problem.all_heads
    sizes = problem.tokens, problem.heads, heads, first, chunks
    dy, q, k, v = strides
    config = problem.sharing(STATES_BACKWARD)
    of_reads = kernels_read_backward.scan_read_backward_kernel
    of_states = kernels_backward.scan_states_backward_kernel
    of_keys = kernels_ends_backward.scan_keys_backward_kernel
    return Part(
        decays_launch(kernels.decays_kernel, problem, first, chunks),
        read_launch(problem, strides[1:], first, chunks, keep=True),
        problem.launch(of_reads, READ_BACKWARD, heads * chunks, (*sizes, *dy, *q, *k)),
        problem.launch(of_states, config, heads * problem.blocks(config), (*sizes, *k, *v)),
        problem.launch(of_keys, KEYS_BACKWARD, heads * chunks, (*sizes, *k)),
        decays_launch(kernels_ends_backward.decays_backward_kernel, problem, first, chunks),
        Launch(
            kernels_ends_backward.rest_backward_kernel,
            (heads * cdiv(problem.rest_shape[-1], kernels_ends_backward.REST_NUMBERS.value),),
            problem.device,
            (chunks,),
            dict(num_warps=4),
            CONFIG=problem.constants(KEYS_BACKWARD),
        ),
    )
