"""Launches that are planned once for each kind of call and then repeated cheaply.

Triton's own dispatch inspects every argument of every call, which takes the host longer than a
small kernel takes the card. Here everything but the tensors and the floats is fixed when a plan is
made, so a repeated call goes straight to the compiled kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

HOOKS = triton.knobs.runtime
Kind = tuple[torch.dtype, tuple[int, ...]]
Allocate = Callable[[], torch.Tensor]


class Launch:
    """One launch of a kernel whose parameters are, in this order: tensors, floats, integers,
    constants.

    A launch serves tensors of the dtypes, and integers of the values, that it was made for, on one
    device, which is the current one. Tensors that do not start at a multiple of 16 bytes, launches
    that somebody hooks into and the interpreter take Triton's own dispatch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        integers: tuple[int, ...],
        options: dict[str, int],
        **constants: Any,
    ) -> None:
        self.kernel, self.integers, self.constants = kernel, integers, constants
        self.options = options
        self.grid = (*grid, 1, 1)[:3]
        self.device_index = device.index
        self.tail = (*integers, *constants.values())
        # Triton's compiled kernel, from the first launch on.
        self.compiled: Any = None

    def __call__(
        self, tensors: tuple[torch.Tensor | None, ...], floats: tuple[float, ...] = ()
    ) -> None:
        if self.device_index is None:
            self.dispatch(tensors, floats)
            return
        addresses: list[int | None] = []
        bits = 0
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
            else:
                address = tensor.data_ptr()
                addresses.append(address)
                bits |= address
        if bits & 15 or HOOKS.launch_enter_hook.calls or HOOKS.launch_exit_hook.calls:
            self.dispatch(tensors, floats)
        elif self.compiled is None:
            compiled = self.dispatch(tensors, floats)
            self.run, self.function = compiled.run, compiled.function
            # Last: another thread takes it for a sign that all is there.
            self.compiled = compiled
        else:
            # The three None: no metadata for hooks, and no hooks.
            self.run(
                *self.grid,
                torch._C._cuda_getCurrentRawStream(self.device_index),
                self.function,
                self.compiled.packed_metadata,
                None,
                None,
                None,
                *addresses,
                *floats,
                *self.tail,
            )

    def dispatch(self, tensors: tuple[torch.Tensor | None, ...], floats: tuple[float, ...]) -> Any:
        return self.kernel[self.grid](
            *tensors, *floats, *self.integers, **self.constants, **self.options
        )


def memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Allocate:
    """What a plan calls for an output or an intermediate result: contiguous, on the current
    device.
    """
    guards: Any = torch._C._dynamo.guards
    # What torch's own compiler allocates with, in a third of the time of torch.empty.
    empty = guards._empty_strided_cuda if device.type == "cuda" else guards._empty_strided_cpu
    return functools.partial(empty, tuple(shape), contiguous_strides(shape), dtype)


def made(allocate: Allocate | None) -> torch.Tensor | None:
    """The memory of a plan; None where it plans none."""
    return None if allocate is None else allocate()


def copied(operands: Sequence, copies: Sequence[bool]) -> tuple:
    """The operands, contiguous copies of those that a plan copies among them."""
    return tuple(
        x.contiguous() if copy and x is not None else x
        for x, copy in zip(operands, copies, strict=True)
    )


def is_current(device: torch.device) -> bool:
    """Whether plans for this device may run now: they allocate and launch on the current one."""
    # Of the devices that plans are made for, only a card has an index.
    return device.index is None or device.index == torch._C._cuda_getDevice()


def kinds(*tensors: torch.Tensor | None) -> tuple[Kind | None, ...]:
    """What of the tensors a plan depends on: dtype and strides."""
    return tuple([None if x is None else (x.dtype, x.stride()) for x in tensors])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
