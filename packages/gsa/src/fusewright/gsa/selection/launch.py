"""The launches of indexer_topk: configurations and plans.

The scores of a chunk of the rows are computed into memory, and the selection of these rows reads
them from there; the next rows overwrite them.
"""

from __future__ import annotations

import functools
import math
from operator import call
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import (
    Allocator,
    Launch,
    allocate,
    allocator,
    contiguous_where,
)
from .._core.lazy import lazy_module
from .._core.precision import round_up
from .._core.version import triton_version
from ..common.launches import chunks_of_rows, grid_of
from ..indexer.launch import SCORES, IndexerProblem, plan_scores, problem_of

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class SelectConfig(NamedTuple):
    """Serves rows of up to ``max_scores`` scores, of which one program takes a ``block`` at a time;
    where they are ``held`` in registers, that is all of them.

    A line of few registers serves compute capability 9.0 alone, no entropy and no scores that may
    be negative: elsewhere it spills. Nor do lines that are not ``signed`` serve these.
    """

    max_scores: float
    block: int
    num_warps: int
    max_registers: int
    held: bool = True
    few_registers: bool = False
    signed: bool = True

    @property
    def registers(self) -> int:
        """What a thread has at most, without a spill by the triton that is installed."""
        more = self.few_registers and triton_version() >= MORE_REGISTERS_FROM
        return max(self.max_registers, MORE_REGISTERS) if more else self.max_registers

    @property
    def runs(self) -> int:
        """Into how many runs a block is cut, of each of which a thread has four neighbours."""
        return max(self.block // (128 * self.num_warps), 1)


# From this triton on lines of few registers have as many as it takes: 64 would spill 88 bytes of a
# thread, 80 still 16. Unmeasured.
MORE_REGISTERS_FROM, MORE_REGISTERS = (3, 8), 96

# Read from the top; the first line that fits serves. Source of the table and of the size of a
# chunk: docs/decisions/0014-selection-h200.csv; the last line, for scores that may be negative, is
# unmeasured.
SELECT = (
    SelectConfig(256, 256, num_warps=1, max_registers=80),
    SelectConfig(512, 512, num_warps=1, max_registers=80),
    SelectConfig(1024, 1024, num_warps=1, max_registers=128),
    SelectConfig(2048, 2048, num_warps=2, max_registers=64, few_registers=True),
    SelectConfig(4096, 4096, num_warps=4, max_registers=64, few_registers=True),
    SelectConfig(8192, 8192, num_warps=8, max_registers=64, few_registers=True),
    SelectConfig(16384, 16384, num_warps=16, max_registers=64, few_registers=True),
    SelectConfig(2048, 2048, num_warps=2, max_registers=168),
    SelectConfig(4096, 4096, num_warps=4, max_registers=168),
    SelectConfig(8192, 8192, num_warps=8, max_registers=168),
    SelectConfig(16384, 16384, num_warps=32, max_registers=64, signed=False),
    SelectConfig(math.inf, 4096, num_warps=8, max_registers=80, held=False, signed=False),
    SelectConfig(math.inf, 4096, num_warps=16, max_registers=80, held=False),
)
# The scores of a chunk of rows, 128 MiB: fewer leave a GPU idle where rows are long.
SCORES_TO_SELECT = 1 << 25
# Rows of scores start at multiples of this many.
SCORES_IN_LINE = 128
# Rows of up to this many scores are one chunk, whatever line serves them.
SHORT_ROW = 2048
# A row that reads its scores again lists and holds a block of the candidates, if that is this
# many times the most keys that it may select.
LISTED = 2


class SelectionLaw(NamedTuple):
    """How many keys a row selects, and how many first and last keys it selects in any case."""

    law: str
    k_base: int
    k_min: int
    k_max: int
    sinks: int
    window: int


class SelectConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``."""

    CAUSAL: bool
    LAW: str
    HELD: bool
    LISTED: bool
    BLOCK: int
    RUNS: int
    WINDOW: bool
    RANGED: bool
    SIGNED: bool


class SelectionPlan(NamedTuple):
    """One selection: for each chunk of the rows the launches of its scores (None where the rows see
    no key) and of its selection, the memory of the scores, that of lists (None without any), and
    that of indices, counts, variance and entropy (but for its law, none).
    """

    chunks: tuple[tuple[Launch | None, Launch], ...]
    scores: Allocator
    listed: Allocator | None
    outputs: tuple[Allocator, ...]


def select_keys(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    ranges: Tensor | None,
    variance_ema: Tensor | None,
    scale: float,
    law: str,
    k_base: int,
    k_min: int,
    k_max: int,
    sinks: int,
    window: int,
    causal: bool,
    q_offset: int,
    form: str = "gated",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``(indices, count, variance, entropy)`` of every row, contiguous; entropy is None but for the
    law "entropy".
    """
    operands: tuple[Tensor | None, ...] = (q, k, w, bias, ranges)
    problem = problem_of(q, k, w, bias, ranges, causal, q_offset, form)
    counts = SelectionLaw(law, k_base, k_min, k_max, sinks, window)
    plan = selection_plan(problem, counts, variance_ema is not None)
    indices, count, variance, *entropies = map(call, plan.outputs)
    entropy = entropies[0] if entropies else None
    if plan.chunks:
        if problem.copies:
            operands = contiguous_where(operands, problem.copies)
        scores, listed = plan.scores(), allocate(plan.listed)
        outputs = (indices, count, variance, entropy)
        for scores_launch, select_launch in plan.chunks:
            if scores_launch is not None:
                scores_launch((*operands, scores), (scale,))
            select_launch((scores, ranges, listed, variance_ema, *outputs))
    return indices, count, variance, entropy


@functools.lru_cache(maxsize=1024)
def selection_plan(problem: IndexerProblem, law: SelectionLaw, has_ema: bool) -> SelectionPlan:
    """The plan for one law; ``has_ema``: whether there is an average of the variance."""
    device, rows = problem.device, problem.shape[:2]
    few_registers = (
        device_properties(device).capability == 90 and law.law != "entropy" and problem.gated
    )
    chunks, most_scores, most_listed = [], 1, 0
    for first, last, width in chunks_with_widths(problem, few_registers):
        scores_launch = plan_scores(problem, first, last, width, fill=False) if width else None
        select_launch = plan_select(problem, first, last, width, law, few_registers)
        chunks.append((scores_launch, select_launch))
        programs = rows[0] * (last - first)
        most_scores = max(most_scores, programs * width)
        if select_launch.constants["CONFIG"].LISTED:
            most_listed = max(most_listed, programs * select_launch.constants["CONFIG"].BLOCK)
    of_rows = allocator(rows, torch.float32, device)
    return SelectionPlan(
        tuple(chunks),
        allocator((most_scores,), torch.float32, device),
        allocator((most_listed,), torch.int32, device) if most_listed else None,
        (
            *(allocator(x, torch.int32, device) for x in ((*rows, law.k_max), rows)),
            *((of_rows, of_rows) if law.law == "entropy" else (of_rows,)),
        ),
    )


def chunks_with_widths(problem: IndexerProblem, few_registers: bool) -> list[tuple[int, int, int]]:
    """Chunks of the rows, and how many scores each of their rows has. A chunk's scores fit their
    memory, or it is one tile of rows. It ends before rows that need another line of the table,
    unless these are short.
    """
    batches, queries = problem.shape[:2]
    tile = problem.config(SCORES).queries

    def fits(first: int, last: int) -> bool:
        if batches * (last - first) * keys_before(problem, last) > SCORES_TO_SELECT:
            return False
        lines = (config_of_rows(problem, row, few_registers) for row in (first + tile, last))
        return next(lines) == next(lines)

    chunks = chunks_of_rows(queries if batches else 0, tile, fits)
    return [(first, last, keys_before(problem, last)) for first, last in chunks]


def config_of_rows(problem: IndexerProblem, last: int, few_registers: bool) -> SelectConfig:
    """The line that selects of rows before ``last`` at least: short rows have one in common."""
    scores = max(keys_before(problem, last), SHORT_ROW)
    return select_config(scores, few_registers, not problem.gated)


def keys_before(problem: IndexerProblem, last: int) -> int:
    """How many keys the rows before ``last`` see, rounded up so that rows of scores are aligned."""
    visible = min(problem.keys, problem.offset + last) if problem.causal else problem.keys
    return round_up(visible, SCORES_IN_LINE)


def plan_select(
    problem: IndexerProblem,
    first: int,
    last: int,
    width: int,
    law: SelectionLaw,
    few_registers: bool,
) -> Launch:
    """The launch that selects of rows from ``first`` to before ``last``, with ``width`` scores."""
    config = select_config(width, few_registers, not problem.gated)
    batches, queries = problem.shape[:2]
    listed = not config.held and LISTED * law.k_max <= config.block
    return Launch(
        kernels.select_kernel,
        grid_of(batches * (last - first)),
        problem.device,
        (queries, problem.keys, problem.offset, first, last - first, width, *law[1:]),
        dict(num_warps=config.num_warps, maxnreg=config.registers),
        CONFIG=SelectConstants(
            *(problem.causal, law.law, config.held, listed),
            *(config.block, config.runs, law.window > 0, problem.ranged),
            SIGNED=not problem.gated,
        ),
    )


def select_config(scores: int, few_registers: bool, signed: bool) -> SelectConfig:
    """The line for rows of this many scores; ``few_registers``: whether such a line may serve;
    ``signed``: whether scores may be negative.
    """
    return next(
        config
        for config in SELECT
        if scores <= config.max_scores
        and (few_registers or not config.few_registers)
        and (config.signed or not signed)
    )
