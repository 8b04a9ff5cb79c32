"""The launch of the forward pass of all norms of rows: its configurations and its plan."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Launch, Layout, Plan, allocator, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from .._core.rows import read_strides, to_copy
from ..common.rows import count_rows

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class ForwardConfig(NamedTuple):
    """One program holds ``block_rows`` whole rows in registers."""

    max_cols: int
    block_rows: int
    num_warps: int


class ForwardWideConfig(NamedTuple):
    """Rows too wide for registers are read in blocks of ``block_cols`` columns."""

    block_cols: int
    num_warps: int


# Each table is read from the top: the first line whose ``max_cols`` is not below the row's width
# serves it. Source: results/tuning-h200-torch2.11-triton3.6.csv for rows of 512 to 16384 columns;
# unmeasured for narrower and for wider rows.
FORWARD_NARROW = (
    ForwardConfig(max_cols=64, block_rows=32, num_warps=4),
    ForwardConfig(max_cols=256, block_rows=8, num_warps=4),
    ForwardConfig(max_cols=512, block_rows=2, num_warps=1),
    ForwardConfig(max_cols=2048, block_rows=1, num_warps=4),
)
FORWARD = (
    *FORWARD_NARROW,
    ForwardConfig(max_cols=8192, block_rows=1, num_warps=8),
    ForwardConfig(max_cols=16384, block_rows=1, num_warps=16),
)
# rms_norm_gated reads two tensors as well and takes these lines, unmeasured.
FORWARD_ADD = (*FORWARD_NARROW, ForwardConfig(max_cols=16384, block_rows=1, num_warps=16))
FORWARD_LAYER = (*FORWARD_NARROW, ForwardConfig(max_cols=16384, block_rows=1, num_warps=8))
# Up to this many elements, rows that were read are evicted from the cache before written ones.
EVICT_ELEMENTS = 1 << 22
FORWARD_WIDE = ForwardWideConfig(block_cols=8192, num_warps=16)


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    center: bool,
    statistics: bool = True,
    dtype: torch.dtype | None = None,
    gate: torch.Tensor | None = None,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Normalise the rows of ``x``, or of ``x + residual``, and multiply by the activation of a
    gate, where there is one.

    Returns:
        ``(y, sum, mean, rstd)``: y and sum contiguous in x's shape and dtype (y in ``dtype`` where
        given), mean and rstd fp32 in the shape of the leading axes. sum is None without a residual,
        mean unless ``center``, and both mean and rstd without ``statistics``.
    """
    operands = x, residual, gate, weight, bias
    plan = forward_plan(
        x.shape, layouts(*operands), dtype or x.dtype, center, statistics, activation, x.device
    )
    outputs = plan.run(operands, (eps, weight_offset))
    if plan.launch is None:
        # Rows without columns have nothing to average.
        for statistic in outputs[2:]:
            if statistic is not None:
                statistic.fill_(math.nan)
    return outputs


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    dtype: torch.dtype,
    center: bool,
    statistics: bool,
    activation: str,
    device: torch.device,
) -> Plan:
    """The plan for operands of these layouts: x, residual, gate, weight and bias."""
    x, residual, *_ = operands
    assert x is not None
    statistic = allocator(shape[:-1], torch.float32, device) if statistics else None
    outputs = (
        allocator(shape, dtype, device),
        None if residual is None else allocator(shape, x[0], device),
        statistic if center else None,
        statistic,
    )
    launch = plan_launch(shape, operands, center, activation, device) if math.prod(shape) else None
    return Plan(launch, to_copy(shape, *operands), outputs)


def plan_launch(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    center: bool,
    activation: str,
    device: torch.device,
) -> Launch:
    x, residual, gate, *_ = operands
    *_, cols = shape
    rows = count_rows(shape)
    strides = [stride for each in (x, residual, gate) for stride in read_strides(shape, each)]
    constants = dict(cols=cols, CENTER=center, ACTIVATION=activation)
    config = forward_config(cols, residual is not None or gate is not None, center)
    if config is None:
        return Launch(
            kernels.norm_forward_wide_kernel,
            (rows,),
            device,
            (*strides, rows),
            dict(num_warps=FORWARD_WIDE.num_warps),
            **constants,
            BLOCK_COLS=FORWARD_WIDE.block_cols,
        )
    return Launch(
        kernels.norm_forward_kernel,
        (cdiv(rows, config.block_rows),),
        device,
        (*strides, rows),
        dict(num_warps=config.num_warps),
        **constants,
        EVEN_ROWS=rows % config.block_rows == 0,
        EVICTION="evict_first" if not center and rows * cols <= EVICT_ELEMENTS else "",
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLS=power_of_2(cols),
    )


def forward_config(cols: int, residual: bool, center: bool) -> ForwardConfig | None:
    """The launch of a row of ``cols`` columns; None where it does not fit in registers."""
    table = FORWARD_ADD if residual else FORWARD_LAYER if center else FORWARD
    return next((config for config in table if cols <= config.max_cols), None)
