"""The backward pass of memory_scan: its tables, its plan, its launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocate,
    cdiv,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from ..common.operands import head_strides, product_precision
from .launch import (
    DecayAllocators,
    PartialSums,
    Problem,
    ScanConfig,
    decay_allocators,
    decays_launch,
    partial_sums,
    read_launch,
)

if TYPE_CHECKING:
    from . import kernels_backward, kernels_read_backward
else:
    kernels_backward = lazy_module(__package__, "kernels_backward")
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
# Memory for the chunks of a part, beyond inputs and results.
PART_BYTES = 64 << 20


class Part(NamedTuple):
    """The launches of a few chunks of all heads, in their order."""

    find_decays: Launch
    recompute: Launch
    read: Launch
    write: Launch
    keys: Launch
    gates: Launch


class BackwardPlan(NamedTuple):
    """One backward pass: which of dy, q, k and v it copies first, its parts, from the last chunks
    to the first, and the allocators of its tensors.
    """

    copies: tuple[bool, ...]
    parts: tuple[Part, ...]
    decays: DecayAllocators
    nus: Allocator
    sums: PartialSums
    rows: Allocator
    gates: Allocator
    # The forward kernel's results for a part's chunks; gradients through their reads of k, e,
    # gamma, the reach and the states; gradients through their ends of the last rows.
    kept: tuple[Allocator, ...]
    from_reads: tuple[Allocator, ...]
    from_ends: tuple[Allocator, ...]
    dbegin: Allocator


def scan_backward(
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
            return scan_backward(
                dy, dend, q, k, v, states, alpha, eta, theta, written, hidden, chunk, activation,
                read,
            )  # fmt: skip
    if not q.numel():
        like = (q, k, v, alpha, eta, theta)
        zeros = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in like]
        return *zeros[:3], dend.clone(), *zeros[3:]
    options = hidden, chunk, activation, read, written is not None, product_precision(q.dtype)
    plan = backward_plan(q.shape, *options, layouts(dy, q, k, v), q.device)
    if plan.copies:
        dy, q, k, v = contiguous_where((dy, q, k, v), plan.copies)
    alpha, eta, theta = alpha.contiguous(), eta.contiguous(), theta.contiguous()
    written = None if written is None else written.contiguous()
    dq, dk, dv = plan.rows(), plan.rows(), plan.rows()
    dgates = plan.gates(), plan.gates(), plan.gates()
    gamma, nu, reach = plan.decays.gamma(), plan.decays.nu(), plan.decays.reach()
    nus, tiles, arrived = plan.nus(), allocate(plan.sums.tiles), allocate(plan.sums.arrived)
    dstate, states = dend.contiguous(), states.contiguous()
    from_reads = tuple([allocator() for allocator in plan.from_reads])
    from_ends = tuple([allocator() for allocator in plan.from_ends])
    kept = tuple([allocator() for allocator in plan.kept])
    e, e_wide, h, slope, curve, p, read_h, read_slope, matches = kept
    dk_read, de, dgamma, dreach, dstates = from_reads
    # The reads' own results are not needed once their gradients exist: these overwrite them.
    dh, dp = read_h, read_slope
    for part in plan.parts:
        part.find_decays((alpha, eta, theta, written, gamma, nu, reach, nus, arrived))
        part.recompute((q, k, v, written, gamma, reach, states, None, *kept))
        reads = (e, h, p, read_h, read_slope, matches)
        dreads = (dq, dk_read, de, dh, dp, dgamma, dreach, dstates)
        part.read((dy, q, k, written, gamma, reach, states, *reads, *dreads))
        ends = (gamma, nu, reach, states)
        rows = (h, slope, curve, e, de, dh, dp, dstates, dstate)
        dbegin = plan.dbegin()
        part.write((k, *ends, *rows, dbegin, dv, written, tiles, arrived))
        part.keys((k, *ends, e_wide, h, p, dk_read, dh, dstates, dstate, written, dk, *from_ends))
        part.gates((alpha, eta, written, gamma, nus, reach, dgamma, dreach, *from_ends, *dgates))
        # The chunks before these end with the state with which these began.
        dstate = dbegin
    return dq, dk, dv, dstate, *dgates


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    has_mask: bool,
    precision: str,
    operands: tuple[Layout, ...],
    device: torch.device,
) -> BackwardPlan:
    """The plan for operands of these layouts: dy, q, k and v."""
    (dtype, _), *_ = operands
    batch, tokens, heads, width = shape
    sizes = batch, tokens, heads, width, hidden, min(chunk, tokens)
    problem = Problem(*sizes, activation, read, has_mask, dtype, precision, device)
    copies, strides = head_strides(shape, operands)
    all_heads, chunk, size = problem.all_heads, problem.chunk, problem.packed_size
    # As many chunks at once as fill the GPU twice, within the memory that their intermediate
    # results may take.
    chunk_bytes = all_heads * (8 * size + 6 * chunk * hidden * problem.dtype.itemsize)
    part_chunks = cdiv(2 * device_properties(device).multiprocessors, all_heads)
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
        decay_allocators(problem, part_chunks),
        nus=wide(*lead, chunk, chunk),
        sums=partial_sums(problem, problem.sharing(STATES_BACKWARD)),
        rows=narrow(*shape),
        gates=wide(batch, tokens, heads),
        kept=(
            narrow(*lead, chunk, width),
            wide(*lead, chunk, width),
            *[narrow(*lead, chunk, hidden)] * 6,
            wide(*lead, chunk, chunk),
        ),
        from_reads=(
            wide(*lead, chunk, width),
            wide(*lead, chunk, width),
            wide(*lead, chunk, chunk),
            wide(*lead, 2, chunk),
            wide(*lead, 2, size),
        ),
        from_ends=(wide(*lead, 2, chunk), wide(*lead, 3)),
        dbegin=wide(batch, heads, 2, size),
    )


def backward_part(
    problem: Problem, strides: Sequence[tuple[int, ...]], first: int, chunks: int
) -> Part:
    """The launches for ``chunks`` chunks from ``first`` on."""
    heads, device = problem.all_heads, problem.device
    sizes = (problem.tokens, problem.heads, heads, first, chunks)
    config = problem.sharing(STATES_BACKWARD)
    return Part(
        decays_launch(problem, first, chunks),
        read_launch(problem, strides[1:], first, chunks, keep=True),
        Launch(
            kernels_read_backward.scan_read_backward_kernel,
            (heads * chunks,),
            device,
            (*sizes, *strides[0], *strides[1], *strides[2]),
            dict(num_warps=READ_BACKWARD.num_warps),
            CONFIG=problem.constants(READ_BACKWARD),
        ),
        Launch(
            kernels_backward.scan_states_backward_kernel,
            (heads * problem.blocks(config),),
            device,
            (*sizes, *strides[2]),
            dict(num_warps=config.num_warps),
            CONFIG=problem.constants(config),
        ),
        Launch(
            kernels_backward.scan_keys_backward_kernel,
            (heads * chunks,),
            device,
            (*sizes, *strides[2]),
            dict(num_warps=KEYS_BACKWARD.num_warps),
            CONFIG=problem.constants(KEYS_BACKWARD),
        ),
        Launch(
            kernels_backward.decays_backward_kernel,
            (heads * chunks,),
            device,
            (problem.tokens, problem.heads, first, chunks),
            dict(num_warps=1),
            CONFIG=problem.gate_constants,
        ),
    )
