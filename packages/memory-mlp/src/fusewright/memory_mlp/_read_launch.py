"""memory_read, forward and backward: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from ._backends import card_of
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, made, memory
from ._read_configs import BACKWARD, FORWARD, SUM, ReadBackwardTile, ReadTile
from ._read_kernels import _read_backward_kernel, _read_kernel, _read_sum_kernel
from ._scan_problem import FEWEST_ROWS, SMALLEST_TILE, Problem, problem_of, rows_shape, walks
from .packing import packed_size

Tensor = torch.Tensor
Line = TypeVar("Line", ReadTile, ReadBackwardTile)


class Plan(NamedTuple):
    """One forward pass."""

    copies: tuple[bool, ...]
    launch: Launch
    y: Allocate


class BackwardPlan(NamedTuple):
    """One backward pass; ``add`` and ``parts`` where several programs share the tokens of a head,
    gradients where they are wanted.
    """

    copies: tuple[bool, ...]
    launch: Launch
    add: Launch | None
    dq: Allocate | None
    dstate: Allocate | None
    parts: Allocate | None


def launch_read(q: Tensor, state: Tensor, hidden: int, activation: str) -> Tensor:
    """y, for weights packed in fp32, ``state [B, heads, 1 or 2, SIZE]``."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_read(q, state, hidden, activation)
    if not q.numel():
        return q.new_empty(q.shape)
    plan = forward_plan(problem_of_read(q, hidden, activation), kinds(q), state.shape[2])
    (q,) = copied((q,), plan.copies)
    y = plan.y()
    plan.launch((q, state.contiguous(), y))
    return y


def launch_read_backward(
    dy: Tensor,
    q: Tensor,
    state: Tensor,
    hidden: int,
    activation: str,
    with_q: bool,
    with_weights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of (q, state), None where they are not wanted."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_read_backward(dy, q, state, hidden, activation, with_q, with_weights)
    if not q.numel() or not (with_q or with_weights):
        return (
            q.new_empty(q.shape) if with_q else None,
            state.new_zeros(state.shape) if with_weights else None,
        )
    problem = problem_of_read(q, hidden, activation)
    plan = backward_plan(problem, kinds(dy, q), state.shape[2], with_q, with_weights)
    dy, q = copied((dy, q), plan.copies)
    dq, dstate, parts = made(plan.dq), made(plan.dstate), made(plan.parts)
    plan.launch((dy, q, state.contiguous(), dq, dstate if parts is None else parts))
    if plan.add is not None:
        plan.add((parts, dstate))
    return dq, dstate


def problem_of_read(q: Tensor, hidden: int, activation: str) -> Problem:
    """A read is a scan's in which nothing is written."""
    return problem_of(q, hidden, 1, activation, "after", False)


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: Problem, operands: tuple[Kind, ...], halves: int) -> Plan:
    """The plan for a q of this kind."""
    copies, strides = walks(problem, operands)
    line = line_of(FORWARD, problem)
    chunks = triton.cdiv(problem.tokens, line.tokens)
    launch = Launch(
        _read_kernel,
        (problem.all_heads * chunks,),
        problem.device,
        (problem.tokens, problem.heads, chunks, *strides[0]),
        dict(num_warps=line.num_warps),
        **constants_of(problem, halves),
        **sizes_of(problem, line),
    )
    return Plan(copies, launch, memory(rows_shape(problem), problem.dtype, problem.device))


@functools.lru_cache(maxsize=4096)
def backward_plan(
    problem: Problem,
    operands: tuple[Kind, ...],
    halves: int,
    with_q: bool,
    with_weights: bool,
) -> BackwardPlan:
    """The plan for operands of these kinds: dy and q."""
    copies, strides = walks(problem, operands)
    line = line_of(BACKWARD, problem)
    device, all_heads = problem.device, problem.all_heads
    chunks = triton.cdiv(problem.tokens, line.tokens)
    units = most_units(problem, line.units, SMALLEST_TILE)
    unit_blocks = triton.cdiv(problem.hidden, units)
    splits, share = split_chunks(problem, line, chunks, all_heads * unit_blocks)
    split = with_weights and splits > 1
    weight_programs = splits * all_heads * unit_blocks if with_weights else 0
    query_programs = all_heads * chunks if with_q else 0
    launch = Launch(
        _read_backward_kernel,
        (weight_programs + query_programs,),
        device,
        (
            *(problem.tokens, problem.heads, chunks, weight_programs, all_heads, share),
            *(stride for operand in strides for stride in operand),
        ),
        dict(num_warps=line.num_warps),
        **constants_of(problem, halves),
        SPLIT=split,
        **sizes_of(problem, line),
        UNITS=units,
        UNIT_BLOCKS=unit_blocks,
        NUM_STAGES=line.num_stages,
    )
    wide = functools.partial(memory, dtype=torch.float32, device=device)
    size = packed_size(problem.hidden, problem.width)
    numbers = all_heads * size
    add = Launch(
        _read_sum_kernel,
        (triton.cdiv(numbers, SUM.block),),
        device,
        (numbers, splits),
        dict(num_warps=SUM.num_warps),
        HALVES=halves,
        SIZE=size,
        BLOCK=SUM.block,
    )
    return BackwardPlan(
        copies,
        launch,
        add if split else None,
        memory(rows_shape(problem), problem.dtype, device) if with_q else None,
        wide((problem.batch, problem.heads, halves, size)) if with_weights else None,
        wide((splits, numbers)) if split else None,
    )


def line_of(table: tuple[Line, ...], problem: Problem) -> Line:
    precision = problem.precision if problem.dtype == torch.float32 else "narrow"
    hopper = card_of(problem.device).capability == 90
    fitting = (line for line in table if hopper or not line.hopper)
    return next(line for line in fitting if line.precision == precision)


def constants_of(problem: Problem, halves: int) -> dict[str, Any]:
    return dict(**problem.arithmetic, ACTIVATION=problem.activation, HALVES=halves)


def sizes_of(problem: Problem, line: ReadTile | ReadBackwardTile) -> dict[str, Any]:
    """What a program that takes all hidden units of some tokens is told of them."""
    block_h = most_units(problem, line.block_h, FEWEST_ROWS)
    return dict(
        C=line.tokens,
        D=problem.width,
        HIDDEN=problem.hidden,
        BLOCK_D=problem.block_d,
        BLOCK_H=block_h,
        BLOCKS=triton.cdiv(problem.hidden, block_h),
    )


def most_units(problem: Problem, units: int, fewest: int) -> int:
    """So many hidden units at a time, or fewer where there are no more."""
    return min(units, max(fewest, triton.next_power_of_2(problem.hidden)))


def split_chunks(
    problem: Problem, line: ReadBackwardTile, chunks: int, programs: int
) -> tuple[int, int]:
    """Among how many programs the chunks of a head are divided, and the share of each."""
    wanted = triton.cdiv(line.fills * card_of(problem.device).multiprocessors, programs)
    splits = min(wanted, triton.cdiv(problem.tokens, line.split_tokens))
    share = triton.cdiv(chunks, splits)
    return triton.cdiv(chunks, share), share
