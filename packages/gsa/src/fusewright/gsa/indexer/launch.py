"""The launches of gated_indexer, forward and backward: configurations and plans. The selection and
the loss launch the same kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocator,
    cdiv,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import input_precision
from ..common.launches import (
    Shape,
    TileConfig,
    block_width,
    config_for,
    grid_of,
    present,
    row_strides,
)

if TYPE_CHECKING:
    from . import kernels, kernels_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")

# Each table is read from the top; the first line that fits serves. Widths up to 64 by trial on an
# H200, of which no result file is kept yet; the others are unmeasured.
SCORES = (
    TileConfig(128, 2, queries=64, keys=64, num_warps=4, num_stages=2, hopper=True),
    TileConfig(256, 2, queries=32, keys=32, num_warps=4, num_stages=1),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)
SCORES_DQ = (
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, hopper=True),
    TileConfig(128, 2, queries=64, keys=32, num_warps=4, num_stages=2, hopper=True),
    TileConfig(256, 2, queries=32, keys=32, num_warps=4, num_stages=1),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)
SCORES_DK = (
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=2, hopper=True),
    *SCORES_DQ[1:3],
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1, hopper=True),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1, hopper=True),
    TileConfig(256, 4, queries=16, keys=16, num_warps=4, num_stages=1),
)


class IndexerProblem(NamedTuple):
    """q [B, Tq, H, d] against k [B, Tkv, d] with w [B, Tq, H], the first row at ``offset``: sizes,
    which of q, k, w and bias are copied first, and the integers and constants that every kernel
    takes.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    width: int
    causal: bool
    offset: int
    dtype: torch.dtype
    device: torch.device
    copies: tuple[bool, ...]
    strides: tuple[int, ...]
    constants: dict[str, Any]

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.queries, self.keys, self.heads, self.offset)

    @property
    def score_count(self) -> int:
        return self.batches * self.queries * self.keys

    def config(self, table: tuple[TileConfig, ...]) -> TileConfig:
        """The line of a table that serves this problem."""
        return config_for(table, self.width, self.dtype.itemsize, self.device)


def indexer_problem(
    shape: Shape,
    keys: int,
    operands: Sequence[Layout | None],
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
) -> IndexerProblem:
    """The problem of queries of this shape; ``operands``: layouts of q, k, w and bias."""
    batches, queries, heads, width = shape
    q, k, w, bias = (present(layout) for layout in operands)
    copy_q, q_strides = row_strides(shape, q)
    copy_k, k_strides = row_strides((batches, keys, width), k)
    copies = (copy_q, copy_k, False, bias[1] != (1,))
    return IndexerProblem(
        batches=batches,
        queries=queries,
        keys=keys,
        heads=heads,
        width=width,
        causal=causal,
        # From the offset ``keys`` on a row sees every key: sums of positions stay below 2**31.
        offset=min(offset, keys),
        # The dtype of q and k is that of the products.
        dtype=q[0],
        device=device,
        copies=copies if any(copies) else (),
        strides=(*q_strides, *k_strides, *w[1]),
        constants=dict(D=width, CAUSAL=causal, UPCAST=interpreted(), PRECISION=precision),
    )


class ScoresPlan(NamedTuple):
    """One forward pass: its launch (none where there are no scores), which operands it copies
    first, and its output.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    scores: Allocator


def scores_forward(
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
            return scores_forward(q, k, w, bias, scale, causal, q_offset)
    operands = (q, k, w, bias)
    plan = scores_plan(
        q.shape,
        k.shape[1],
        layouts(*operands),
        causal,
        q_offset,
        input_precision(q.dtype),
        q.device,
    )
    scores = plan.scores()
    if plan.launch is not None:
        if plan.copies:
            operands = contiguous_where(operands, plan.copies)
        plan.launch((*operands, scores), (scale,))
    return scores


@functools.lru_cache(maxsize=4096)
def scores_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Layout | None, ...],
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
) -> ScoresPlan:
    """The plan for operands of these layouts: q, k, w and bias."""
    problem = indexer_problem(shape, keys, operands, causal, offset, precision, device)
    launch = None
    if problem.score_count:
        launch = plan_scores(problem, 0, problem.queries, problem.keys, fill=True)
    outputs = (problem.batches, problem.queries, problem.keys)
    return ScoresPlan(launch, problem.copies, allocator(outputs, torch.float32, device))


def plan_scores(
    problem: IndexerProblem, first_row: int, last_row: int, last_key: int, fill: bool
) -> Launch:
    """The launch for the rows from ``first_row``, a multiple of a tile's, to ``last_row``, into
    [B, rows, last_key].
    """
    config = problem.config(SCORES)
    row_tiles = cdiv(last_row - first_row, config.queries)
    key_tiles = cdiv(last_key, config.keys)
    return Launch(
        kernels.scores_kernel,
        grid_of(problem.batches * row_tiles * key_tiles),
        problem.device,
        (*problem.strides, *problem.sizes, first_row, last_row, last_key),
        dict(num_warps=config.num_warps, num_stages=config.num_stages),
        **problem.constants,
        FILL=fill,
        BLOCK_Q=config.queries,
        BLOCK_K=config.keys,
        BLOCK_D=block_width(problem.width),
    )


class GradientsPlan(NamedTuple):
    """One backward pass: its launches (none where there are no scores), which operands it copies
    first, and its outputs. ``dbias`` holds a partial sum of each program of the first launch.
    """

    dq_launch: Launch | None
    dk_launch: Launch | None
    copies: tuple[bool, ...]
    dq: Allocator
    dk: Allocator
    dw: Allocator
    dbias: Allocator


def scores_backward(
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
    """``(dq, dk, dw, dbias)``, contiguous, each in its operand's dtype or, where ``wide``, in
    fp32.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return scores_backward(dscores, q, k, w, bias, scale, causal, q_offset, wide)
    operands = (q, k, w, bias)
    plan = gradients_plan(
        q.shape,
        k.shape[1],
        layouts(*operands),
        layouts(dscores)[0],
        causal,
        q_offset,
        input_precision(q.dtype),
        q.device,
        wide,
    )
    dq, dk, dw, dbias = plan.dq(), plan.dk(), plan.dw(), plan.dbias()
    if plan.dq_launch is None or plan.dk_launch is None:
        for x in (dq, dk, dw):
            x.zero_()
        return dq, dk, dw, torch.zeros_like(bias)
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    plan.dq_launch((dscores, *operands, dq, dw, dbias), (scale,))
    plan.dk_launch((dscores, *operands, dk), (scale,))
    return dq, dk, dw, dbias.sum(0).to(torch.float32 if wide else bias.dtype)


@functools.lru_cache(maxsize=4096)
def gradients_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Layout | None, ...],
    dscores: Layout,
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
    wide: bool,
) -> GradientsPlan:
    """The plan for operands of these layouts: q, k, w and bias, and the scores' gradient."""
    problem = indexer_problem(shape, keys, operands, causal, offset, precision, device)
    batches, queries, heads, width = shape
    w_dtype = torch.float32 if wide else present(operands[2])[0]
    dtype = torch.float32 if wide else problem.dtype
    dq_config, dk_config = problem.config(SCORES_DQ), problem.config(SCORES_DK)
    row_tiles, key_tiles = cdiv(queries, dq_config.queries), cdiv(keys, dk_config.keys)
    dq_launch = dk_launch = None
    if problem.score_count:
        plan = functools.partial(plan_gradient, problem, dscores)
        programs = batches * heads * row_tiles
        dq_launch = plan(kernels_backward.scores_dq_kernel, dq_config, programs)
        dk_launch = plan(kernels_backward.scores_dk_kernel, dk_config, batches * key_tiles)
    return GradientsPlan(
        dq_launch,
        dk_launch,
        problem.copies,
        dq=allocator(shape, dtype, device),
        dk=allocator((batches, keys, width), dtype, device),
        dw=allocator((batches, queries, heads), w_dtype, device),
        dbias=allocator((batches * row_tiles, heads), torch.float32, device),
    )


def plan_gradient(
    problem: IndexerProblem, dscores: Layout, kernel: Any, config: TileConfig, programs: int
) -> Launch:
    """The launch of a kernel of the backward pass, one tile of its rows a program."""
    return Launch(
        kernel,
        grid_of(programs),
        problem.device,
        (*dscores[1], *problem.strides, *problem.sizes),
        dict(num_warps=config.num_warps),
        **problem.constants,
        BLOCK_Q=config.queries,
        BLOCK_K=config.keys,
        BLOCK_D=block_width(problem.width),
        NUM_STAGES=config.num_stages,
    )
