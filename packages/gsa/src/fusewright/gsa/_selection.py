"""The launches of indexer_topk: plans, allocates and launches.

The scores of a part of the rows are computed into memory, and the selection of these rows reads
them from there; then the next rows take their place.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ._backends import card_of
from ._configs import (
    LISTED,
    SCORES,
    SCORES_IN_LINE,
    SCORES_TO_SELECT,
    SHORT_ROW,
    SelectConfig,
    select_config,
)
from ._indexer_problem import Indexer, Shape, grid_of, indexer_of, precision_of
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, made, memory
from ._scores import plan_scores
from ._selection_kernels import _select_kernel


class SelectionLaw(NamedTuple):
    """How many keys a row selects, and how many first keys it selects in any case."""

    law: str
    k_base: int
    k_min: int
    k_max: int
    sinks: int


class SelectionPlan(NamedTuple):
    """One selection: for each part of the rows the launches of its scores and of its selection
    (none where there are no rows), which operands it copies first, its memory and its outputs.
    """

    parts: tuple[tuple[Launch | None, Launch], ...]
    copies: tuple[bool, ...]
    scores: Allocate
    listed: Allocate | None
    indices: Allocate
    counts: Allocate
    variance: Allocate
    entropy: Allocate | None


def launch_selection(
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
            return launch_selection(
                *(q, k, w, bias, variance_ema),
                scale,
                law,
                *(k_base, k_min, k_max, sinks),
                causal,
                q_offset,
            )
    operands = (q, k, w, bias)
    plan = selection_plan(
        *(q.shape, k.shape[1], kinds(*operands), causal, q_offset),
        *(SelectionLaw(law, k_base, k_min, k_max, sinks), variance_ema is not None),
        *(precision_of(q.dtype), q.device),
    )
    indices, count, variance = plan.indices(), plan.counts(), plan.variance()
    entropy = made(plan.entropy)
    if plan.parts:
        if plan.copies:
            operands = copied(operands, plan.copies)
        scores = plan.scores()
        listed = made(plan.listed)
        outputs = (indices, count, variance, entropy)
        for of_scores, of_selection in plan.parts:
            if of_scores is not None:
                of_scores((*operands, scores), (scale,))
            of_selection((scores, listed, variance_ema, *outputs))
    return indices, count, variance, entropy


@functools.lru_cache(maxsize=1024)
def selection_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Kind | None, ...],
    causal: bool,
    offset: int,
    law: SelectionLaw,
    has_ema: bool,
    precision: str,
    device: torch.device,
) -> SelectionPlan:
    """The plan for operands of these kinds: q, k, w and bias."""
    indexer = indexer_of(shape, keys, operands, causal, offset, precision, device)
    rows = shape[:2]
    lean = card_of(device).capability == 90 and law.law != "entropy"
    parts, most, most_listed = [], 1, 0
    for first, last, width in parts_of(indexer, lean):
        of_scores = plan_scores(indexer, first, last, width, fill=False) if width else None
        of_selection = plan_select(indexer, first, last, width, law, has_ema, lean)
        parts.append((of_scores, of_selection))
        programs = indexer.batches * (last - first)
        most = max(most, programs * width)
        if of_selection.constants["LISTED"]:
            most_listed = max(most_listed, programs * of_selection.constants["BLOCK"])
    return SelectionPlan(
        tuple(parts),
        indexer.copies,
        memory((most,), torch.float32, device),
        memory((most_listed,), torch.int32, device) if most_listed else None,
        indices=memory((*rows, law.k_max), torch.int32, device),
        counts=memory(rows, torch.int32, device),
        variance=memory(rows, torch.float32, device),
        entropy=memory(rows, torch.float32, device) if law.law == "entropy" else None,
    )


def parts_of(indexer: Indexer, lean: bool) -> list[tuple[int, int, int]]:
    """Rows from the first to before the second number, whose scores of so many keys fit the
    memory; and at least a tile of rows. A part ends before rows that need another line of the
    table, unless these are short.
    """
    tile = indexer.line(SCORES).queries
    parts: list[tuple[int, int, int]] = []
    if not indexer.batches * indexer.queries:
        return parts
    first = 0
    while first < indexer.queries:
        last = first + tile
        line = line_for(indexer, last, lean)
        while last < indexer.queries:
            longer = keys_before(indexer, last + tile)
            if indexer.batches * (last + tile - first) * longer > SCORES_TO_SELECT:
                break
            if line_for(indexer, last + tile, lean) != line:
                break
            last += tile
        last = min(last, indexer.queries)
        parts.append((first, last, keys_before(indexer, last)))
        first = last
    return parts


def line_for(indexer: Indexer, last: int, lean: bool) -> SelectConfig:
    """The line that selects of rows before ``last`` at least: short rows share one."""
    return select_config(max(keys_before(indexer, last), SHORT_ROW), lean)


def keys_before(indexer: Indexer, last: int) -> int:
    """How many keys the rows before ``last`` see, so that rows of scores start in line."""
    seen = min(indexer.keys, indexer.offset + last) if indexer.causal else indexer.keys
    return triton.cdiv(seen, SCORES_IN_LINE) * SCORES_IN_LINE


def plan_select(
    indexer: Indexer,
    first: int,
    last: int,
    width: int,
    law: SelectionLaw,
    has_ema: bool,
    lean: bool,
) -> Launch:
    """The launch that selects of rows from ``first`` to before ``last``, with ``width`` scores."""
    config = select_config(width, lean)
    return Launch(
        _select_kernel,
        grid_of(indexer.batches * (last - first)),
        indexer.device,
        (
            *(indexer.queries, indexer.keys, indexer.offset, first, last - first, width),
            *law[1:],
        ),
        dict(num_warps=config.num_warps, maxnreg=config.max_registers),
        CAUSAL=indexer.causal,
        LAW=law.law,
        HAS_EMA=has_ema,
        HELD=config.held,
        LISTED=not config.held and LISTED * law.k_max <= config.block,
        BLOCK=config.block,
        RUNS=config.runs,
    )
