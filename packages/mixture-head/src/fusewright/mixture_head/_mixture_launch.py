"""The launches of mixture_nll and mixture_log_likelihood: plans, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._configs import BACKWARD, FINISH, mixture_config, power_of_2
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, made, memory
from ._mixture_kernels import _mean_kernel, _mixture_backward_kernel, _mixture_kernel
from ._rows import row_stride
from .reference import slope_dtype


class MixturePlan(NamedTuple):
    """One forward pass: what it launches (nothing where there are no rows), which operands it
    copies first, and its memory. ``finish`` and what it reads and writes stand for the mean alone.
    """

    launch: Launch | None
    finish: Launch | None
    copies: tuple[bool, ...]
    log_p: Allocate
    params_slope: Allocate | None
    y_slope: Allocate | None
    factor: Allocate | None
    sums: Allocate | None
    counts: Allocate | None


class BackwardPlan(NamedTuple):
    """One backward pass: its launch (nothing where there are no rows), which of upstream gradient
    and mask it copies first, and its memory.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    dparams: Allocate
    dy: Allocate | None


def launch_mixture(
    params: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor | None,
    softplus: bool,
    low: float,
    high: float,
    eps: float,
    mean: bool,
    slopes: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """log p(y) of every row of ``params``, or minus its mean.

    Returns:
        ``(value, params_slope, y_slope, factor)``: the value fp32, one number a row or one alone;
        the slopes d log p / d params, ``[K, 3, ...]``, and d log p / d y, None without ``slopes``;
        and what the gradient of a mean multiplies them with, None without ``mean``.
    """
    if not is_current(params.device):
        with torch.cuda.device(params.device):
            return launch_mixture(params, y, mask, softplus, low, high, eps, mean, slopes)
    operands: tuple[torch.Tensor | None, ...] = (params, y, mask)
    plan = mixture_plan(params.shape, kinds(*operands), softplus, mean, slopes, params.device)
    value = plan.log_p()
    params_slope = made(plan.params_slope)
    y_slope = made(plan.y_slope)
    factor = made(plan.factor)
    if plan.launch is None:
        if factor is not None:
            value.zero_()
            factor.fill_(-1.0)
        return value, params_slope, y_slope, factor
    if plan.copies:
        operands = copied(operands, plan.copies)
    sums = made(plan.sums)
    counts = made(plan.counts)
    log_p = None if mean else value
    plan.launch((*operands, log_p, params_slope, y_slope, sums, counts), (low, high, eps))
    if plan.finish is not None:
        plan.finish((sums, counts, value, factor))
    return value, params_slope, y_slope, factor


@functools.lru_cache(maxsize=4096)
def mixture_plan(
    shape: tuple[int, ...],
    operands: tuple[Kind | None, ...],
    softplus: bool,
    mean: bool,
    slopes: bool,
    device: torch.device,
) -> MixturePlan:
    """The plan for operands of these kinds: params, y and mask."""
    params, _, mask = operands
    assert params is not None
    *leading, components, _ = shape
    rows_shape = tuple(leading)
    rows = math.prod(leading)
    config = mixture_config(components)
    programs = triton.cdiv(rows, config.block_rows)
    strides = [row_stride(rows_shape, operand) for operand in operands]
    # The parameters of a row must lie one after the other.
    if params[1][-1] != 1 or (components > 1 and params[1][-2] != 3):
        strides[0] = None
    copies = tuple(stride is None for stride in strides)
    params_stride, y_stride, mask_stride = (
        contiguous if stride is None else stride
        for stride, contiguous in zip(strides, (3 * components, 1, 1), strict=True)
    )
    launch = finish = None
    if rows:
        launch = Launch(
            _mixture_kernel,
            (programs,),
            device,
            (y_stride, mask_stride, rows),
            dict(num_warps=config.num_warps, maxnreg=config.max_registers),
            K=components,
            PARAMS_STRIDE=params_stride,
            SOFTPLUS=softplus,
            HAS_MASK=mask is not None,
            MEAN=mean,
            SLOPES=slopes,
            HELD=config.held,
            BLOCK_ROWS=config.block_rows,
        )
        if mean:
            finish = Launch(
                _mean_kernel,
                (1,),
                device,
                (rows, programs),
                dict(num_warps=FINISH.num_warps),
                HAS_MASK=mask is not None,
                BLOCK=FINISH.block,
            )
    fp32 = torch.float32
    return MixturePlan(
        launch,
        finish,
        copies if any(copies) else (),
        log_p=memory(() if mean else rows_shape, fp32, device),
        params_slope=memory((components, 3, *rows_shape), slope_dtype(params[0]), device)
        if slopes
        else None,
        y_slope=memory(rows_shape, fp32, device) if slopes else None,
        factor=memory((), fp32, device) if mean else None,
        sums=memory((programs,), fp32, device) if mean else None,
        counts=memory((programs,), torch.int32, device) if mean and mask is not None else None,
    )


def launch_mixture_backward(
    upstream: torch.Tensor,
    factor: torch.Tensor | None,
    mask: torch.Tensor | None,
    params_slope: torch.Tensor,
    y_slope: torch.Tensor,
    params_dtype: torch.dtype,
    y_dtype: torch.dtype,
    y_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(dparams, dy)``: the slopes times the upstream gradient, each in its dtype, and zeros where
    mask is False; dy is None unless ``y_grad``.
    """
    device = params_slope.device
    if not is_current(device):
        with torch.cuda.device(device):
            return launch_mixture_backward(
                upstream, factor, mask, params_slope, y_slope, params_dtype, y_dtype, y_grad
            )
    operands: tuple[torch.Tensor | None, ...] = (upstream, mask)
    plan = backward_plan(
        params_slope.shape,
        kinds(*operands),
        factor is not None,
        params_dtype,
        y_dtype,
        y_grad,
        device,
    )
    dparams = plan.dparams()
    dy = made(plan.dy)
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        # A transform may hand over saved tensors with strides of its own.
        slopes = params_slope.contiguous(), y_slope.contiguous()
        plan.launch((*operands, factor, *slopes, dparams, dy))
    return dparams, dy


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    operands: tuple[Kind | None, ...],
    mean: bool,
    params_dtype: torch.dtype,
    y_dtype: torch.dtype,
    y_grad: bool,
    device: torch.device,
) -> BackwardPlan:
    """The plan for slopes of this shape, and an upstream gradient and a mask of these kinds."""
    upstream, mask = operands
    components, _, *leading = shape
    rows_shape = tuple(leading)
    rows = math.prod(leading)
    cols = 3 * components
    block_cols = min(BACKWARD.block_cols, power_of_2(cols))
    # The upstream gradient of a mean is one number.
    strides = [0 if mean else row_stride(rows_shape, upstream), row_stride(rows_shape, mask)]
    copies = tuple(stride is None for stride in strides)
    upstream_stride, mask_stride = (1 if stride is None else stride for stride in strides)
    launch = None
    if rows:
        launch = Launch(
            _mixture_backward_kernel,
            (triton.cdiv(rows, BACKWARD.block_rows), triton.cdiv(cols, block_cols)),
            device,
            (upstream_stride, mask_stride, rows),
            dict(num_warps=BACKWARD.num_warps),
            COLS=cols,
            HAS_MASK=mask is not None,
            MEAN=mean,
            HAS_DY=y_grad,
            BLOCK_ROWS=BACKWARD.block_rows,
            BLOCK_COLS=block_cols,
        )
    return BackwardPlan(
        launch,
        copies if any(copies) else (),
        dparams=memory((*leading, components, 3), params_dtype, device),
        dy=memory(rows_shape, y_dtype, device) if y_grad else None,
    )
