"""The launches of mixture_nll and mixture_log_likelihood, forward and backward: their
configurations and plans.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

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
from .._core.precision import power_of_2

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class ForwardConfig(NamedTuple):
    """One program computes ``block_rows`` mixtures, each in one thread of up to ``max_registers``,
    which holds all components or reads them again for each use.
    """

    max_components: float
    block_rows: int
    num_warps: int
    held: bool
    max_registers: int = 128


class MeanConfig(NamedTuple):
    """One program adds the partial sums of the mean, ``block`` at a time."""

    block: int
    num_warps: int


class BackwardConfig(NamedTuple):
    """One program transposes and multiplies the slopes of ``block_rows`` rows by up to
    ``block_cols`` parameters.
    """

    block_rows: int
    block_cols: int
    num_warps: int


# Read from the top: the first line whose ``max_components`` is not below K serves it. Source:
# results/tuning-h200-torch2.11-triton3.6.csv for mixtures of 10 components; unmeasured for others.
FORWARD = (
    ForwardConfig(max_components=16, block_rows=128, num_warps=4, held=True),
    ForwardConfig(max_components=float("inf"), block_rows=128, num_warps=4, held=False),
)
# The same source.
BACKWARD = BackwardConfig(block_rows=64, block_cols=32, num_warps=4)
# Unmeasured.
MEAN = MeanConfig(block=1024, num_warps=4)
# With the offsets of a tile below 2**31: no tile has more than 2**9 rows.
MAX_STRIDE = 2**21


class ForwardPlan(NamedTuple):
    """One forward pass: what it launches (nothing where there are no rows), which operands it
    copies first, and the memory of what it returns, then of the partial sums and their counts, None
    for what is absent. ``add_sums`` adds these for the mean.
    """

    launch: Launch | None
    add_sums: Launch | None
    copies: tuple[bool, ...]
    memory: tuple[Allocator | None, ...]


def mixture_forward(
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
    operands: tuple[torch.Tensor | None, ...] = (params, y, mask)
    plan = forward_plan(params.shape, layouts(*operands), softplus, mean, slopes, params.device)
    allocated: tuple = tuple([None if make is None else make() for make in plan.memory])
    value, params_slope, y_slope, factor, sums, counts = allocated
    if plan.launch is None:
        if factor is not None:
            value.zero_()
            factor.fill_(-1.0)
        return value, params_slope, y_slope, factor
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    log_p = None if mean else value
    plan.launch((*operands, log_p, params_slope, y_slope, sums, counts), (low, high, eps))
    if plan.add_sums is not None:
        plan.add_sums((sums, counts, value, factor))
    return value, params_slope, y_slope, factor


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    softplus: bool,
    mean: bool,
    slopes: bool,
    device: torch.device,
) -> ForwardPlan:
    """The plan for operands of these layouts: params, y and mask."""
    params, _, mask = operands
    assert params is not None
    *leading, components, _ = shape
    rows_shape = tuple(leading)
    rows = math.prod(leading)
    config = forward_config(components)
    programs = cdiv(rows, config.block_rows)
    strides = [row_stride(rows_shape, operand) for operand in operands]
    # The parameters of a row must be contiguous.
    if params[1][-1] != 1 or (components > 1 and params[1][-2] != 3):
        strides[0] = None
    copies = tuple(stride is None for stride in strides)
    params_stride, y_stride, mask_stride = (
        contiguous if stride is None else stride
        for stride, contiguous in zip(strides, (3 * components, 1, 1), strict=True)
    )
    launch = add_sums = None
    if rows:
        launch = Launch(
            kernels.mixture_forward_kernel,
            (programs,),
            device,
            (y_stride, mask_stride, rows),
            dict(num_warps=config.num_warps, maxnreg=config.max_registers),
            K=components,
            PARAMS_STRIDE=params_stride,
            SOFTPLUS=softplus,
            HELD=config.held,
            BLOCK_ROWS=config.block_rows,
        )
        if mean:
            add_sums = Launch(
                kernels.mean_kernel,
                (1,),
                device,
                (rows, programs),
                dict(num_warps=MEAN.num_warps),
                BLOCK=MEAN.block,
            )
    # Shapes and dtypes; None for what is absent.
    fp32 = torch.float32
    memory = (
        (() if mean else rows_shape, fp32),
        ((components, 3, *rows_shape), slope_dtype(params[0])) if slopes else None,
        (rows_shape, fp32) if slopes else None,
        ((), fp32) if mean else None,
        ((programs,), fp32) if mean else None,
        ((programs,), torch.int32) if mean and mask is not None else None,
    )
    return ForwardPlan(
        launch,
        add_sums,
        copies if any(copies) else (),
        tuple(None if each is None else allocator(*each, device) for each in memory),
    )


def mixture_backward(
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
    # A transform may pass saved tensors with strides of its own.
    operands = upstream, mask, factor, params_slope.contiguous(), y_slope.contiguous()
    plan = backward_plan(
        params_slope.shape,
        layouts(upstream, mask),
        factor is not None,
        params_dtype,
        y_dtype,
        y_grad,
        params_slope.device,
    )
    dparams, dy = plan.run(operands)
    return dparams, dy


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    mean: bool,
    params_dtype: torch.dtype,
    y_dtype: torch.dtype,
    y_grad: bool,
    device: torch.device,
) -> Plan:
    """The plan for slopes of this shape, and an upstream gradient and a mask of these layouts."""
    upstream, mask = operands
    components, _, *leading = shape
    rows_shape = tuple(leading)
    rows = math.prod(leading)
    cols = 3 * components
    block_cols = min(BACKWARD.block_cols, power_of_2(cols))
    # The upstream gradient of a mean is one number.
    strides = [0 if mean else row_stride(rows_shape, upstream), row_stride(rows_shape, mask)]
    # Behind these two the kernel takes what is contiguous.
    copies = (*(stride is None for stride in strides), False, False, False)
    upstream_stride, mask_stride = (1 if stride is None else stride for stride in strides)
    launch = None
    if rows:
        launch = Launch(
            kernels.mixture_backward_kernel,
            (cdiv(rows, BACKWARD.block_rows), cdiv(cols, block_cols)),
            device,
            (upstream_stride, mask_stride, rows),
            dict(num_warps=BACKWARD.num_warps),
            COLS=cols,
            BLOCK_ROWS=BACKWARD.block_rows,
            BLOCK_COLS=block_cols,
        )
    outputs = (
        allocator((*leading, components, 3), params_dtype, device),
        allocator(rows_shape, y_dtype, device) if y_grad else None,
    )
    return Plan(launch, copies if any(copies) else (), outputs)


def forward_config(components: int) -> ForwardConfig:
    """The launch of mixtures of this many components."""
    return next(config for config in FORWARD if components <= config.max_components)


def slope_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which slopes of parameters of ``dtype`` are saved for the backward pass: they
    pass fp16's range where the gradient of a mean does not.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def row_stride(shape: tuple[int, ...], layout: Layout | None) -> int | None:
    """The stride that takes the kernels from each row of an operand to the next, its leading axes
    being ``shape``; 0 for an operand that is absent, None where no one stride does.
    """
    if layout is None:
        return 0
    row: int | None = None
    length_below = 1
    for length, stride in reversed([*zip(shape, layout[1], strict=False)]):
        if length == 1:
            continue
        if row is None:
            row = stride
        elif stride != row * length_below:
            return None
        length_below *= length
    row = row or 0
    return row if row <= MAX_STRIDE else None
