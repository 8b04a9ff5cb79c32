"""The launches of the backward pass of all norms of rows: their configurations and their plan."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocator,
    cdiv,
    contiguous_where,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from .._core.rows import read_strides, to_copy
from ..common.rows import count_rows

if TYPE_CHECKING:
    from . import kernels_backward, kernels_backward_wide
else:
    kernels_backward = lazy_module(__package__, "kernels_backward")
    kernels_backward_wide = lazy_module(__package__, "kernels_backward_wide")


class BackwardConfig(NamedTuple):
    """``programs_per_sm`` programs stay on each multiprocessor and loop over blocks of
    ``block_rows`` rows.

    With ``read_again`` they load the row a second time after its reduction instead of keeping it
    in registers. What of ``num_stages`` does not fit in a GPU's shared memory is left out.
    """

    max_cols: int
    block_rows: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    read_again: bool = False


class BackwardSmallConfig(NamedTuple):
    """Up to ``max_elements`` and ``max_rows`` of ``max_cols``, one launch serves: programs of
    ``tile_elements`` (whole rows) compute dx, others, ``part_rows`` by ``part_cols`` at a time,
    dweight and dbias.
    """

    max_elements: int
    max_rows: int
    max_cols: int
    tile_elements: int
    part_rows: int
    part_cols: int
    num_warps: int


class BackwardWideConfig(NamedTuple):
    """dx as in the forward pass; dweight in ``parts`` partial sums, by tiles of ``block_rows`` and
    ``part_cols``.
    """

    block_cols: int
    num_warps: int
    parts: int
    block_rows: int
    part_cols: int


class AddPartsConfig(NamedTuple):
    """One program adds ``block_cols`` columns, ``block_parts`` partial sums at a time."""

    block_parts: int
    block_cols: int
    num_warps: int


# Each table is read from the top: the first line whose ``max_cols`` is not below the row's width
# serves it. Source: results/tuning-h200-torch2.11-triton3.6.csv for rows of 512 to 16384 columns
# and for the small backward pass; unmeasured for narrower and for wider rows.
BACKWARD = (
    BackwardConfig(max_cols=64, block_rows=32, num_warps=4, num_stages=2, programs_per_sm=2),
    BackwardConfig(max_cols=256, block_rows=16, num_warps=4, num_stages=3, programs_per_sm=2),
    BackwardConfig(max_cols=512, block_rows=4, num_warps=4, num_stages=4, programs_per_sm=2),
    BackwardConfig(max_cols=1024, block_rows=4, num_warps=4, num_stages=3, programs_per_sm=2),
    BackwardConfig(max_cols=2048, block_rows=4, num_warps=8, num_stages=3, programs_per_sm=1),
    BackwardConfig(max_cols=4096, block_rows=2, num_warps=8, num_stages=3, programs_per_sm=1),
    BackwardConfig(max_cols=8192, block_rows=1, num_warps=8, num_stages=3, programs_per_sm=1),
    BackwardConfig(
        max_cols=16384,
        block_rows=1,
        num_warps=32,
        num_stages=1,
        programs_per_sm=1,
        read_again=True,
    ),
)
BACKWARD_SMALL = BackwardSmallConfig(
    max_elements=1 << 20,
    max_rows=2048,
    max_cols=2048,
    tile_elements=8192,
    part_rows=256,
    part_cols=8,
    num_warps=8,
)
BACKWARD_WIDE = BackwardWideConfig(
    block_cols=4096, num_warps=8, parts=32, block_rows=8, part_cols=512
)
# What the reductions of a program may take of the shared memory beside its stages.
REDUCTION_BYTES = 2048

ADD_PARTS = AddPartsConfig(block_parts=128, block_cols=8, num_warps=8)


class BackwardPlan(NamedTuple):
    """One backward pass: which operands it copies first, the memory of dx, dgate, dweight, dbias
    and y, and its launches, none without elements.

    Small rows and columns share one launch. Else ``rows`` computes dx, dgate and, where a row fits
    in registers, the partial sums of dweight and dbias too; for wide rows ``weight_parts`` does
    that. ``add_parts`` adds the partial sums.
    """

    copies: tuple[bool, ...]
    outputs: tuple[Allocator | None, ...]
    scheme: Literal["small", "rows", "wide"] = "small"
    rows: Launch | None = None
    weight_parts: Launch | None = None
    add_parts: Launch | None = None
    partial_sums: Allocator | None = None


def norm_backward(
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
    y_dtype: torch.dtype | None = None,
) -> tuple[
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Gradients of a norm of the rows of ``x``.

    Args:
        dy: gradient of the normalised rows.
        dsum: gradient that reaches x by another path (the sum that was normalised), added to dx.
        x: what was normalised.
        weight, bias: the factor and the summand, or None.
        mean, rstd: as the forward pass returned them.
        weight_offset: what the forward pass added to the weight.
        weight_grad, bias_grad: whether these gradients are needed.
        gate, activation: what the forward pass multiplied by, if anything.
        y_dtype: of the normalised rows, which are then computed again; not where there is a gate.

    Returns:
        ``(dx, dgate, dweight, dbias, y)``, dx and dgate contiguous in x's shape and dtype, y
        contiguous in its shape, or None.
    """
    of_y = None if y_dtype is None else bias
    operands = dy, dsum, x, gate, weight, of_y
    plan = backward_plan(
        x.shape,
        layouts(*operands, bias),
        mean is not None,
        weight_grad,
        bias_grad,
        activation,
        y_dtype,
        x.device,
    )
    outputs: tuple = tuple([None if make is None else make() for make in plan.outputs])
    dx, dgate, dweight, dbias, y = outputs
    if plan.rows is None:
        for grad in (dweight, dbias):
            if grad is not None:
                grad.zero_()
        return outputs
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    tensors: tuple = (*operands, mean, rstd, dx, dgate, y)
    sums = plan.partial_sums and plan.partial_sums()
    if plan.scheme == "small":
        tensors += dweight, dbias
    elif plan.scheme == "rows":
        tensors += (sums,)
    plan.rows(tensors, (weight_offset,))
    if plan.weight_parts is not None:
        plan.weight_parts((operands[0], operands[2], operands[3], mean, rstd, sums))
    if plan.add_parts is not None:
        plan.add_parts((sums, dweight, dbias))
    return outputs


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    center: bool,
    weight_grad: bool,
    bias_grad: bool,
    activation: str,
    y_dtype: torch.dtype | None,
    device: torch.device,
) -> BackwardPlan:
    """The plan for operands of these layouts: dy, dsum, x, gate, weight, the bias that y needs, and
    the bias.
    """
    *read, bias = operands
    _, _, x, gate, weight, _ = read
    vectors = weight if weight_grad else None, bias if bias_grad else None
    of_shapes = (shape, x), (shape, gate), *((shape[-1:], vector) for vector in vectors)
    grads = tuple(
        None if layout is None else allocator(each, layout[0], device) for each, layout in of_shapes
    )
    y = None if y_dtype is None else allocator(shape, y_dtype, device)
    launches: tuple = ()
    if math.prod(shape):
        wanted = dict(WEIGHT_GRAD=weight_grad, BIAS_GRAD=bias_grad)
        launches = plan_launches(shape, operands, center, wanted, activation, device)
    return BackwardPlan(to_copy(shape, *read), (*grads, y), *launches)


def plan_launches(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    center: bool,
    wanted: dict[str, bool],
    activation: str,
    device: torch.device,
) -> tuple:
    """The scheme and the launches of a BackwardPlan."""
    dy, dsum, x, gate, *_ = operands
    assert dy is not None
    assert x is not None
    *_, cols = shape
    rows = count_rows(shape)
    of_dy, of_dsum, of_x, of_gate = (read_strides(shape, each) for each in (dy, dsum, x, gate))
    integers = (*of_dy, *of_dsum, *of_x, *of_gate, rows)
    constants = dict(cols=cols, ACTIVATION=activation)
    gpu = device_properties(device)
    # A row of one column centres to zero, and so must its gradient: fused multiply-adds would leave
    # a rounding error there.
    options = dict(enable_fp_fusion=not center)
    if any(wanted.values()) and fits_small(rows, cols):
        block_rows = max(1, BACKWARD_SMALL.tile_elements // power_of_2(cols))
        column_programs = cdiv(cols, BACKWARD_SMALL.part_cols)
        launch = Launch(
            kernels_backward.norm_backward_small_kernel,
            (column_programs + cdiv(rows, block_rows),),
            device,
            integers,
            options | dict(num_warps=BACKWARD_SMALL.num_warps),
            **constants,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=power_of_2(cols),
            # Several rounds of adding keep the error of the sum over the rows low.
            PART_ROWS=max(1, min(BACKWARD_SMALL.part_rows, power_of_2(rows) // 4)),
            PART_COLS=BACKWARD_SMALL.part_cols,
        )
        return "small", launch
    itemsize = max(x[0].itemsize, dy[0].itemsize)
    read = sum(operand is not None for operand in (dy, dsum, x, gate))
    config = backward_config(cols, itemsize, read, center, gate is not None, gpu.shared_bytes)
    scheme = "wide" if config is None else "rows"
    weight_parts = None
    if config is None:
        parts = min(cdiv(rows, BACKWARD_WIDE.block_rows), BACKWARD_WIDE.parts)
        launch_rows = Launch(
            kernels_backward_wide.norm_backward_wide_kernel,
            (rows,),
            device,
            integers,
            options | dict(num_warps=BACKWARD_WIDE.num_warps),
            **constants,
            BLOCK_COLS=BACKWARD_WIDE.block_cols,
        )
        weight_parts = Launch(
            kernels_backward_wide.weight_parts_kernel,
            (parts, cdiv(cols, BACKWARD_WIDE.part_cols)),
            device,
            (*of_dy, *of_x, *of_gate, rows),
            # A third operand beside the sums would spill with four.
            dict(num_warps=4 if gate is None else 8),
            **constants,
            **wanted,
            BLOCK_ROWS=BACKWARD_WIDE.block_rows,
            BLOCK_COLS=BACKWARD_WIDE.part_cols,
        )
    else:
        parts = min(cdiv(rows, config.block_rows), config.programs_per_sm * gpu.multiprocessors)
        launch_rows = Launch(
            kernels_backward.norm_backward_kernel,
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
    if not any(wanted.values()):
        return scheme, launch_rows
    add_parts = Launch(
        kernels_backward.add_parts_kernel,
        (cdiv(cols, ADD_PARTS.block_cols),),
        device,
        (parts,),
        dict(num_warps=ADD_PARTS.num_warps),
        cols=cols,
        BLOCK_PARTS=ADD_PARTS.block_parts,
        BLOCK_COLS=ADD_PARTS.block_cols,
    )
    partial_sums = allocator((2, parts, cols), torch.float32, device)
    return scheme, launch_rows, weight_parts, add_parts, partial_sums


def backward_config(
    cols: int, itemsize: int, operands: int, center: bool, gated: bool, shared_bytes: int
) -> BackwardConfig | None:
    """The launch of a row of ``cols`` columns of ``operands`` tensors; None where it does not fit
    in registers.
    """
    config = next((config for config in BACKWARD if cols <= config.max_cols), None)
    if config is None or (config.read_again and (itemsize > 2 or center or gated)):
        # Beside a centred row's two gradients, a gate, or a row in fp32, even one load of the row
        # spills.
        return None
    tile = config.block_rows * power_of_2(cols) * itemsize * operands
    # Of the stages, one is in registers and the others are in shared memory, part of which
    # reductions take.
    stages = 1 + max(0, shared_bytes - REDUCTION_BYTES) // tile
    return config._replace(num_stages=min(config.num_stages, stages))


def fits_small(rows: int, cols: int) -> bool:
    """Whether one launch serves the backward pass of a tensor of this size."""
    limits = BACKWARD_SMALL
    return (
        rows * cols <= limits.max_elements and rows <= limits.max_rows and cols <= limits.max_cols
    )
