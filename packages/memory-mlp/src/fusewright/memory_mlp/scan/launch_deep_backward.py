"""The backward pass of deep_scan: its plan, its launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import (
    Allocator,
    Launch,
    LaunchCall,
    Layout,
    allocator,
    contiguous_where,
    launch,
    layouts,
    prepare,
)
from .._core.lazy import lazy_module
from ..common.operands import head_strides, product_precision
from .launch import decays_launch
from .launch_backward import without_tokens
from .launch_deep import (
    ROWS,
    DeepProblem,
    Options,
    gate_tensors,
    kind_of,
    problem_of,
    read_launches,
    rows_launch,
)

if TYPE_CHECKING:
    from . import kernels, kernels_deep_backward, kernels_deep_read_backward, kernels_ends_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_ends_backward = lazy_module(__package__, "kernels_ends_backward")
    kernels_deep_backward = lazy_module(__package__, "kernels_deep_backward")
    kernels_deep_read_backward = lazy_module(__package__, "kernels_deep_read_backward")

Tensor = torch.Tensor

# Memory for the chunks of a part, beyond inputs and results.
PART_BYTES = 384 << 20
# Chunks of all heads for each multiprocessor, at most: more do not make the launches over them more
# even.
PLACES_OF_A_MULTIPROCESSOR = 4


class Part(NamedTuple):
    """The launches of a few chunks of all heads, in their order: over all chunks, for each of them,
    and over all again.
    """

    first: int
    chunks: int
    find_decays: Launch
    rows: Launch
    reads: tuple[Launch, ...]
    reads_backward: tuple[Launch, ...]
    ends: Launch
    rows_backward: Launch
    states_backward: Launch
    gates: Launch


class BackwardPlan(NamedTuple):
    """One backward pass: which operands it copies first, what comes before its parts, these from
    the last chunks to the first, and the allocators of its tensors.
    """

    copies: tuple[bool, ...]
    begin: Launch
    parts: tuple[Part, ...]
    rounded: Allocator
    dends: Allocator
    # Gradients of q, k, v, alpha, eta and theta.
    results: tuple[Allocator, ...]
    # Of the longest part: the gates' products, all rows of nu, the count of chunks; the matrices of
    # tokens; the gradients of gamma, of keep and carry, and the parts of those of the last rows.
    gates: tuple[Allocator, ...]
    tokens: tuple[Allocator, ...]
    gradients: tuple[Allocator, ...]
    # What is added to the gradients of biases: through the reads, and through the rows.
    sums: tuple[Allocator, ...]
    # Of the rest, of each row.
    drest: Allocator


def deep_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of (q, k, v, state, alpha, eta, theta, rest), the last one empty where there is no
    rest.

    Args:
        arguments: the gradients of y and of the last state, q, k, v, the packed state before the
            first token, the states with which the chunks began; then as for ``deep_forward``.
    """
    dy, dend, q, k, v, _, states, *gates, written, rest, resets = arguments[:13]
    options = arguments[13:]
    if not q.numel():
        return without_tokens(dend, rest, q, k, v, *gates)
    operands = dy, q, k, v, states, *gates, written, rest, resets
    precise = *options, product_precision(q.dtype)
    plan = backward_plan(q.shape, precise, layouts(*operands), q.device)
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    dy, q, k, v, states, alpha, eta, theta, written, rest, resets = operands
    dq, dk, dv, *dgates = [allocate() for allocate in plan.results]
    # The gradient of the memory that goes from chunk to chunk, and at last of the first one.
    dstate = dend.clone(memory_format=torch.contiguous_format)
    drest = None if rest is None else plan.drest().zero_()
    dfirst = None if resets is None else torch.zeros_like(dstate)
    rounded, dends = plan.rounded(), plan.dends()
    gamma, nu, reach, nus, step = [allocate() for allocate in plan.gates]
    rows, wide = [allocate() for allocate in plan.tokens]
    dgamma, dreach, dlast = [allocate() for allocate in plan.gradients]
    read_sums, row_sums = [allocate() for allocate in plan.sums]
    memory = dstate, drest, resets, dfirst, rounded, dends, read_sums, row_sums, step
    begin = LaunchCall(plan.begin, (gamma, reach, rest, states, None, None, *memory))
    for index, part in enumerate(plan.parts):
        decays = alpha, eta, theta, written, gamma, nu, reach, nus, step
        seen = gamma, reach, rest, states, rows, wide
        read = dy, *seen, dq, dgamma, dreach, read_sums
        again = k, v, written, None, None, None, states, rows, wide, None, None, None
        back = v, written, rounded, rows, wide, dk, dv, row_sums, step
        before = [
            LaunchCall(part.find_decays, decays),
            LaunchCall(part.rows, again),
            *(LaunchCall(x, (q, *seen, None)) for x in part.reads),
            *(LaunchCall(x, read) for x in part.reads_backward),
        ]
        ends = gamma, nu, reach, dstate, rows, wide, dlast, step
        chunk = [
            LaunchCall(part.ends, ends),
            LaunchCall(part.rows_backward, back),
            LaunchCall(part.states_backward, (*seen, *memory)),
        ]
        if not index:
            prepare(begin, *before, *chunk)
            launch([begin])
        launch(before)
        for _ in range(part.chunks):
            launch(chunk)
        places = dlast.shape[0] // plan.parts[0].chunks * part.chunks
        last = dlast[:places].sum(1)
        own = dends[part.first : part.first + part.chunks].sum(2).transpose(0, 1).contiguous()
        saved = alpha, eta, written, gamma, nus, reach, dgamma, dreach
        part.gates((*saved, last, own, *dgates))
    if dfirst is not None:
        dstate = dstate + dfirst
    # One rest serves all rows.
    return dq, dk, dv, dstate, *dgates, dstate.new_empty(0) if drest is None else drest.sum(0)


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, int, int, int],
    options: Options,
    operands: tuple[Layout, ...],
    device: torch.device,
) -> BackwardPlan:
    """The plan for operands of these layouts: dy, q, k, v, the states, alpha, eta, theta, which
    tokens are written, the rest and which chunks are reset.
    """
    rows, (states, *gates, rest, resets) = operands[:4], operands[4:]
    problem = problem_of(shape, options, rows[0], device)
    heads, chunk = problem.all_heads, problem.chunk
    state = problem.state_shape
    others = ((problem.chunks, *state), states), *((shape[:3], gate) for gate in gates)
    optional = (problem.rest_shape, rest), (problem.resets_shape, resets)
    copies, strides = head_strides(shape, rows, *others, *optional)
    place_bytes = problem.layers * chunk * problem.stride * 5 * (problem.dtype.itemsize + 4)
    most = PLACES_OF_A_MULTIPROCESSOR * device_properties(device).multiprocessors
    part_chunks = max(1, min(problem.chunks, min(most, PART_BYTES // place_bytes) // heads))
    starts = range(0, problem.chunks, part_chunks)
    constants = problem.constants
    places = heads * part_chunks
    wide, narrow = problem.wide, problem.narrow
    of_states = kernels_deep_backward.deep_states_backward_kernel
    sizes = problem.tokens, problem.heads, heads
    return BackwardPlan(
        copies,
        problem.launch(of_states, heads * constants.TILES, (*sizes, 0, problem.chunks)),
        tuple(
            backward_part(problem, strides, first, min(part_chunks, problem.chunks - first))
            for first in reversed(starts)
        ),
        rounded=narrow(heads, constants.MATRICES),
        dends=wide(problem.chunks, heads, constants.TILES, 3),
        results=(*[narrow(*shape)] * 3, *[wide(*shape[:3])] * 3),
        gates=(
            *gate_tensors(problem, part_chunks),
            wide(places, chunk, chunk),
            allocator((2, heads), torch.int32, device),
        ),
        tokens=(narrow(*problem.slots(5, places)), wide(*problem.slots(5, places))),
        gradients=(
            wide(places, chunk, chunk),
            wide(places, 2, chunk),
            wide(places, constants.SIDES, 2, chunk),
        ),
        sums=(
            wide(places, 3, problem.biases),
            wide(heads, constants.TOKEN_BLOCKS, problem.biases),
        ),
        drest=wide(problem.batch, *problem.rest_shape),
    )


def backward_part(
    problem: DeepProblem, strides: Sequence[tuple[int, ...]], first: int, chunks: int
) -> Part:
    """The launches for ``chunks`` chunks from ``first`` on."""
    heads, constants = problem.all_heads, problem.constants
    sizes = problem.tokens, problem.heads, heads, first, chunks
    dy, q, k, v = strides
    of_reads = kernels_deep_read_backward.deep_read_backward_kernel
    of_chunks = kernels_deep_backward
    reads = read_launches(problem, q, first, chunks, keep=True)
    return Part(
        first,
        chunks,
        decays_launch(kernels.decays_kernel, problem, first, chunks),
        rows_launch(problem, heads * chunks, (*sizes, *k, *v)),
        # Of the last layer the norm's backward needs the read.
        reads if problem.residual_norm else reads[:-1],
        tuple(
            problem.launch(
                of_reads,
                heads * chunks,
                (*sizes, layer, *dy),
                KIND=kind_of(layer, problem.layers),
            )
            for layer in range(problem.layers, 0, -1)
        ),
        problem.launch(of_chunks.deep_ends_kernel, heads * constants.SIDES, sizes),
        problem.launch(
            of_chunks.deep_rows_backward_kernel,
            heads * constants.TOKEN_BLOCKS,
            (*sizes, *v),
            ROWS.num_warps,
        ),
        problem.launch(of_chunks.deep_states_backward_kernel, heads * constants.TILES, sizes),
        decays_launch(kernels_ends_backward.decays_backward_kernel, problem, first, chunks),
    )
