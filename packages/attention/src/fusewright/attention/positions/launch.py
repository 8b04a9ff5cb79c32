"""The launch of rotary, forward and backward: its configuration and its plans."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import (
    Launch,
    Layout,
    Plan,
    allocator,
    cdiv,
    contiguous_strides,
    contiguous_where,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.operands import Shape, present, to_copy

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class RotaryConfig(NamedTuple):
    """One program rotates ``pairs`` pairs of columns, and as many of the second operand; of a
    prefix it copies as many columns, of up to ``batches`` rows of the batch at a time.
    """

    pairs: int
    num_warps: int
    batches: int


# Unmeasured.
ROTARY = RotaryConfig(pairs=512, num_warps=4, batches=16)
# More numbers than one access takes of any dtype: neighbouring threads then read whole sectors.
LONGEST_VECTOR = 16
Tensor = torch.Tensor


class Parts(NamedTuple):
    """The sizes of a joint sequence, and which parts it has."""

    batches: int
    tokens: int
    kinds: int
    heads: int
    width: int
    prefix: int
    beside: bool
    # Whether the rows of the batch share one prefix.
    shared: bool

    @property
    def row(self) -> Shape:
        """The shape of a token."""
        return self.kinds, self.heads, self.width

    @property
    def rows_shape(self) -> Shape:
        """The shape of rows, and of ``beside``."""
        return self.batches, self.tokens, *self.row

    @property
    def prefix_shape(self) -> Shape:
        return (*(() if self.shared else (self.batches,)), self.prefix, *self.row)

    @property
    def joint_shape(self) -> Shape:
        return self.batches, self.prefix + (1 + self.beside) * self.tokens, *self.row


class KernelConfig(NamedTuple):
    """What the kernel is compiled for: the kinds, heads and half of the columns of a row, in
    vectors of so many numbers; how many pairs a program rotates, how many vectors of the prefix it
    copies, of how many rows of the batch at a time; and the direction.
    """

    KINDS: int
    HEADS: int
    HALF: int
    VECTOR: int
    COUNT: int
    PREFIX_COUNT: int
    BATCHES: int
    BACKWARD: bool
    SHARED: bool


def rotary_forward(
    rows: Tensor, cos: Tensor, sin: Tensor, beside: Tensor | None, prefix: Tensor | None
) -> Tensor:
    """The joint sequence ``[B, P + T or P + 2 T, K, H, D]``, contiguous."""
    operands = rows, beside, prefix, cos, sin
    prefix_shape = None if prefix is None else prefix.shape
    plan = forward_plan(rows.shape, prefix_shape, layouts(*operands), rows.device)
    (allocate,) = plan.outputs
    assert allocate is not None
    joint = allocate()
    if plan.launch is not None:
        if plan.copies:
            operands = contiguous_where(operands, plan.copies)
        plan.launch((*operands[:3], joint, *operands[3:]))
    return joint


def rotary_backward(
    djoint: Tensor, cos: Tensor, sin: Tensor, beside: bool, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(drows, dbeside, dprefix)``, contiguous; the second is empty without ``beside``, the last
    without a prefix.
    """
    operands = djoint, cos, sin
    plan = backward_plan(
        djoint.shape, cos.shape[-2], beside, shared, layouts(*operands), djoint.device
    )
    drows, dbeside, dprefix = [allocate() for allocate in plan.outputs if allocate is not None]
    if plan.launch is not None:
        if plan.copies:
            operands = contiguous_where(operands, plan.copies)
        parts = drows, dbeside if beside else None, dprefix if dprefix.numel() else None
        plan.launch((*parts, *operands))
    return drows, dbeside, dprefix


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: Shape,
    prefix_shape: Shape | None,
    operands: tuple[Layout | None, ...],
    device: torch.device,
) -> Plan:
    """The plan for rows of this shape, a prefix of that one, and operands of these layouts: rows,
    beside, prefix, cos and sin.
    """
    batches, tokens, kinds, heads, width = shape
    rows, beside, prefix, cos, sin = operands
    length, shared = 0, False
    if prefix_shape is not None:
        length, shared = prefix_shape[-4], len(prefix_shape) == 4
    parts = Parts(batches, tokens, kinds, heads, width, length, beside is not None, shared)
    joint = allocator(parts.joint_shape, present(rows)[0], device)
    launch = plan_launch(parts, (rows, beside, prefix, None), (cos, sin), False, device)
    return Plan(launch, to_copy(operands, strided_last), (joint,))


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: Shape,
    tokens: int,
    beside: bool,
    shared: bool,
    operands: tuple[Layout, ...],
    device: torch.device,
) -> Plan:
    """The plan for a gradient of this shape and operands of these layouts: itself, cos and sin."""
    batches, joint, kinds, heads, width = shape
    prefix = joint - (1 + beside) * tokens
    parts = Parts(batches, tokens, kinds, heads, width, prefix, beside, shared)
    djoint, *angles = operands
    launch = plan_launch(parts, (None, None, None, djoint), tuple(angles), True, device)
    shapes = parts.rows_shape, parts.rows_shape if beside else (0,), parts.prefix_shape
    results = tuple(allocator(shape, djoint[0], device) for shape in shapes)
    return Plan(launch, to_copy(operands, strided_last), results)


def plan_launch(
    parts: Parts,
    operands: tuple[Layout | None, ...],
    angles: tuple[Layout | None, ...],
    backward: bool,
    device: torch.device,
) -> Launch | None:
    """The launch that reads those of rows, beside, prefix and joint that have a layout in
    ``operands``, and cos and sin, and writes the others.
    """
    shapes = parts.rows_shape, parts.rows_shape, parts.prefix_shape, parts.joint_shape
    strides = [leading_strides(*pair) for pair in zip(shapes, operands, strict=True)]
    if parts.shared:
        strides[2] = (0, *strides[2])
    half = parts.width // 2
    strides += [angle_strides((parts.batches, parts.tokens, half), layout) for layout in angles]
    all_strides = [stride for axes in strides for stride in axes]
    vector = math.gcd(LONGEST_VECTOR, half, *all_strides)
    batches = min(ROTARY.batches, power_of_2(max(parts.batches, 1)))
    count = ROTARY.pairs // vector
    prefix_count = max(1, count // batches)
    per_token = parts.kinds * parts.heads * half // vector
    token_blocks = cdiv(parts.tokens * per_token, count)
    prefix_blocks = cdiv(parts.prefix * per_token * 2, prefix_count)
    # Without rows of the batch nothing is written but the gradient of a shared prefix, zeros.
    if not parts.batches and not (backward and parts.shared):
        prefix_blocks = 0
    programs = prefix_blocks + parts.batches * token_blocks
    if not programs:
        return None
    return Launch(
        kernels.rotary_kernel,
        (programs,),
        device,
        (
            *(stride // vector for stride in all_strides),
            *(parts.batches, parts.tokens, parts.prefix, prefix_blocks, token_blocks),
        ),
        dict(num_warps=ROTARY.num_warps),
        CONFIG=KernelConfig(
            KINDS=parts.kinds,
            HEADS=parts.heads,
            HALF=half // vector,
            VECTOR=vector,
            COUNT=count,
            PREFIX_COUNT=prefix_count,
            BATCHES=batches,
            BACKWARD=backward,
            SHARED=parts.shared,
        ),
    )


def leading_strides(shape: Shape, layout: Layout | None) -> tuple[int, ...]:
    """Strides of all axes but the last, of an operand, of its copy or of a result; 0 where an axis
    has one element.
    """
    contiguous = layout is None or strided_last(layout)
    strides = contiguous_strides(shape) if contiguous else present(layout)[1]
    return tuple(
        0 if length == 1 else stride
        for length, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def angle_strides(shape: Shape, layout: Layout | None) -> tuple[int, int]:
    """Strides along batch and tokens of cos or sin of this shape, or of its last two axes: along a
    batch that shares them there is none.
    """
    axes = len(present(layout)[1])
    batch, tokens = (0,) * (3 - axes) + leading_strides(shape[-axes:], layout)
    return batch, tokens


def strided_last(layout: Layout | None) -> bool:
    """Whether the kernel can read an operand of this layout only from a contiguous copy."""
    return layout is not None and layout[1][-1] != 1
