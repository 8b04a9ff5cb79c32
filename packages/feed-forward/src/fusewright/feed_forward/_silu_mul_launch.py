"""The launches of silu_mul, of two tensors and of the halves of one: plans, allocates and
launches.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from ._configs import BACKWARD, FORWARD, ElementsConfig
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._rows import check_countable, follow_one_another, rows_and_cols, to_copy, walk
from ._silu_mul_kernels import _silu_mul_backward_kernel, _silu_mul_kernel

# More than one access takes of any dtype, so that neighbouring threads read whole sectors.
LONGEST_VECTOR = 16


class Plan(NamedTuple):
    """One pass: what it launches (nothing where there are no elements), which operands it copies
    first, and the memory of y or of a gradient.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    result: Allocate

    def run(self, operands: tuple[torch.Tensor, ...], *results: torch.Tensor) -> None:
        if self.launch is not None:
            if self.copies:
                operands = copied(operands, self.copies)
            self.launch((*operands, *results))


def launch_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, contiguous."""
    if not is_current(gate.device):
        with torch.cuda.device(gate.device):
            return launch_silu_mul(gate, up)
    plan = forward_plan(gate.shape, kinds(gate, up), gate.device)
    y = plan.result()
    plan.run((gate, up), y)
    return y


def launch_silu_mul_halves(joint: torch.Tensor) -> torch.Tensor:
    """The same of the halves of the last axis of one tensor."""
    return launch_silu_mul(*joint.tensor_split(2, -1))


def launch_silu_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dgate, dup)``, contiguous."""
    if not is_current(gate.device):
        with torch.cuda.device(gate.device):
            return launch_silu_mul_backward(dy, gate, up)
    plan = backward_plan(gate.shape, kinds(dy, gate, up), False, gate.device)
    dgate, dup = plan.result(), plan.result()
    plan.run((dy, gate, up), dgate, dup)
    return dgate, dup


def launch_silu_mul_halves_backward(dy: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    """The gradient of both halves, written where they lie in one contiguous tensor."""
    if not is_current(joint.device):
        with torch.cuda.device(joint.device):
            return launch_silu_mul_halves_backward(dy, joint)
    gate, up = joint.tensor_split(2, -1)
    plan = backward_plan(gate.shape, kinds(dy, gate, up), True, joint.device)
    djoint = plan.result()
    plan.run((dy, gate, up), *djoint.tensor_split(2, -1))
    return djoint


@functools.lru_cache(maxsize=4096)
def forward_plan(shape: tuple[int, ...], operands: tuple[Kind, ...], device: torch.device) -> Plan:
    """The plan for operands of these kinds: gate and up."""
    launch = None
    if math.prod(shape):
        flat = follow_one_another(shape, *operands)
        launch = plan_launch(_silu_mul_kernel, FORWARD, shape, operands, (), flat, device)
    return Plan(launch, to_copy(shape, *operands), memory(shape, operands[0][0], device))


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...], operands: tuple[Kind, ...], halves: bool, device: torch.device
) -> Plan:
    """The plan for operands of these kinds: dy, gate and up. With ``halves`` the gradients lie side
    by side in one tensor.
    """
    rows, cols = rows_and_cols(shape)
    launch = None
    if math.prod(shape):
        launch = plan_launch(
            _silu_mul_backward_kernel,
            BACKWARD,
            shape,
            operands,
            (2 * cols if halves else cols,),
            follow_one_another(shape, *operands) and (rows == 1 or not halves),
            device,
        )
    result = (*shape[:-1], 2 * cols) if halves else shape
    return Plan(launch, to_copy(shape, *operands), memory(result, operands[1][0], device))


def plan_launch(
    kernel: Any,
    config: ElementsConfig,
    shape: tuple[int, ...],
    operands: tuple[Kind, ...],
    strides: tuple[int, ...],
    flat: bool,
    device: torch.device,
) -> Launch:
    """A launch over all elements; ``strides`` are the kernel's integers beside the operands'
    walks. Those of one run of elements do not depend on its shape, and one compiled kernel serves
    any.
    """
    rows, cols = rows_and_cols(shape)
    elements = rows * cols
    walks = [walk(shape, kind) for kind in operands]
    if flat:
        walks, strides, cols = [(1, 0, 0)] * len(walks), (0,) * len(strides), 0
    else:
        check_countable(rows, cols)
    apart = [stride for _, *both in walks for stride in both]
    vector = math.gcd(elements, LONGEST_VECTOR, cols, *apart, *strides)
    numbers = [
        number
        for inner_rows, outer, inner in walks
        for number in (inner_rows, outer // vector, inner // vector)
    ]
    return Launch(
        kernel,
        (triton.cdiv(elements, config.block),),
        device,
        (*numbers, *(stride // vector for stride in strides), elements // vector),
        dict(num_warps=config.num_warps),
        cols=cols // vector,
        VECTOR=vector,
        BLOCK=config.block,
    )
