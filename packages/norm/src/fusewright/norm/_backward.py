"""The backward pass of rms_norm, add_rms_norm and layer_norm: plans its launches, allocates and
launches.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import torch
import triton

from ._backends import card_of
from ._backward_kernels import (
    _add_parts_kernel,
    _norm_backward_kernel,
    _norm_backward_small_kernel,
)
from ._backward_wide_kernels import _norm_backward_wide_kernel, _weight_parts_kernel
from ._configs import (
    ADD_PARTS,
    BACKWARD_SMALL,
    BACKWARD_WIDE,
    backward_config,
    fits_small,
    power_of_2,
)
from ._launch import Launch, contiguous, empty_rows, kinds, readable, walk


class BackwardPlan(NamedTuple):
    """The launches of one backward pass.

    Small rows and columns share one launch. Else ``rows`` computes dx and, where a row fits in
    registers, the shares of dweight and dbias too; for wide rows ``weight_parts`` does that.
    ``add_parts`` adds the shares, of this shape.
    """

    scheme: Literal["small", "rows", "wide"]
    rows: Launch
    weight_parts: Launch | None = None
    add_parts: Launch | None = None
    shares: tuple[int, int, int] = (0, 0, 0)


def launch_norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    *,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a norm of the rows of ``x``.

    Args:
        dy: gradient of the normalised rows.
        dsum: gradient that reaches x by another way (the sum of add_rms_norm), added to dx.
        x: what was normalised.
        weight, bias: the factor and the summand, or None.
        mean, rstd: as the forward pass returned them.
        weight_offset: what the forward pass added to the weight.
        weight_grad, bias_grad: whether anybody wants these gradients.

    Returns:
        ``(dx, dweight, dbias)``, dx contiguous in x's shape and dtype.
    """
    shape, device = x.shape, x.device
    dx = empty_rows(x)
    dweight = None if weight is None or not weight_grad else empty_rows(weight)
    dbias = None if bias is None or not bias_grad else empty_rows(bias)
    if dx.numel() == 0:
        for grad in (dweight, dbias):
            if grad is not None:
                grad.zero_()
        return dx, dweight, dbias

    dy, x = readable(dy), readable(x)
    dsum = None if dsum is None else readable(dsum)
    weight = contiguous(weight)
    plan = backward_plan(
        shape, kinds(dy, dsum, x, weight, bias), mean is not None, weight_grad, bias_grad, device
    )
    tensors = (dy, dsum, x, weight, mean, rstd, dx)
    if plan.scheme == "small":
        plan.rows(device, (*tensors, dweight, dbias), (weight_offset,))
        return dx, dweight, dbias
    shares = None
    if plan.add_parts is not None:
        shares = x.new_empty(plan.shares, dtype=torch.float32)
    plan.rows(device, tensors if plan.scheme == "wide" else (*tensors, shares), (weight_offset,))
    if plan.weight_parts is not None:
        plan.weight_parts(device, (dy, x, mean, rstd, shares))
    if plan.add_parts is not None:
        plan.add_parts(device, (shares, dweight, dbias))
    return dx, dweight, dbias


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    inputs: tuple,
    center: bool,
    weight_grad: bool,
    bias_grad: bool,
    device: torch.device,
) -> BackwardPlan:
    """The launches that serve inputs of these kinds: dy, dsum, x, weight and bias, each (dtype,
    strides) or None.
    """
    dy, dsum, x, weight, _ = inputs
    *_, cols = shape
    rows = math.prod(shape) // cols
    dy_rows, x_rows = walk(shape, dy), walk(shape, x)
    integers = (
        *dy_rows,
        *walk(shape, dsum),
        *x_rows,
        rows,
    )
    constants = dict(
        cols=cols, CENTER=center, HAS_DSUM=dsum is not None, HAS_WEIGHT=weight is not None
    )
    wanted = dict(WEIGHT_GRAD=weight_grad, BIAS_GRAD=bias_grad)
    card = card_of(device)
    itemsize = max(x[0].itemsize, dy[0].itemsize)
    # A row of one column centres to zero, and so must its gradient: fused multiply-adds would leave
    # a rounding error there.
    options = dict(enable_fp_fusion=not center)
    if (weight_grad or bias_grad) and fits_small(rows, cols):
        block_rows = max(1, BACKWARD_SMALL.tile_elements // power_of_2(cols))
        column_programs = triton.cdiv(cols, BACKWARD_SMALL.part_cols)
        launch = Launch(
            _norm_backward_small_kernel,
            (column_programs + triton.cdiv(rows, block_rows),),
            integers,
            options | dict(num_warps=BACKWARD_SMALL.num_warps),
            **constants,
            **wanted,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=power_of_2(cols),
            # Several rounds of adding keep the error of the sum over the rows low.
            PART_ROWS=max(1, min(BACKWARD_SMALL.part_rows, power_of_2(rows) // 4)),
            PART_COLS=BACKWARD_SMALL.part_cols,
        )
        return BackwardPlan("small", launch)
    config = backward_config(cols, itemsize, 2 if dsum is None else 3, center, card.shared_bytes)
    scheme: Literal["rows", "wide"] = "wide" if config is None else "rows"
    weight_parts = None
    if config is None:
        parts = min(triton.cdiv(rows, BACKWARD_WIDE.block_rows), BACKWARD_WIDE.parts)
        launch_rows = Launch(
            _norm_backward_wide_kernel,
            (rows,),
            integers,
            options | dict(num_warps=BACKWARD_WIDE.num_warps),
            **constants,
            BLOCK_COLS=BACKWARD_WIDE.block_cols,
        )
        weight_parts = Launch(
            _weight_parts_kernel,
            (parts, triton.cdiv(cols, BACKWARD_WIDE.part_cols)),
            (*dy_rows, *x_rows, rows),
            dict(num_warps=4),
            cols=cols,
            CENTER=center,
            **wanted,
            BLOCK_ROWS=BACKWARD_WIDE.block_rows,
            BLOCK_COLS=BACKWARD_WIDE.part_cols,
        )
    else:
        blocks = triton.cdiv(rows, config.block_rows)
        parts = min(blocks, config.programs_per_sm * card.multiprocessors)
        launch_rows = Launch(
            _norm_backward_kernel,
            (parts,),
            integers,
            options | dict(num_warps=config.num_warps),
            **constants,
            **wanted,
            EVEN_ROWS=rows % config.block_rows == 0,
            BLOCK_ROWS=config.block_rows,
            BLOCK_COLS=power_of_2(cols),
            NUM_STAGES=config.num_stages,
            READ_AGAIN=config.read_again,
        )
    if not (weight_grad or bias_grad):
        return BackwardPlan(scheme, launch_rows)
    add_parts = Launch(
        _add_parts_kernel,
        (triton.cdiv(cols, ADD_PARTS.block_cols),),
        (parts,),
        dict(num_warps=ADD_PARTS.num_warps),
        cols=cols,
        **wanted,
        BLOCK_PARTS=ADD_PARTS.block_parts,
        BLOCK_COLS=ADD_PARTS.block_cols,
    )
    return BackwardPlan(scheme, launch_rows, weight_parts, add_parts, (2, parts, cols))
