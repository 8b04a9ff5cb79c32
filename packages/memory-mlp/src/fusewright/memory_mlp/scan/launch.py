"""The forward pass of memory_scan: its tables, its plan, its launches; and the launches that the
backward pass repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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


class ScanConfig(NamedTuple):
    """A program takes a chunk of tokens and ``block_h`` hidden units. With ``splits_heads`` a
    head's other units are with other programs; otherwise it takes them one block after the other.
    """

    block_h: int
    num_warps: int
    splits_heads: bool = False


# Source: docs/decisions/0005-memory-scan-h200.csv. From the line of the most programs to that of
# the fewest.
STATES = (ScanConfig(block_h=32, num_warps=4, splits_heads=True),)
READ = ScanConfig(block_h=64, num_warps=4)
RECOMPUTE = ScanConfig(block_h=64, num_warps=4)
# Programs of four warps on one multiprocessor.
PROGRAMS_AT_ONCE = 2
# Tensors of the read kernel that it writes for the backward pass alone.
NOT_KEPT = (None,) * 9


class KernelConfig(NamedTuple):
    """The constants of the kernels; those over gates take the first alone."""

    C: int
    BLOCK_C: int
    # How many tokens before its own a query reads.
    SHIFT: int
    D: int = 0
    HIDDEN: int = 0
    SIZE: int = 0
    BLOCK_D: int = 0
    BLOCK_H: int = 0
    BLOCKS: int = 0
    ACTIVATION: str = ""
    UPCAST: bool = False
    PRECISION: str = ""


class Problem(NamedTuple):
    """A call as its kernels see it."""

    batch: int
    tokens: int
    heads: int
    width: int
    hidden: int
    chunk: int
    activation: str
    read: str
    has_mask: bool
    dtype: torch.dtype
    precision: str
    device: torch.device

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return cdiv(self.tokens, self.chunk)

    @property
    def packed_size(self) -> int:
        """SIZE of a memory."""
        return packed_size(self.hidden, self.width)

    def sharing(self, configs: tuple[ScanConfig, ...]) -> ScanConfig:
        """The first of the lines all of whose programs run on the GPU at once."""
        room = PROGRAMS_AT_ONCE * device_properties(self.device).multiprocessors
        fitting = (each for each in configs if self.all_heads * self.blocks(each) <= room)
        return next(fitting, configs[-1])

    def block_h(self, config: ScanConfig) -> int:
        fewest = SMALLEST_TILE if config.splits_heads else FEWEST_ROWS
        block_h = max(fewest, power_of_2(self.hidden))
        # Programs of the interpreter run one after the other and cannot wait for one another.
        alone = interpreted() and config.splits_heads
        return block_h if alone else min(config.block_h, block_h)

    def blocks(self, config: ScanConfig) -> int:
        return cdiv(self.hidden, self.block_h(config))

    @property
    def gate_constants(self) -> KernelConfig:
        return KernelConfig(self.chunk, self.block_c, int(self.read == "before"))

    def constants(self, config: ScanConfig) -> KernelConfig:
        return self.gate_constants._replace(
            D=self.width,
            HIDDEN=self.hidden,
            SIZE=self.packed_size,
            BLOCK_D=self.block_d,
            BLOCK_H=self.block_h(config),
            BLOCKS=self.blocks(config),
            ACTIVATION=self.activation,
            UPCAST=interpreted(),
            PRECISION=self.precision,
        )

    @property
    def block_d(self) -> int:
        return max(FEWEST_ROWS, power_of_2(self.width))

    @property
    def block_c(self) -> int:
        return max(FEWEST_ROWS, power_of_2(self.chunk))

    def wide(self, *shape: int) -> Allocator:
        """For an fp32 tensor of this shape."""
        return allocator(shape, torch.float32, self.device)

    def narrow(self, *shape: int) -> Allocator:
        """For a tensor of this shape in q's dtype."""
        return allocator(shape, self.dtype, self.device)


class DecayAllocators(NamedTuple):
    """For gamma, the last row of nu, and keep, carry and decay, of some chunks of all heads."""

    gamma: Allocator
    nu: Allocator
    reach: Allocator


class PartialSums(NamedTuple):
    """For the tiles that the programs of a head add up, and the count of those that have stored
    theirs; None where a head has one program.
    """

    tiles: Allocator | None
    arrived: Allocator | None


class ForwardPlan(NamedTuple):
    """One forward pass: which of q, k and v it copies first, its launches in their order, and the
    allocators of its tensors.
    """

    copies: tuple[bool, ...]
    find_decays: Launch
    write: Launch
    read: Launch
    decays: DecayAllocators
    sums: PartialSums
    y: Allocator
    states: Allocator
    end: Allocator


def scan_forward(
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
            return scan_forward(
                q, k, v, state, alpha, eta, theta, written, hidden, chunk, activation, read
            )
    if not q.numel():
        chunks = cdiv(q.shape[1], chunk)
        return q.new_empty(q.shape), state.clone(), state.new_empty(chunks, *state.shape)
    options = hidden, chunk, activation, read, written is not None, product_precision(q.dtype)
    plan = forward_plan(q.shape, *options, layouts(q, k, v), q.device)
    if plan.copies:
        q, k, v = contiguous_where((q, k, v), plan.copies)
    alpha, eta, theta = alpha.contiguous(), eta.contiguous(), theta.contiguous()
    written = None if written is None else written.contiguous()
    gamma, nu, reach = plan.decays.gamma(), plan.decays.nu(), plan.decays.reach()
    tiles, arrived = allocate(plan.sums.tiles), allocate(plan.sums.arrived)
    y, states, end = plan.y(), plan.states(), plan.end()
    plan.find_decays((alpha, eta, theta, written, gamma, nu, reach, None, arrived))
    ends = (gamma, nu, reach, state.contiguous(), states, end)
    plan.write((k, v, written, *ends, tiles, arrived))
    plan.read((q, k, v, written, gamma, reach, states, y, *NOT_KEPT))
    return y, end, states


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    has_mask: bool,
    precision: str,
    operands: tuple[Layout, ...],
    device: torch.device,
) -> ForwardPlan:
    """The plan for operands of these layouts: q, k and v."""
    (dtype, _), *_ = operands
    # A chunk is no longer than there are tokens.
    batch, tokens, heads, width = shape
    sizes = batch, tokens, heads, width, hidden, min(chunk, tokens)
    problem = Problem(*sizes, activation, read, has_mask, dtype, precision, device)
    copies, strides = head_strides(shape, operands)
    state = batch, heads, 2, problem.packed_size
    chunks, config = problem.chunks, problem.sharing(STATES)
    return ForwardPlan(
        copies,
        decays_launch(problem, 0, chunks),
        Launch(
            kernels.scan_states_kernel,
            (problem.all_heads * problem.blocks(config),),
            device,
            (tokens, heads, problem.all_heads, *strides[1], *strides[2]),
            dict(num_warps=config.num_warps),
            CONFIG=problem.constants(config),
        ),
        read_launch(problem, strides, 0, chunks, keep=False),
        decay_allocators(problem, chunks),
        partial_sums(problem, config),
        y=problem.narrow(*shape),
        states=problem.wide(chunks, *state),
        end=problem.wide(*state),
    )


def read_launch(
    problem: Problem, strides: Sequence[tuple[int, ...]], first: int, chunks: int, *, keep: bool
) -> Launch:
    """The reads of ``chunks`` chunks from ``first`` on, for q, k and v of these strides."""
    config = RECOMPUTE if keep else READ
    return Launch(
        kernels.scan_read_kernel,
        (problem.all_heads * chunks,),
        problem.device,
        (
            *(problem.tokens, problem.heads, problem.all_heads, first, chunks),
            *(stride for operand in strides for stride in operand),
        ),
        dict(num_warps=config.num_warps),
        CONFIG=problem.constants(config),
    )


def decays_launch(problem: Problem, first: int, chunks: int) -> Launch:
    return Launch(
        kernels.decays_kernel,
        (problem.all_heads * chunks,),
        problem.device,
        (problem.tokens, problem.heads, first, chunks),
        dict(num_warps=1),
        CONFIG=problem.gate_constants,
    )


def decay_allocators(problem: Problem, chunks: int) -> DecayAllocators:
    heads, chunk = problem.all_heads, problem.chunk
    return DecayAllocators(
        problem.wide(heads, chunks, chunk, chunk),
        problem.wide(heads, chunks, chunk),
        problem.wide(heads, chunks, 3, chunk),
    )


def partial_sums(problem: Problem, config: ScanConfig) -> PartialSums:
    """The tensors of ``sum_of_programs``."""
    blocks, heads = problem.blocks(config), problem.all_heads
    if blocks == 1:
        return PartialSums(None, None)
    return PartialSums(
        problem.wide(heads, 2, blocks, problem.block_c, problem.block_d),
        allocator((heads,), torch.int32, problem.device),
    )
