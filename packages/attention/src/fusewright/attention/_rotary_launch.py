"""Rotary, forward and back: plans its launch, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._configs import ROTARY
from ._launch import Allocate, Kind, Launch, contiguous_strides, copied, is_current, kinds, memory
from ._operands import Shape, present, to_copy
from ._rotary_kernels import _rotary_kernel

# More than one access takes of any dtype, so that neighbouring threads read whole sectors.
LONGEST_VECTOR = 16
Tensor = torch.Tensor


class Parts(NamedTuple):
    """What a joint sequence consists of: its kinds of rows, and which parts it has."""

    batches: int
    tokens: int
    kinds: int
    heads: int
    width: int
    prefix: int
    beside: bool
    # By the rows of the batch, in one prefix.
    shared: bool

    @property
    def row(self) -> Shape:
        """The shape of a token."""
        return self.kinds, self.heads, self.width

    @property
    def rows_shape(self) -> Shape:
        """Of rows, and of those beside them."""
        return self.batches, self.tokens, *self.row

    @property
    def prefix_shape(self) -> Shape:
        return (*(() if self.shared else (self.batches,)), self.prefix, *self.row)

    @property
    def joint_shape(self) -> Shape:
        return self.batches, self.prefix + (1 + self.beside) * self.tokens, *self.row


class Plan(NamedTuple):
    """One call: what it launches (nothing where there are no elements), which operands it copies
    first, and the memory of its results.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    results: tuple[Allocate, ...]


def launch_rotary(
    rows: Tensor, cos: Tensor, sin: Tensor, beside: Tensor | None, prefix: Tensor | None
) -> Tensor:
    """The joint sequence ``[B, P + T or P + 2 T, K, H, D]``, contiguous."""
    if not is_current(rows.device):
        with torch.cuda.device(rows.device):
            return launch_rotary(rows, cos, sin, beside, prefix)
    operands = rows, beside, prefix, cos, sin
    before = None if prefix is None else prefix.shape
    plan = forward_plan(rows.shape, before, kinds(*operands), rows.device)
    (joint,) = (allocate() for allocate in plan.results)
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        plan.launch((*operands[:3], joint, *operands[3:]))
    return joint


def launch_rotary_backward(
    djoint: Tensor, cos: Tensor, sin: Tensor, beside: bool, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(drows, dbeside, dprefix)``, contiguous; the second is empty without ``beside``, the last
    without a prefix.
    """
    if not is_current(djoint.device):
        with torch.cuda.device(djoint.device):
            return launch_rotary_backward(djoint, cos, sin, beside, shared)
    operands = djoint, cos, sin
    plan = backward_plan(djoint.shape, len(cos), beside, shared, kinds(*operands), djoint.device)
    drows, dbeside, dprefix = (allocate() for allocate in plan.results)
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        parts = drows, dbeside if beside else None, dprefix if dprefix.numel() else None
        plan.launch((*parts, *operands))
    return drows, dbeside, dprefix


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: Shape, before: Shape | None, operands: tuple[Kind | None, ...], device: torch.device
) -> Plan:
    """The plan for rows of this shape and a prefix of that one, and operands of these kinds: rows,
    beside, prefix, cos and sin.
    """
    batches, tokens, kinds, heads, width = shape
    rows, beside, prefix, cos, sin = operands
    length, shared = (0, False) if before is None else (before[-4], len(before) == 4)
    parts = Parts(batches, tokens, kinds, heads, width, length, beside is not None, shared)
    joint = memory(parts.joint_shape, present(rows)[0], device)
    launch = plan_launch(parts, (rows, beside, prefix, None), (cos, sin), False, device)
    return Plan(launch, to_copy(operands, strided_last), (joint,))


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: Shape,
    tokens: int,
    beside: bool,
    shared: bool,
    operands: tuple[Kind, ...],
    device: torch.device,
) -> Plan:
    """The plan for a gradient of this shape and operands of these kinds: itself, cos and sin."""
    batches, joint, kinds, heads, width = shape
    prefix = joint - (1 + beside) * tokens
    parts = Parts(batches, tokens, kinds, heads, width, prefix, beside, shared)
    djoint, *angles = operands
    launch = plan_launch(parts, (None, None, None, djoint), tuple(angles), True, device)
    shapes = parts.rows_shape, parts.rows_shape if beside else (0,), parts.prefix_shape
    results = tuple(memory(one, djoint[0], device) for one in shapes)
    return Plan(launch, to_copy(operands, strided_last), results)


def plan_launch(
    parts: Parts,
    operands: tuple[Kind | None, ...],
    angles: tuple[Kind | None, ...],
    back: bool,
    device: torch.device,
) -> Launch | None:
    """The launch that reads ``operands``, rows, beside, prefix and joint as far as they are, and
    cos and sin, and writes the others.
    """
    shapes = parts.rows_shape, parts.rows_shape, parts.prefix_shape, parts.joint_shape
    strides = [leading(*pair) for pair in zip(shapes, operands, strict=True)]
    if parts.shared:
        strides[2] = (0, *strides[2])
    half = parts.width // 2
    steps = [leading((parts.tokens, half), kind)[0] for kind in angles]
    apart = [stride for axes in strides for stride in axes] + steps
    vector = math.gcd(LONGEST_VECTOR, half, *apart)
    batches = min(ROTARY.batches, triton.next_power_of_2(max(parts.batches, 1)))
    count = ROTARY.pairs // vector
    prefix_count = max(1, count // batches)
    of_token = parts.kinds * parts.heads * half // vector
    token_blocks = triton.cdiv(parts.tokens * of_token, count)
    prefix_blocks = triton.cdiv(parts.prefix * of_token * 2, prefix_count)
    # A gradient that sums over no rows is zero; nothing else is written for them.
    if not parts.batches and not (back and parts.shared):
        prefix_blocks = 0
    programs = prefix_blocks + parts.batches * token_blocks
    if not programs:
        return None
    return Launch(
        _rotary_kernel,
        (programs,),
        device,
        (
            *(stride // vector for stride in apart),
            *(parts.batches, parts.tokens, parts.prefix, prefix_blocks, token_blocks),
        ),
        dict(num_warps=ROTARY.num_warps),
        KINDS=parts.kinds,
        HEADS=parts.heads,
        HALF=half // vector,
        VECTOR=vector,
        COUNT=count,
        PREFIX_COUNT=prefix_count,
        BATCHES=batches,
        BACK=back,
        SHARED=parts.shared,
    )


def leading(shape: Shape, kind: Kind | None) -> tuple[int, ...]:
    """Strides of all axes but the last, of an operand, of its copy or of new memory; 0 where an
    axis has one element.
    """
    new = kind is None or strided_last(kind)
    strides = contiguous_strides(shape) if new else present(kind)[1]
    return tuple(
        0 if length == 1 else stride
        for length, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def strided_last(kind: Kind | None) -> bool:
    """Whether the kernel can read an operand of this kind only from a contiguous copy."""
    return kind is not None and kind[1][-1] != 1
