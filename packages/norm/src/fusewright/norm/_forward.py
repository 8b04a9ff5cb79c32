"""The forward pass of rms_norm, add_rms_norm and layer_norm: plans its launch, allocates and
launches.
"""

from __future__ import annotations

import functools
import math

import torch
import triton

from ._configs import FORWARD_WIDE, forward_config, power_of_2
from ._forward_kernels import _norm_forward_kernel, _norm_forward_wide_kernel
from ._launch import Launch, contiguous, empty_rows, kinds, readable, walk


def launch_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    *,
    center: bool,
    statistics: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Normalise the rows of ``x``, or of ``x + residual``.

    Returns:
        ``(y, sum, mean, rstd)``: y and sum contiguous in x's shape and dtype (y in ``dtype`` where
        given), mean and rstd fp32 in the shape of the leading axes. sum is None without a residual,
        mean unless ``center``, and both mean and rstd without ``statistics``.
    """
    shape, device = x.shape, x.device
    y = empty_rows(x, dtype)
    total = None if residual is None else empty_rows(x)
    rstd = x.new_empty(shape[:-1], dtype=torch.float32) if statistics else None
    mean = torch.empty_like(rstd) if rstd is not None and center else None
    if y.numel() == 0:
        # Rows without columns have nothing to average.
        for statistic in (mean, rstd):
            if statistic is not None:
                statistic.fill_(math.nan)
        return y, total, mean, rstd

    x = readable(x)
    residual = None if residual is None else readable(residual)
    weight, bias = contiguous(weight), contiguous(bias)
    launch = forward_plan(
        shape, kinds(x, residual, weight, bias), y.dtype, center, statistics, device
    )
    launch(device, (x, residual, weight, bias, y, total, mean, rstd), (eps, weight_offset))
    return y, total, mean, rstd


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    inputs: tuple,
    dtype: torch.dtype,
    center: bool,
    statistics: bool,
    device: torch.device,
) -> Launch:
    """The launch that serves inputs of these kinds: x, residual, weight and bias, each (dtype,
    strides) or None.
    """
    x, residual, weight, bias = inputs
    *_, cols = shape
    rows = math.prod(shape) // cols
    integers = (
        *walk(shape, x),
        *walk(shape, residual),
        rows,
    )
    constants = dict(
        cols=cols,
        CENTER=center,
        STATISTICS=statistics,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
    )
    config = forward_config(cols)
    if config is None:
        return Launch(
            _norm_forward_wide_kernel,
            (rows,),
            integers,
            dict(num_warps=FORWARD_WIDE.num_warps),
            **constants,
            BLOCK_COLS=FORWARD_WIDE.block_cols,
        )
    return Launch(
        _norm_forward_kernel,
        (triton.cdiv(rows, config.block_rows),),
        integers,
        dict(num_warps=config.num_warps),
        **constants,
        EVEN_ROWS=rows % config.block_rows == 0,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLS=power_of_2(cols),
    )
