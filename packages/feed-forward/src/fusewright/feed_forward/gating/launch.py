"""The launches of silu_mul, of two tensors and of the halves of one, forward and backward: their
configurations and plans.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import (
    Launch,
    Layout,
    Plan,
    allocator,
    cdiv,
    contiguous_where,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.rows import MAX_ROWS, read_strides, to_copy

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class ElementsConfig(NamedTuple):
    """One program takes ``block`` consecutive elements of the result."""

    block: int
    num_warps: int


# Source: results/tuning-h200-torch2.11-triton3.6.csv: at every size within 1.3 % of the fastest
# line.
FORWARD = ElementsConfig(block=1024, num_warps=4)
BACKWARD = ElementsConfig(block=1024, num_warps=8)
# More than one access takes of any dtype, so that neighbouring threads read whole sectors.
LONGEST_VECTOR = 16
# Elements are counted in 64 bits; rows, and columns plus a block of them, in 32.
MAX_COLS = 2**30


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, contiguous."""
    return forward_plan(gate.shape, layouts(gate, up), gate.device).run((gate, up))[0]


def silu_mul_halves(joint: torch.Tensor) -> torch.Tensor:
    """silu_mul of the first and the second half of the last axis."""
    return silu_mul(*joint.tensor_split(2, -1))


def silu_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dgate, dup)``, contiguous."""
    plan = backward_plan(gate.shape, layouts(dy, gate, up), False, gate.device)
    return plan.run((dy, gate, up))


def silu_mul_halves_backward(dy: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    """The gradient of both halves, written in place into one contiguous tensor."""
    operands = dy, *joint.tensor_split(2, -1)
    plan = backward_plan(operands[1].shape, layouts(*operands), True, joint.device)
    (allocate,) = plan.outputs
    assert allocate is not None
    djoint = allocate()
    if plan.launch is not None:
        if plan.copies:
            operands = contiguous_where(operands, plan.copies)
        plan.launch((*operands, *djoint.tensor_split(2, -1)))
    return djoint


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...], operands: tuple[Layout, ...], device: torch.device
) -> Plan:
    """The plan for operands of these layouts: gate and up."""
    launch = None
    if math.prod(shape):
        flat = are_flat(shape, *operands)
        launch = plan_launch(kernels.silu_mul_kernel, FORWARD, shape, operands, (), flat, device)
    return Plan(launch, to_copy(shape, *operands), (allocator(shape, operands[0][0], device),))


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...], operands: tuple[Layout, ...], halves: bool, device: torch.device
) -> Plan:
    """The plan for operands of these layouts: dy, gate and up. With ``halves`` the gradients are
    the halves of the rows of one tensor.
    """
    rows, cols = rows_and_cols(shape)
    launch = None
    if math.prod(shape):
        launch = plan_launch(
            kernels.silu_mul_backward_kernel,
            BACKWARD,
            shape,
            operands,
            (2 * cols if halves else cols,),
            are_flat(shape, *operands) and (rows == 1 or not halves),
            device,
        )
    _, (dtype, _), _ = operands
    result = allocator((*shape[:-1], 2 * cols) if halves else shape, dtype, device)
    return Plan(launch, to_copy(shape, *operands), (result,) if halves else (result, result))


def plan_launch(
    kernel: Any,
    config: ElementsConfig,
    shape: tuple[int, ...],
    operands: tuple[Layout, ...],
    result_strides: tuple[int, ...],
    flat: bool,
    device: torch.device,
) -> Launch:
    """A launch over all elements of operands and results; ``result_strides`` are the row strides of
    the results that the kernel asks for. The strides of ``flat`` tensors do not depend on their
    shape, so one compiled kernel serves any.
    """
    rows, cols = rows_and_cols(shape)
    elements = rows * cols
    strides = [read_strides(shape, layout) for layout in operands]
    if flat:
        strides, result_strides, cols = [(1, 0, 0)] * len(strides), (0,) * len(result_strides), 0
    else:
        check_countable(rows, cols)
    of_rows = [stride for _, *both in strides for stride in both]
    vector = math.gcd(elements, LONGEST_VECTOR, cols, *of_rows, *result_strides)
    integers = [
        integer
        for inner_rows, outer, inner in strides
        for integer in (inner_rows, outer // vector, inner // vector)
    ]
    return Launch(
        kernel,
        (cdiv(elements, config.block),),
        device,
        (*integers, *(stride // vector for stride in result_strides), elements // vector),
        dict(num_warps=config.num_warps),
        cols=cols // vector,
        VECTOR=vector,
        BLOCK=config.block,
    )


def rows_and_cols(shape: Sequence[int]) -> tuple[int, int]:
    """The rows of a tensor with elements and the length of one; a number is a row of one."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def check_countable(rows: int, cols: int) -> None:
    """Rows with a stride of their own must be few and short enough for the kernels' numbers.

    Raises:
        ValueError: they are not.
    """
    if rows > MAX_ROWS or cols > MAX_COLS:
        raise ValueError(
            f"the kernels serve up to {MAX_ROWS} rows of up to {MAX_COLS} columns where the rows "
            f"do not follow one another, got {rows} of {cols}"
        )


def are_flat(shape: tuple[int, ...], *operands: Layout) -> bool:
    """Whether every operand, as it is read, is one run of elements in the order of the result."""
    rows, cols = rows_and_cols(shape)
    return rows == 1 or all(read_strides(shape, layout) == (1, cols, 0) for layout in operands)
