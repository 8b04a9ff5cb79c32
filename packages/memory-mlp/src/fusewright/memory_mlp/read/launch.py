"""Both passes of memory_read: their tables, plans and launches."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import Launch, Layout, Plan, allocator, cdiv, layouts
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

# hidden, activation, halves, precision.
Options = tuple[int, str, int, str]
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
    precision: str
    dtype: torch.dtype
    device: torch.device

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.halves, packed_size(self.hidden, self.width)

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
            self.state_shape[-1],
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


def read_forward(q: Tensor, state: Tensor, hidden: int, activation: str) -> Tensor:
    """y, for weights packed in fp32, ``state [B, heads, 1 or 2, SIZE]``."""
    options = hidden, activation, state.shape[2], product_precision(q.dtype)
    plan = forward_plan(q.shape, options, layouts(q, state), q.device)
    return plan.run((q, state))[0]


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, int, int, int],
    options: Options,
    operands: tuple[Layout, ...],
    device: torch.device,
) -> Plan:
    """The plan for a q and a state of these layouts."""
    *rows, state = operands
    ((dtype, _),) = rows
    problem = Problem(*shape, *options, dtype, device)
    copies, strides = head_strides(shape, rows, (problem.state_shape, state))
    y = allocator(shape, dtype, device)
    if not math.prod(shape):
        return Plan(None, (), (y,))
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
    return Plan(launch, copies, (y,))


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
    options = hidden, activation, state.shape[2], product_precision(q.dtype)
    operands = dy, q, state
    needed = with_q, with_weights
    plan, add = backward_plan(q.shape, options, layouts(*operands), q.device, *needed)
    dq, dstate = plan.run(operands)
    if add is not None:
        # These were partial sums.
        (dstate,) = add.run((dstate,))
    elif plan.launch is None and dstate is not None:
        dstate.zero_()
    return dq, dstate


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, int, int, int],
    options: Options,
    operands: tuple[Layout, ...],
    device: torch.device,
    with_q: bool,
    with_weights: bool,
) -> tuple[Plan, Plan | None]:
    """The plan for operands of these layouts: dy, q and the state; and where the tokens of a head
    are split among programs, the one that adds their partial sums.
    """
    *rows, state = operands
    dtype = rows[1][0]
    problem = Problem(*shape, *options, dtype, device)
    copies, strides = head_strides(shape, rows, (problem.state_shape, state))
    all_heads, size = problem.all_heads, problem.state_shape[-1]
    wide = functools.partial(allocator, dtype=torch.float32, device=device)
    dq = allocator(shape, dtype, device) if with_q else None
    dstate = wide(problem.state_shape) if with_weights else None
    if not math.prod(shape) or not (with_q or with_weights):
        return Plan(None, (), (dq, dstate)), None
    line = problem.line(BACKWARD)
    chunks = cdiv(problem.tokens, line.tokens)
    units = problem.most_units(line.units, SMALLEST_TILE)
    unit_blocks = cdiv(problem.hidden, units)
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
    if not split:
        return Plan(launch, copies, (dq, dstate)), None
    numbers = all_heads * size
    add = Launch(
        kernels.read_sum_kernel,
        (cdiv(numbers, SUM.block),),
        device,
        (numbers, splits),
        dict(num_warps=SUM.num_warps),
        CONFIG=SumConfig(problem.halves, size, SUM.block),
    )
    return Plan(launch, copies, (dq, wide((splits, numbers)))), Plan(add, (), (dstate,))


def split_tokens(
    problem: Problem, line: ReadBackwardTile, chunks: int, programs: int
) -> tuple[int, int]:
    """Among how many programs the chunks of a head are split, and how many each of them takes."""
    wanted = cdiv(line.fills * device_properties(problem.device).multiprocessors, programs)
    splits = min(wanted, cdiv(problem.tokens, line.split_tokens))
    split_chunks = cdiv(chunks, splits)
    return cdiv(chunks, split_chunks), split_chunks
