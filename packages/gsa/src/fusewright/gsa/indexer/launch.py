"""The launches of gated_indexer, forward and backward: configurations and plans. The selection and
the loss launch the same kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from operator import call
from typing import TYPE_CHECKING, Any

import torch

from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    Plan,
    allocator,
    cdiv,
    contiguous_where,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import input_precision
from ..common.launches import (
    Shape,
    TileConfig,
    config_for,
    grid_of,
    row_strides,
    tile_constants,
)
from ..common.ranges import rows_seeing

if TYPE_CHECKING:
    from . import kernels, kernels_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")

Tensor = torch.Tensor
F32 = torch.float32

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


@dataclasses.dataclass(frozen=True, eq=False)
class IndexerProblem:
    """q [B, Tq, H, d] against k [B, Tkv, d] with w [B, Tq, H], the first row at ``offset``: sizes,
    which of q, k, w and bias are copied first, the strides of q, k and w, whether rows have ranges,
    and the form of the scores. Calls of one kind have one object, under which their plans are kept.
    """

    shape: Shape
    keys: int
    causal: bool
    offset: int
    # The dtype of q and k is that of the products.
    dtype: torch.dtype
    gate_dtype: torch.dtype
    precision: str
    device: torch.device
    copies: tuple[bool, ...]
    strides: tuple[int, ...]
    ranged: bool
    gated: bool

    @property
    def score_count(self) -> int:
        return self.shape[0] * self.shape[1] * self.keys

    def config(self, table: tuple[TileConfig, ...]) -> TileConfig:
        """The line of a table that serves this problem."""
        return config_for(table, self.shape[-1], self.dtype.itemsize, self.device)

    def launch(
        self,
        kernel: Any,
        config: TileConfig,
        programs: int,
        options: dict[str, int],
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
        fill: bool = False,
    ) -> Launch:
        """A kernel with these integers before and after those that all have."""
        _, queries, heads, width = self.shape
        return Launch(
            kernel,
            grid_of(programs),
            self.device,
            (*before, *self.strides, queries, self.keys, heads, self.offset, *after),
            options,
            CONFIG=tile_constants(width, self.causal, self.precision, config, fill, self.gated),
        )


@functools.lru_cache(maxsize=4096)
def indexer_problem(
    shape: Shape,
    keys: int,
    causal: bool,
    offset: int,
    operands: tuple[Layout, ...],
    precision: str,
    device: torch.device,
    ranged: bool = False,
    gated: bool = True,
) -> IndexerProblem:
    """The problem of queries of this shape; ``operands``: layouts of q, k, w and bias."""
    q, k, w, bias = operands
    copy_q, q_strides = row_strides(shape, q)
    copy_k, k_strides = row_strides((shape[0], keys, shape[-1]), k)
    # The ranges are contiguous.
    copies = (copy_q, copy_k, False, bias[1] != (1,), False)
    return IndexerProblem(
        shape,
        keys,
        causal,
        # From the offset ``keys`` on a row sees every key: sums of positions stay below 2**31.
        offset=min(offset, keys),
        dtype=q[0],
        gate_dtype=w[0],
        precision=precision,
        device=device,
        copies=copies if any(copies) else (),
        strides=(*q_strides, *k_strides, *w[1]),
        ranged=ranged,
        gated=gated,
    )


def problem_of(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    ranges: Tensor | None,
    causal: bool,
    q_offset: int,
    form: str,
) -> IndexerProblem:
    """The problem of these operands."""
    sizes = (q.shape, k.shape[1], causal, q_offset, layouts(q, k, w, bias))
    kind = (ranges is not None, form == "gated")
    return indexer_problem(*sizes, input_precision(q.dtype), q.device, *kind)


def scores_forward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    ranges: Tensor | None,
    scale: float,
    causal: bool,
    q_offset: int,
    form: str = "gated",
) -> Tensor:
    """The scores of every query and key, [B, Tq, Tkv] in fp32; -inf where a row sees no key."""
    problem = problem_of(q, k, w, bias, ranges, causal, q_offset, form)
    return scores_plan(problem).run((q, k, w, bias, ranges), (scale,))[0]


@functools.lru_cache(maxsize=4096)
def scores_plan(problem: IndexerProblem) -> Plan:
    """The plan of all scores."""
    batches, queries = problem.shape[:2]
    launch = (
        plan_scores(problem, 0, queries, problem.keys, fill=True) if problem.score_count else None
    )
    scores = allocator((batches, queries, problem.keys), F32, problem.device)
    return Plan(launch, problem.copies, (scores,))


def plan_scores(
    problem: IndexerProblem, first_row: int, last_row: int, last_key: int, fill: bool
) -> Launch:
    """The launch for the rows from ``first_row``, a multiple of a tile's, to ``last_row``, into
    [B, rows, last_key].
    """
    config = problem.config(SCORES)
    tiles = cdiv(last_row - first_row, config.queries) * cdiv(last_key, config.keys)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    part = (first_row, last_row, last_key)
    programs = problem.shape[0] * tiles
    return problem.launch(kernels.scores_kernel, config, programs, options, after=part, fill=fill)


def scores_backward(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    ranges: Tensor | None,
    scale: float,
    causal: bool,
    q_offset: int,
    form: str = "gated",
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dw, dbias)``, contiguous, each in its operand's dtype or, where ``wide``, in
    fp32.
    """
    operands: tuple[Tensor | None, ...] = (q, k, w, bias, ranges)
    problem = problem_of(q, k, w, bias, ranges, causal, q_offset, form)
    launches, memory = gradients_plan(problem, layouts(dscores)[0], wide)
    # dbias: the partial sums of the programs.
    dq, dk, dw, dbias = map(call, memory)
    if not launches:
        for x in (dq, dk, dw):
            x.zero_()
        return dq, dk, dw, torch.zeros_like(bias)
    if problem.copies:
        operands = contiguous_where(operands, problem.copies)
    launches[0]((dscores, *operands, dq, dw, dbias), (scale,))
    seeing = None
    if ranges is not None:
        seeing = rows_seeing(ranges, problem.keys, problem.config(SCORES_DK).keys)
    launches[1]((dscores, *operands, seeing, dk), (scale,))
    return dq, dk, dw, dbias.sum(0).to(F32 if wide else bias.dtype)


@functools.lru_cache(maxsize=4096)
def gradients_plan(
    problem: IndexerProblem, dscores: Layout, wide: bool
) -> tuple[tuple[Launch, ...], tuple[Allocator, ...]]:
    """The launches (none where there are no scores) and the memory of what they write; ``dscores``:
    the layout of the scores' gradient.
    """
    batches, queries, heads, width = problem.shape
    dtype, gate_dtype = (F32, F32) if wide else (problem.dtype, problem.gate_dtype)
    of_queries, of_keys = problem.config(SCORES_DQ), problem.config(SCORES_DK)
    row_tiles = batches * cdiv(queries, of_queries.queries)
    key_tiles = batches * cdiv(problem.keys, of_keys.keys)
    launches = tuple(
        problem.launch(
            kernel, config, programs, dict(num_warps=config.num_warps), before=dscores[1]
        )
        for kernel, config, programs in (
            (kernels_backward.scores_dq_kernel, of_queries, row_tiles * heads),
            (kernels_backward.scores_dk_kernel, of_keys, key_tiles),
        )
        if problem.score_count
    )
    shapes = (problem.shape, (batches, problem.keys, width), problem.shape[:3], (row_tiles, heads))
    dtypes = (dtype, dtype, gate_dtype, F32)
    memory = (allocator(*x, problem.device) for x in zip(shapes, dtypes, strict=True))
    return launches, tuple(memory)
