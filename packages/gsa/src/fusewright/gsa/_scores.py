"""The launches of gated_indexer: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ._configs import SCORES, SCORES_DK, SCORES_DQ, block_width
from ._indexer_problem import Indexer, Shape, grid_of, indexer_of, precision_of, present
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._scores_backward_kernels import _scores_dk_kernel, _scores_dq_kernel
from ._scores_kernels import _scores_kernel


class ScoresPlan(NamedTuple):
    """One forward pass: its launch (nothing where there are no scores), which operands it copies
    first, and its output.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    scores: Allocate


class GradientsPlan(NamedTuple):
    """One backward pass: its launches (nothing where there are no scores), which operands it copies
    first, and its outputs. ``dbias`` holds a part for each program of the first launch.
    """

    dq_launch: Launch | None
    dk_launch: Launch | None
    copies: tuple[bool, ...]
    dq: Allocate
    dk: Allocate
    dw: Allocate
    dbias: Allocate


def launch_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    causal: bool,
    q_offset: int,
) -> torch.Tensor:
    """The scores of every query and key, [B, Tq, Tkv] in fp32; -inf where a row sees no key."""
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_scores(q, k, w, bias, scale, causal, q_offset)
    operands = (q, k, w, bias)
    plan = scores_plan(
        *(q.shape, k.shape[1], kinds(*operands), causal, q_offset),
        *(precision_of(q.dtype), q.device),
    )
    scores = plan.scores()
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        plan.launch((*operands, scores), (scale,))
    return scores


@functools.lru_cache(maxsize=4096)
def scores_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Kind | None, ...],
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
) -> ScoresPlan:
    """The plan for operands of these kinds: q, k, w and bias."""
    indexer = indexer_of(shape, keys, operands, causal, offset, precision, device)
    launch = None
    if indexer.score_count:
        launch = plan_scores(indexer, 0, indexer.queries, indexer.keys, fill=True)
    outputs = (indexer.batches, indexer.queries, indexer.keys)
    return ScoresPlan(launch, indexer.copies, memory(outputs, torch.float32, device))


def plan_scores(
    indexer: Indexer, first_row: int, last_row: int, last_key: int, fill: bool
) -> Launch:
    """The launch for the rows from ``first_row``, a multiple of a tile's, to ``last_row``, into
    [B, rows, last_key].
    """
    config = indexer.line(SCORES)
    row_tiles = triton.cdiv(last_row - first_row, config.queries)
    key_tiles = triton.cdiv(last_key, config.keys)
    return Launch(
        _scores_kernel,
        grid_of(indexer.batches * row_tiles * key_tiles),
        indexer.device,
        (*indexer.strides, *indexer.sizes, first_row, last_row, last_key),
        dict(num_warps=config.num_warps, num_stages=config.num_stages),
        **indexer.constants,
        FILL=fill,
        BLOCK_Q=config.queries,
        BLOCK_K=config.keys,
        BLOCK_D=block_width(indexer.width),
    )


def launch_scores_backward(
    dscores: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    causal: bool,
    q_offset: int,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dq, dk, dw, dbias)``, each contiguous and in the dtype of what it belongs to, or all in
    fp32.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_scores_backward(dscores, q, k, w, bias, scale, causal, q_offset, wide)
    operands = (q, k, w, bias)
    plan = gradients_plan(
        *(q.shape, k.shape[1], kinds(*operands), kinds(dscores)[0], causal, q_offset),
        *(precision_of(q.dtype), q.device, wide),
    )
    dq, dk, dw, dbias = plan.dq(), plan.dk(), plan.dw(), plan.dbias()
    if plan.dq_launch is None or plan.dk_launch is None:
        for x in (dq, dk, dw):
            x.zero_()
        return dq, dk, dw, torch.zeros_like(bias)
    if plan.copies:
        operands = copied(operands, plan.copies)
    plan.dq_launch((dscores, *operands, dq, dw, dbias), (scale,))
    plan.dk_launch((dscores, *operands, dk), (scale,))
    return dq, dk, dw, dbias.sum(0).to(torch.float32 if wide else bias.dtype)


@functools.lru_cache(maxsize=4096)
def gradients_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Kind | None, ...],
    dscores: Kind,
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
    wide: bool,
) -> GradientsPlan:
    """The plan for operands of these kinds: q, k, w and bias, and the scores' gradient."""
    indexer = indexer_of(shape, keys, operands, causal, offset, precision, device)
    batches, queries, heads, width = shape
    w_dtype = torch.float32 if wide else present(operands[2])[0]
    dtype = torch.float32 if wide else indexer.dtype
    rows = SCORES_DQ, batches * heads, queries
    tiles, dq_launch = plan_gradient(_scores_dq_kernel, indexer, dscores, rows, over_keys=False)
    columns = SCORES_DK, batches, keys
    _, dk_launch = plan_gradient(_scores_dk_kernel, indexer, dscores, columns, over_keys=True)
    return GradientsPlan(
        dq_launch,
        dk_launch,
        indexer.copies,
        dq=memory(shape, dtype, device),
        dk=memory((batches, keys, width), dtype, device),
        dw=memory((batches, queries, heads), w_dtype, device),
        dbias=memory((batches * tiles, heads), torch.float32, device),
    )


def plan_gradient(kernel, indexer: Indexer, dscores: Kind, table_and_rows, over_keys: bool):
    """How many tiles a head's, or a task's, rows are, and the launch that takes one a program;
    nothing where there are no scores.
    """
    table, groups, rows = table_and_rows
    config = indexer.line(table)
    tiles = triton.cdiv(rows, config.keys if over_keys else config.queries)
    if not indexer.score_count:
        return tiles, None
    return tiles, Launch(
        kernel,
        grid_of(groups * tiles),
        indexer.device,
        (*dscores[1], *indexer.strides, *indexer.sizes),
        dict(num_warps=config.num_warps),
        **indexer.constants,
        BLOCK_Q=config.queries,
        BLOCK_K=config.keys,
        BLOCK_D=block_width(indexer.width),
        NUM_STAGES=config.num_stages,
    )
