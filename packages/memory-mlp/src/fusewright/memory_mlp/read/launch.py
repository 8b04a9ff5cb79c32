"""Both passes of memory_read: their tables, plans and launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocate,
    allocator,
    cdiv,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.operands import FEWEST_ROWS, SMALLEST_TILE, head_strides, product_precision
from ..common.weights import packed_size

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class ReadTile(NamedTuple):
    """For products in a ``precision``: a program takes ``tokens`` tokens and all hidden units,
    ``block_h`` after ``block_h``. A ``hopper`` line is for compute capability 9.0 alone.
    """

    precision: str
    tokens: int
    block_h: int
    num_warps: int
    hopper: bool = False


class ReadBackwardTile(NamedTuple):
    """A program that computes the queries' gradient takes the tiles of the forward pass; one that
    computes the weights' takes ``units`` hidden units and all tokens, ``tokens`` after ``tokens``,
    ``num_stages`` loads of them in flight.

    Where that is fewer than ``fills`` programs for each multiprocessor, the tokens of a head are
    split among several, at least ``split_tokens`` for each, and a second launch adds their partial
    sums.
    """

    precision: str
    tokens: int
    block_h: int
    units: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    split_tokens: int = 512
    fills: int = 2


class ReadConfig(NamedTuple):
    """The constants of a kernel, of tokens by hidden units."""

    D: int
    HIDDEN: int
    SIZE: int
    BLOCK_C: int
    BLOCK_D: int
    BLOCK_H: int
    BLOCKS: int
    HALVES: int
    ACTIVATION: str
    UPCAST: bool
    PRECISION: str
    SPLIT: bool = False
    NUM_STAGES: int = 1


class SumConfig(NamedTuple):
    """The constants of the kernel that adds partial sums."""

    HALVES: int
    SIZE: int
    BLOCK: int


class SumTile(NamedTuple):
    """A program adds the partial sums of ``block`` numbers."""

    block: int
    num_warps: int


# Each table is read from the top: the first line for the precision and the GPU serves. Source:
# results/tuning-read-h200-torch2.11-triton3.6.csv for the forward line of 16-bit numbers; the
# others are unmeasured.
#
# Where an fp32 product is three of TF32 parts, the parts of both operands would fill the registers
# of larger tiles; on Hopper, fewer than four warps may take tiles of fewer than 64 rows.
FORWARD = (
    ReadTile("narrow", tokens=64, block_h=128, num_warps=4),
    ReadTile("tf32", tokens=64, block_h=64, num_warps=8),
    ReadTile("tf32x3", tokens=16, block_h=32, num_warps=2),
)
# Hopper's products take operands from shared memory, and leave registers for more tokens.
BACKWARD = (
    ReadBackwardTile("narrow", 64, 64, units=16, num_warps=4, num_stages=2, hopper=True),
    ReadBackwardTile("narrow", 32, 64, units=16, num_warps=4, num_stages=2),
    ReadBackwardTile("tf32", tokens=16, block_h=32, units=16, num_warps=2, num_stages=1),
    ReadBackwardTile("tf32x3", 16, 32, units=16, num_warps=2, num_stages=1, hopper=True),
    ReadBackwardTile("tf32x3", 16, 32, units=16, num_warps=4, num_stages=1),
)
SUM = SumTile(block=512, num_warps=4)

Line = TypeVar("Line", ReadTile, ReadBackwardTile)


class Problem(NamedTuple):
    """A call as its kernels see it; ``halves`` is 2 where the state has a momentum too."""

    batch: int
    tokens: int
    heads: int
    width: int
    hidden: int
    activation: str
    halves: int
    dtype: torch.dtype
    precision: str
    device: torch.device

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads

    def line(self, table: tuple[Line, ...]) -> Line:
        """The first line of the table for this precision and GPU."""
        precision = self.precision if self.dtype == torch.float32 else "narrow"
        hopper = device_properties(self.device).capability == 90
        fitting = (line for line in table if hopper or not line.hopper)
        return next(line for line in fitting if line.precision == precision)

    def most_units(self, units: int, fewest: int) -> int:
        """Hidden units at a time: ``units``, or fewer where the memory has fewer."""
        return min(units, max(fewest, power_of_2(self.hidden)))

    def config(self, tokens: int, block_h: int, **others: Any) -> ReadConfig:
        """The constants of programs that take so many tokens and hidden units at a time."""
        return ReadConfig(
            self.width,
            self.hidden,
            packed_size(self.hidden, self.width),
            tokens,
            max(FEWEST_ROWS, power_of_2(self.width)),
            block_h,
            cdiv(self.hidden, block_h),
            self.halves,
            self.activation,
            interpreted(),
            self.precision,
            **others,
        )

    def reading(self, line: ReadTile | ReadBackwardTile) -> ReadConfig:
        """Those of a program that takes all hidden units of some tokens."""
        return self.config(line.tokens, self.most_units(line.block_h, FEWEST_ROWS))


class ForwardPlan(NamedTuple):
    """One forward pass."""

    copies: tuple[bool, ...]
    launch: Launch
    y: Allocator


class BackwardPlan(NamedTuple):
    """One backward pass; ``add`` and ``parts`` where the tokens of a head are split among programs,
    and allocators of the gradients that are needed.
    """

    copies: tuple[bool, ...]
    launch: Launch
    add: Launch | None
    dq: Allocator | None
    dstate: Allocator | None
    parts: Allocator | None


def read_forward(q: Tensor, state: Tensor, hidden: int, activation: str) -> Tensor:
    """y, for weights packed in fp32, ``state [B, heads, 1 or 2, SIZE]``."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return read_forward(q, state, hidden, activation)
    if not q.numel():
        return q.new_empty(q.shape)
    options = hidden, activation, state.shape[2], product_precision(q.dtype)
    plan = forward_plan(q.shape, *options, layouts(q), q.device)
    if plan.copies:
        q = q.contiguous()
    y = plan.y()
    plan.launch((q, state.contiguous(), y))
    return y


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    hidden: int,
    activation: str,
    halves: int,
    precision: str,
    operands: tuple[Layout, ...],
    device: torch.device,
) -> ForwardPlan:
    """The plan for a q of this layout."""
    ((dtype, _),) = operands
    batch, tokens, heads, width = shape
    sizes = batch, tokens, heads, width, hidden
    problem = Problem(*sizes, activation, halves, dtype, precision, device)
    copies, strides = head_strides(shape, operands)
    line = problem.line(FORWARD)
    chunks = cdiv(problem.tokens, line.tokens)
    launch = Launch(
        kernels.read_kernel,
        (problem.all_heads * chunks,),
        device,
        (problem.tokens, problem.heads, chunks, *strides[0]),
        dict(num_warps=line.num_warps),
        CONFIG=problem.reading(line),
    )
    return ForwardPlan(copies, launch, allocator(shape, dtype, device))


def read_backward(
    dy: Tensor,
    q: Tensor,
    state: Tensor,
    hidden: int,
    activation: str,
    with_q: bool,
    with_weights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of (q, state), None where they are not needed."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return read_backward(dy, q, state, hidden, activation, with_q, with_weights)
    if not q.numel() or not (with_q or with_weights):
        return (
            q.new_empty(q.shape) if with_q else None,
            state.new_zeros(state.shape) if with_weights else None,
        )
    options = hidden, activation, state.shape[2], product_precision(q.dtype)
    plan = backward_plan(q.shape, *options, layouts(dy, q), q.device, with_q, with_weights)
    if plan.copies:
        dy, q = contiguous_where((dy, q), plan.copies)
    dq, dstate, parts = allocate(plan.dq), allocate(plan.dstate), allocate(plan.parts)
    plan.launch((dy, q, state.contiguous(), dq, dstate if parts is None else parts))
    if plan.add is not None:
        plan.add((parts, dstate))
    return dq, dstate


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    hidden: int,
    activation: str,
    halves: int,
    precision: str,
    operands: tuple[Layout, ...],
    device: torch.device,
    with_q: bool,
    with_weights: bool,
) -> BackwardPlan:
    """The plan for operands of these layouts: dy and q."""
    _, (dtype, _) = operands
    batch, tokens, heads, width = shape
    sizes = batch, tokens, heads, width, hidden
    problem = Problem(*sizes, activation, halves, dtype, precision, device)
    copies, strides = head_strides(shape, operands)
    line = problem.line(BACKWARD)
    all_heads, size = problem.all_heads, packed_size(hidden, problem.width)
    chunks = cdiv(problem.tokens, line.tokens)
    units = problem.most_units(line.units, SMALLEST_TILE)
    unit_blocks = cdiv(hidden, units)
    splits, split_chunks = split_tokens(problem, line, chunks, all_heads * unit_blocks)
    split = with_weights and splits > 1
    weight_programs = splits * all_heads * unit_blocks if with_weights else 0
    query_programs = all_heads * chunks if with_q else 0
    launch = Launch(
        kernels.read_backward_kernel,
        (weight_programs + query_programs,),
        device,
        (
            *(problem.tokens, problem.heads, chunks, weight_programs, all_heads, split_chunks),
            *(stride for operand in strides for stride in operand),
        ),
        dict(num_warps=line.num_warps),
        QUERIES=problem.reading(line),
        WEIGHTS=problem.config(line.tokens, units, SPLIT=split, NUM_STAGES=line.num_stages),
    )
    numbers = all_heads * size
    add = Launch(
        kernels.read_sum_kernel,
        (cdiv(numbers, SUM.block),),
        device,
        (numbers, splits),
        dict(num_warps=SUM.num_warps),
        CONFIG=SumConfig(halves, size, SUM.block),
    )
    wide = functools.partial(allocator, dtype=torch.float32, device=device)
    return BackwardPlan(
        copies,
        launch,
        add if split else None,
        dq=allocator(shape, dtype, device) if with_q else None,
        dstate=wide((problem.batch, problem.heads, halves, size)) if with_weights else None,
        parts=wide((splits, numbers)) if split else None,
    )


def split_tokens(
    problem: Problem, line: ReadBackwardTile, chunks: int, programs: int
) -> tuple[int, int]:
    """Among how many programs the chunks of a head are split, and how many each of them takes."""
    wanted = cdiv(line.fills * device_properties(problem.device).multiprocessors, programs)
    splits = min(wanted, cdiv(problem.tokens, line.split_tokens))
    split_chunks = cdiv(chunks, splits)
    return cdiv(chunks, split_chunks), split_chunks
