"""The backward pass of rms_norm, add_rms_norm, rms_norm_gated and layer_norm: plans its launches,
allocates and launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._rows import count_rows, to_copy, walk


class BackwardPlan(NamedTuple):
    """One backward pass: its launches, which operands it copies first, and its memory.

    Small rows and columns share one launch. Else ``rows`` computes dx, dgate and, where a row fits
    in registers, the shares of dweight and dbias too; for wide rows ``weight_parts`` does that.
    ``add_parts`` adds the shares. Without elements there is no launch.
    """

    launches: Launches | None
    copies: tuple[bool, ...]
    dx: Allocate
    dgate: Allocate | None
    dweight: Allocate | None
    dbias: Allocate | None


class Launches(NamedTuple):
    scheme: Literal["small", "rows", "wide"]
    rows: Launch
    weight_parts: Launch | None = None
    add_parts: Launch | None = None
    shares: Allocate | None = None


def launch_norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    weight_grad: bool,
    bias_grad: bool,
    gate: torch.Tensor | None = None,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a norm of the rows of ``x``.

    Args:
        dy: gradient of the normalised rows.
        dsum: gradient that reaches x by another way (the sum of add_rms_norm), added to dx.
        x: what was normalised.
        weight, bias: the factor and the summand, or None.
        mean, rstd: as the forward pass returned them.
        weight_offset: what the forward pass added to the weight.
        weight_grad, bias_grad: whether anybody wants these gradients.
        gate, activation: what the forward pass multiplied by, if anything.

    Returns:
        ``(dx, dgate, dweight, dbias)``, dx and dgate contiguous in x's shape and dtype.
    """
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_norm_backward(
                *(dy, dsum, x, weight, bias, mean, rstd),
                *(weight_offset, weight_grad, bias_grad, gate, activation),
            )
    operands = dy, dsum, x, gate, weight
    plan = backward_plan(
        x.shape,
        kinds(*operands, bias),
        mean is not None,
        weight_grad,
        bias_grad,
        activation,
        x.device,
    )
    dx = plan.dx()
    dgate = None if plan.dgate is None else plan.dgate()
    dweight = None if plan.dweight is None else plan.dweight()
    dbias = None if plan.dbias is None else plan.dbias()
    launches = plan.launches
    if launches is None:
        for grad in (dweight, dbias):
            if grad is not None:
                grad.zero_()
        return dx, dgate, dweight, dbias
    if plan.copies:
        operands = copied(operands, plan.copies)
    tensors = (*operands, mean, rstd, dx, dgate)
    if launches.scheme == "small":
        launches.rows((*tensors, dweight, dbias), (weight_offset,))
        return dx, dgate, dweight, dbias
    shares = None if launches.shares is None else launches.shares()
    launches.rows(tensors if launches.scheme == "wide" else (*tensors, shares), (weight_offset,))
    if launches.weight_parts is not None:
        launches.weight_parts((operands[0], operands[2], operands[3], mean, rstd, shares))
    if launches.add_parts is not None:
        launches.add_parts((shares, dweight, dbias))
    return dx, dgate, dweight, dbias


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    operands: tuple[Kind | None, ...],
    center: bool,
    weight_grad: bool,
    bias_grad: bool,
    activation: str,
    device: torch.device,
) -> BackwardPlan:
    """The plan for operands of these kinds: dy, dsum, x, gate, weight and bias."""
    *read, bias = operands
    _, _, x, gate, weight = read
    assert x is not None
    dweight, dbias = (
        memory(shape[-1:], vector[0], device) if wanted and vector is not None else None
        for vector, wanted in ((weight, weight_grad), (bias, bias_grad))
    )
    launches = None
    if math.prod(shape):
        launches = plan_launches(shape, read, center, weight_grad, bias_grad, activation, device)
    dx = memory(shape, x[0], device)
    dgate = None if gate is None else memory(shape, gate[0], device)
    return BackwardPlan(launches, to_copy(shape, *read), dx, dgate, dweight, dbias)


def plan_launches(
    shape: tuple[int, ...],
    operands: Sequence[Kind | None],
    center: bool,
    weight_grad: bool,
    bias_grad: bool,
    activation: str,
    device: torch.device,
) -> Launches:
    dy, dsum, x, gate, weight = operands
    assert dy is not None
    assert x is not None
    *_, cols = shape
    rows = count_rows(shape)
    dy_rows, x_rows, gate_rows = walk(shape, dy), walk(shape, x), walk(shape, gate)
    integers = (
        *dy_rows,
        *walk(shape, dsum),
        *x_rows,
        *gate_rows,
        rows,
    )
    constants = dict(
        cols=cols,
        CENTER=center,
        HAS_DSUM=dsum is not None,
        HAS_WEIGHT=weight is not None,
        ACTIVATION=activation,
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
            device,
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
        return Launches("small", launch)
    read = sum(operand is not None for operand in (dy, dsum, x, gate))
    config = backward_config(cols, itemsize, read, center, gate is not None, card.shared_bytes)
    scheme: Literal["rows", "wide"] = "wide" if config is None else "rows"
    weight_parts = None
    if config is None:
        parts = min(triton.cdiv(rows, BACKWARD_WIDE.block_rows), BACKWARD_WIDE.parts)
        launch_rows = Launch(
            _norm_backward_wide_kernel,
            (rows,),
            device,
            integers,
            options | dict(num_warps=BACKWARD_WIDE.num_warps),
            **constants,
            BLOCK_COLS=BACKWARD_WIDE.block_cols,
        )
        weight_parts = Launch(
            _weight_parts_kernel,
            (parts, triton.cdiv(cols, BACKWARD_WIDE.part_cols)),
            device,
            (*dy_rows, *x_rows, *gate_rows, rows),
            # A third operand beside the sums would spill with four.
            dict(num_warps=4 if gate is None else 8),
            cols=cols,
            CENTER=center,
            **wanted,
            ACTIVATION=activation,
            BLOCK_ROWS=BACKWARD_WIDE.block_rows,
            BLOCK_COLS=BACKWARD_WIDE.part_cols,
        )
    else:
        blocks = triton.cdiv(rows, config.block_rows)
        parts = min(blocks, config.programs_per_sm * card.multiprocessors)
        launch_rows = Launch(
            _norm_backward_kernel,
            (parts,),
            device,
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
        return Launches(scheme, launch_rows)
    add_parts = Launch(
        _add_parts_kernel,
        (triton.cdiv(cols, ADD_PARTS.block_cols),),
        device,
        (parts,),
        dict(num_warps=ADD_PARTS.num_warps),
        cols=cols,
        **wanted,
        BLOCK_PARTS=ADD_PARTS.block_parts,
        BLOCK_COLS=ADD_PARTS.block_cols,
    )
    shares = memory((2, parts, cols), torch.float32, device)
    return Launches(scheme, launch_rows, weight_parts, add_parts, shares)
