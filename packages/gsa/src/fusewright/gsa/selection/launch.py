"""The launches of indexer_topk: configurations and plans.

The scores of a chunk of the rows are computed into memory, and the selection of these rows reads
them from there; the next rows overwrite them.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocate,
    allocator,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import input_precision, round_up
from ..common.launches import Shape, grid_of
from ..indexer.launch import SCORES, IndexerProblem, indexer_problem, plan_scores

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class SelectConfig(NamedTuple):
    """Serves rows of up to ``max_scores`` scores, of which one program takes a ``block`` at a time;
    where they are ``held`` in registers, that is all of them.

    A line of few registers serves compute capability 9.0 alone, and no entropy: elsewhere it
    spills.
    """

    max_scores: float
    block: int
    num_warps: int
    max_registers: int
    held: bool = True
    few_registers: bool = False

    @property
    def runs(self) -> int:
        """Into how many runs a block is cut, of each of which a thread has four neighbours."""
        return max(self.block // (128 * self.num_warps), 1)


# Read from the top; the first line that fits serves. Source of the table and of the size of a
# chunk: docs/decisions/0014-selection-h200.csv.
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
    SelectConfig(16384, 16384, num_warps=32, max_registers=64),
    SelectConfig(math.inf, 4096, num_warps=8, max_registers=80, held=False),
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
    """How many keys a row selects, and how many first keys it selects in any case."""

    law: str
    k_base: int
    k_min: int
    k_max: int
    sinks: int


class SelectionPlan(NamedTuple):
    """One selection: for each chunk of the rows the launches of its scores (None where the rows see
    no key) and of its selection, which operands it copies first, its intermediate results and its
    outputs.
    """

    chunks: tuple[tuple[Launch | None, Launch], ...]
    copies: tuple[bool, ...]
    scores: Allocator
    listed: Allocator | None
    indices: Allocator
    counts: Allocator
    variance: Allocator
    entropy: Allocator | None


def select_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    variance_ema: torch.Tensor | None,
    scale: float,
    law: str,
    k_base: int,
    k_min: int,
    k_max: int,
    sinks: int,
    causal: bool,
    q_offset: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``(indices, count, variance, entropy)`` of every row, contiguous; entropy is None but for the
    law "entropy".
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return select_keys(
                q,
                k,
                w,
                bias,
                variance_ema,
                scale,
                law,
                k_base,
                k_min,
                k_max,
                sinks,
                causal,
                q_offset,
            )
    operands = (q, k, w, bias)
    plan = selection_plan(
        q.shape,
        k.shape[1],
        layouts(*operands),
        causal,
        q_offset,
        SelectionLaw(law, k_base, k_min, k_max, sinks),
        variance_ema is not None,
        input_precision(q.dtype),
        q.device,
    )
    indices, count, variance = plan.indices(), plan.counts(), plan.variance()
    entropy = allocate(plan.entropy)
    if plan.chunks:
        if plan.copies:
            operands = contiguous_where(operands, plan.copies)
        scores = plan.scores()
        listed = allocate(plan.listed)
        outputs = (indices, count, variance, entropy)
        for scores_launch, select_launch in plan.chunks:
            if scores_launch is not None:
                scores_launch((*operands, scores), (scale,))
            select_launch((scores, listed, variance_ema, *outputs))
    return indices, count, variance, entropy


@functools.lru_cache(maxsize=1024)
def selection_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Layout | None, ...],
    causal: bool,
    offset: int,
    law: SelectionLaw,
    has_ema: bool,
    precision: str,
    device: torch.device,
) -> SelectionPlan:
    """The plan for operands of these layouts: q, k, w and bias."""
    problem = indexer_problem(shape, keys, operands, causal, offset, precision, device)
    rows = shape[:2]
    few_registers = device_properties(device).capability == 90 and law.law != "entropy"
    chunks, most_scores, most_listed = [], 1, 0
    for first, last, width in chunks_of_rows(problem, few_registers):
        scores_launch = plan_scores(problem, first, last, width, fill=False) if width else None
        select_launch = plan_select(problem, first, last, width, law, has_ema, few_registers)
        chunks.append((scores_launch, select_launch))
        programs = problem.batches * (last - first)
        most_scores = max(most_scores, programs * width)
        if select_launch.constants["LISTED"]:
            most_listed = max(most_listed, programs * select_launch.constants["BLOCK"])
    return SelectionPlan(
        tuple(chunks),
        problem.copies,
        allocator((most_scores,), torch.float32, device),
        allocator((most_listed,), torch.int32, device) if most_listed else None,
        indices=allocator((*rows, law.k_max), torch.int32, device),
        counts=allocator(rows, torch.int32, device),
        variance=allocator(rows, torch.float32, device),
        entropy=allocator(rows, torch.float32, device) if law.law == "entropy" else None,
    )


def chunks_of_rows(problem: IndexerProblem, few_registers: bool) -> list[tuple[int, int, int]]:
    """Chunks ``(first, last, width)``: rows from ``first`` to before ``last``, and how many scores
    each has. A chunk's scores fit their memory, or it is one tile of rows. It ends before rows that
    need another line of the table, unless these are short.
    """
    tile = problem.config(SCORES).queries
    chunks: list[tuple[int, int, int]] = []
    if not problem.batches * problem.queries:
        return chunks
    first = 0
    while first < problem.queries:
        last = first + tile
        config = config_of_rows(problem, last, few_registers)
        while last < problem.queries:
            longer = keys_before(problem, last + tile)
            if problem.batches * (last + tile - first) * longer > SCORES_TO_SELECT:
                break
            if config_of_rows(problem, last + tile, few_registers) != config:
                break
            last += tile
        last = min(last, problem.queries)
        chunks.append((first, last, keys_before(problem, last)))
        first = last
    return chunks


def config_of_rows(problem: IndexerProblem, last: int, few_registers: bool) -> SelectConfig:
    """The line that selects of rows before ``last`` at least: short rows have one in common."""
    return select_config(max(keys_before(problem, last), SHORT_ROW), few_registers)


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
    has_ema: bool,
    few_registers: bool,
) -> Launch:
    """The launch that selects of rows from ``first`` to before ``last``, with ``width`` scores."""
    config = select_config(width, few_registers)
    return Launch(
        kernels.select_kernel,
        grid_of(problem.batches * (last - first)),
        problem.device,
        (problem.queries, problem.keys, problem.offset, first, last - first, width, *law[1:]),
        dict(num_warps=config.num_warps, maxnreg=config.max_registers),
        CAUSAL=problem.causal,
        LAW=law.law,
        HAS_EMA=has_ema,
        HELD=config.held,
        LISTED=not config.held and LISTED * law.k_max <= config.block,
        BLOCK=config.block,
        RUNS=config.runs,
    )


def select_config(scores: int, few_registers: bool) -> SelectConfig:
    """The line for rows of this many scores; ``few_registers``: whether such a line may serve."""
    return next(
        config
        for config in SELECT
        if scores <= config.max_scores and (few_registers or not config.few_registers)
    )
