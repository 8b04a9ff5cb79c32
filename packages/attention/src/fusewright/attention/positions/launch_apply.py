"""The launch of apply_rotary, forward and backward: its configuration and its plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Launch, Layout, Plan, allocator, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.operands import Shape, present, to_copy
from .launch import angle_strides, leading_strides, strided_last

if TYPE_CHECKING:
    from . import kernels_apply
else:
    kernels_apply = lazy_module(__package__, "kernels_apply")

# Columns of a program's rows. Unmeasured.
COLUMNS = 1024
Tensor = torch.Tensor


class ApplyConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``: the width of a head, how many pairs of
    columns are rotated, in a block of a power of 2, and in such a block the columns that are not;
    the rows of a program; which columns are a pair; and the direction.
    """

    D: int
    HALF: int
    BLOCK: int
    REST: int
    ROWS: int
    INTERLEAVED: bool
    BACK: bool


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """``x`` rotated, or rotated back, contiguous."""
    operands = x, cos, sin
    plan = apply_plan(x.shape, cos.shape, layouts(*operands), interleaved, back, x.device)
    return plan.run(operands)[0]


@functools.lru_cache(maxsize=4096)
def apply_plan(
    shape: Shape,
    angles_shape: Shape,
    operands: tuple[Layout, ...],
    interleaved: bool,
    back: bool,
    device: torch.device,
) -> Plan:
    """The plan for x of this shape, cos and sin of that one, and operands of these layouts."""
    batches, tokens, heads, width = shape
    half = angles_shape[-1]
    x, *angles = operands
    of_angles = [
        stride for layout in angles for stride in angle_strides((batches, tokens, half), layout)
    ]
    block, rest = power_of_2(half), power_of_2(max(width - 2 * half, 1))
    rows = max(1, COLUMNS // max(2 * block, rest))
    blocks = cdiv(tokens * heads, rows)
    launch = None
    if batches * blocks:
        launch = Launch(
            kernels_apply.apply_rotary_kernel,
            (batches * blocks,),
            device,
            (*leading_strides(shape, x), *of_angles, tokens, heads, blocks),
            dict(num_warps=4),
            CONFIG=ApplyConstants(
                D=width,
                HALF=half,
                BLOCK=block,
                REST=rest,
                ROWS=rows,
                INTERLEAVED=interleaved,
                BACK=back,
            ),
        )
    result = allocator(shape, present(x)[0], device)
    return Plan(launch, to_copy(operands, strided_last), (result,))
