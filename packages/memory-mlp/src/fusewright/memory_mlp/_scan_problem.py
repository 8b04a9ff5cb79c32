"""One call of memory_scan as its kernels see it, and the launches that both of its passes make."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ._backends import card_of, interpreted
from ._launch import Allocate, Kind, Launch, memory
from ._scan_configs import COMPUTE_AGAIN, READ, ScanConfig
from ._scan_decays_kernels import _decays_kernel
from ._scan_forward_kernels import _scan_read_kernel

# tl.dot multiplies no tiles of fewer rows or columns.
SMALLEST_TILE = 16
# Products of fewer rows take other instructions, and where one kernel has both kinds triton 3.6
# reads past the end of its shared memory. Where programs share a head, rows are tokens or columns
# of keys and values alone, and a program may take fewer hidden units.
FEWEST_ROWS = SMALLEST_TILE if interpreted() else 64
# Of four warps, on one multiprocessor.
PROGRAMS_AT_ONCE = 2

Tensor = torch.Tensor


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
        return triton.cdiv(self.tokens, self.chunk)

    @property
    def shift(self) -> int:
        """How many tokens before its own a query reads."""
        return int(self.read == "before")

    @property
    def arithmetic(self) -> dict[str, Any]:
        return dict(UPCAST=interpreted(), PRECISION=self.precision)

    def sharing(self, configs: tuple[ScanConfig, ...]) -> ScanConfig:
        """The first of the lines of which the card takes all programs at once."""
        room = PROGRAMS_AT_ONCE * card_of(self.device).multiprocessors
        fitting = (each for each in configs if self.all_heads * self.blocks(each) <= room)
        return next(fitting, configs[-1])

    def block_h(self, config: ScanConfig) -> int:
        fewest = SMALLEST_TILE if config.meets else FEWEST_ROWS
        block_h = max(fewest, triton.next_power_of_2(self.hidden))
        # Programs of the interpreter run one after the other and cannot meet.
        return block_h if interpreted() and config.meets else min(config.block_h, block_h)

    def blocks(self, config: ScanConfig) -> int:
        return triton.cdiv(self.hidden, self.block_h(config))

    def sizes(self, config: ScanConfig) -> dict[str, Any]:
        """What the kernels over chunks take last."""
        return dict(
            C=self.chunk,
            D=self.width,
            HIDDEN=self.hidden,
            BLOCK_C=self.block_c,
            BLOCK_D=self.block_d,
            BLOCK_H=self.block_h(config),
            BLOCKS=self.blocks(config),
        )

    @property
    def block_d(self) -> int:
        return max(FEWEST_ROWS, triton.next_power_of_2(self.width))

    @property
    def block_c(self) -> int:
        return max(FEWEST_ROWS, triton.next_power_of_2(self.chunk))


class Decays(NamedTuple):
    """The memory of gamma, the last row of nu, and keep, carry and decay, for some chunks of every
    head.
    """

    gamma: Allocate
    nu: Allocate
    reach: Allocate

    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gamma(), self.nu(), self.reach()


class Meeting(NamedTuple):
    """Where the programs that share a head put tiles for one another; None where one has all."""

    parts: Allocate | None
    arrived: Allocate | None

    def made(self) -> tuple[Tensor | None, Tensor | None]:
        if self.parts is None or self.arrived is None:
            return None, None
        return self.parts(), self.arrived()


def problem_of(
    q: Tensor, hidden: int, chunk: int, activation: str, read: str, has_mask: bool
) -> Problem:
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    # Three products of TF32 parts are as good as one of fp32, and fit the same units.
    precision = "tf32" if tf32 else "tf32x3"
    # A chunk is no longer than there are tokens.
    chunk = min(chunk, max(q.shape[1], 1))
    batch, tokens, heads, width = q.shape
    return Problem(
        *(batch, tokens, heads, width, hidden, chunk, activation, read, has_mask),
        *(q.dtype, precision, q.device),
    )


def read_launch(
    problem: Problem, strides: Sequence[tuple[int, ...]], first: int, chunks: int, *, keep: bool
) -> Launch:
    """The kernel of the reads of ``chunks`` chunks from ``first`` on, for these q, k and v."""
    config = COMPUTE_AGAIN if keep else READ
    return Launch(
        _scan_read_kernel,
        (problem.all_heads * chunks,),
        problem.device,
        (
            *(problem.tokens, problem.heads, problem.all_heads, first, chunks),
            *(stride for operand in strides for stride in operand),
        ),
        dict(num_warps=config.num_warps),
        HAS_MASK=problem.has_mask,
        KEEP=keep,
        SHIFT=problem.shift,
        **problem.arithmetic,
        ACTIVATION=problem.activation,
        **problem.sizes(config),
    )


def decays_launch(problem: Problem, first: int, chunks: int, *, keep: bool) -> Launch:
    return Launch(
        _decays_kernel,
        (problem.all_heads * chunks,),
        problem.device,
        (problem.tokens, problem.heads, first, chunks),
        dict(num_warps=1),
        HAS_MASK=problem.has_mask,
        KEEP=keep,
        C=problem.chunk,
        BLOCK_C=problem.block_c,
    )


def decays_memory(problem: Problem, chunks: int) -> Decays:
    wide = functools.partial(memory, dtype=torch.float32, device=problem.device)
    square = (problem.all_heads, chunks, problem.chunk, problem.chunk)
    return Decays(
        wide(square), wide(square[:-1]), wide((problem.all_heads, chunks, 3, problem.chunk))
    )


def meeting_of(problem: Problem, config: ScanConfig) -> Meeting:
    """The memory of ``summed_over_blocks``."""
    blocks, heads, device = problem.blocks(config), problem.all_heads, problem.device
    if blocks == 1:
        return Meeting(None, None)
    tiles = (heads, 2, blocks, problem.block_c, problem.block_d)
    return Meeting(memory(tiles, torch.float32, device), memory((heads,), torch.int32, device))


def rows_shape(problem: Problem) -> tuple[int, ...]:
    return problem.batch, problem.tokens, problem.heads, problem.width


def walks(
    problem: Problem, operands: tuple[Kind, ...]
) -> tuple[tuple[bool, ...], list[tuple[int, ...]]]:
    """Which operands are copied first, and the strides of batch, tokens and heads of all, as they
    are read.
    """
    _, tokens, heads, width = rows_shape(problem)
    copies = tuple(strides[-1] != 1 and width > 1 for _, strides in operands)
    copy = (tokens * heads * width, heads * width, width)
    return copies, [
        copy if copied_first else strides[:-1]
        for copied_first, (_, strides) in zip(copies, operands, strict=True)
    ]
