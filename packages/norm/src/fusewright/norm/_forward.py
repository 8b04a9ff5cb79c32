"""The forward pass of rms_norm, add_rms_norm, rms_norm_gated and layer_norm: plans its launch,
allocates and launches.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._configs import EVICT_ELEMENTS, FORWARD_WIDE, forward_config, power_of_2
from ._forward_kernels import _norm_forward_kernel, _norm_forward_wide_kernel
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._rows import count_rows, to_copy, walk


class ForwardPlan(NamedTuple):
    """One forward pass: what it launches (nothing where there are no elements), which operands it
    copies first, and the memory of its outputs.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    y: Allocate
    total: Allocate | None
    mean: Allocate | None
    rstd: Allocate | None


def launch_norm_forward(
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
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_norm_forward(
                *(x, residual, weight, bias, eps, weight_offset, center, statistics, dtype),
                *(gate, activation),
            )
    operands = x, residual, gate, weight, bias
    plan = forward_plan(
        x.shape, kinds(*operands), dtype or x.dtype, center, statistics, activation, x.device
    )
    y = plan.y()
    total = None if plan.total is None else plan.total()
    mean = None if plan.mean is None else plan.mean()
    rstd = None if plan.rstd is None else plan.rstd()
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        plan.launch((*operands, y, total, mean, rstd), (eps, weight_offset))
    else:
        # Rows without columns have nothing to average.
        for statistic in (mean, rstd):
            if statistic is not None:
                statistic.fill_(math.nan)
    return y, total, mean, rstd


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    operands: tuple[Kind | None, ...],
    dtype: torch.dtype,
    center: bool,
    statistics: bool,
    activation: str,
    device: torch.device,
) -> ForwardPlan:
    """The plan for operands of these kinds: x, residual, gate, weight and bias."""
    x, residual, *_ = operands
    assert x is not None
    statistic = memory(shape[:-1], torch.float32, device) if statistics else None
    return ForwardPlan(
        plan_launch(shape, operands, center, statistics, activation, device)
        if math.prod(shape)
        else None,
        to_copy(shape, *operands),
        y=memory(shape, dtype, device),
        total=None if residual is None else memory(shape, x[0], device),
        mean=statistic if center else None,
        rstd=statistic,
    )


def plan_launch(
    shape: tuple[int, ...],
    operands: tuple[Kind | None, ...],
    center: bool,
    statistics: bool,
    activation: str,
    device: torch.device,
) -> Launch:
    x, residual, gate, weight, bias = operands
    *_, cols = shape
    rows = count_rows(shape)
    integers = (
        *walk(shape, x),
        *walk(shape, residual),
        *walk(shape, gate),
        rows,
    )
    constants = dict(
        cols=cols,
        CENTER=center,
        STATISTICS=statistics,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
    )
    config = forward_config(cols, residual is not None or gate is not None, center)
    if config is None:
        return Launch(
            _norm_forward_wide_kernel,
            (rows,),
            device,
            integers,
            dict(num_warps=FORWARD_WIDE.num_warps),
            **constants,
            BLOCK_COLS=FORWARD_WIDE.block_cols,
        )
    return Launch(
        _norm_forward_kernel,
        (triton.cdiv(rows, config.block_rows),),
        device,
        integers,
        dict(num_warps=config.num_warps),
        **constants,
        EVEN_ROWS=rows % config.block_rows == 0,
        INPUT_EVICTION="evict_first" if not center and rows * cols <= EVICT_ELEMENTS else "",
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLS=power_of_2(cols),
    )
