"""Launches that are planned once for each kind of call and then repeated cheaply.

Triton's own dispatch inspects every argument of every call, which takes the host longer than a
small kernel takes the GPU. Here everything but the tensors and the floats is fixed when a plan is
made, so a repeated call goes straight to the compiled kernel.

A plan is kept under a key of everything that it depends on: shapes, options, device, and the
``layouts`` of all operands, their dtypes, strides and absences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .internals import FOUND, can_rerun, launch_hooks

Layout = tuple[torch.dtype, tuple[int, ...]]
Allocator = Callable[[], torch.Tensor]

_current_stream: Any = FOUND.get("_cuda_getCurrentRawStream")
current_device: Any = FOUND.get("_cuda_getDevice") or torch.cuda.current_device


class Launch:
    """One launch of a kernel whose parameters are, in this order: tensors, floats, integers,
    constants.

    A launch serves tensors of the dtypes, and integers of the values, that it was made for, on one
    device, which is the current one. Tensors that do not start at a multiple of 16 bytes, launches
    with hooks and the interpreter take Triton's own dispatch.
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
        hooks = launch_hooks()
        self.repeats = self.device_index is not None and bool(hooks and _current_stream)
        self.enter_hook: Any
        self.exit_hook: Any
        self.enter_hook, self.exit_hook = hooks or (None, None)
        # Triton's compiled kernel, from the first launch on.
        self.compiled: Any = None

    def __call__(
        self, tensors: tuple[torch.Tensor | None, ...], floats: tuple[float, ...] = ()
    ) -> None:
        if not self.repeats:
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
        if bits & 15 or self.enter_hook.calls or self.exit_hook.calls:
            self.dispatch(tensors, floats)
        elif self.compiled is None:
            self.keep(self.dispatch(tensors, floats))
        else:
            # The three None: no metadata for hooks, and no hooks.
            self.run(
                *self.grid,
                _current_stream(self.device_index),
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
        """Triton's own launch; returns the compiled kernel."""
        return self.kernel[self.grid](
            *tensors, *floats, *self.integers, **self.constants, **self.options
        )

    def keep(self, compiled: Any) -> None:
        """Launch this compiled kernel from now on."""
        if not can_rerun(compiled):
            self.repeats = False
            return
        self.run, self.function = compiled.run, compiled.function
        # Last: another thread that sees it finds the other two.
        self.compiled = compiled


class Plan(NamedTuple):
    """One call of a launcher: its launch, none where there is nothing to compute; which operands it
    copies first, empty for none; and the memory of its outputs, None for one that is absent.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    outputs: tuple[Allocator | None, ...]

    def run(self, operands: Sequence, floats: tuple[float, ...] = ()) -> tuple:
        """Allocate the outputs and launch; the kernel takes them behind the operands."""
        outputs: tuple[torch.Tensor | None, ...] = ()
        # No comprehension, whose call takes the host longer.
        for allocate in self.outputs:
            outputs += (None if allocate is None else allocate(),)
        if self.launch is not None:
            if self.copies:
                operands = contiguous_where(operands, self.copies)
            self.launch((*operands, *outputs), floats)
        return outputs


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Allocator:
    """What a plan calls for an output or an intermediate result: contiguous, on the current
    device.
    """
    empty = FOUND.get("_empty_strided_cuda" if device.type == "cuda" else "_empty_strided_cpu")
    if empty is None:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device)
    return functools.partial(empty, tuple(shape), contiguous_strides(shape), dtype)


def allocate(allocator: Allocator | None) -> torch.Tensor | None:
    """A tensor of a plan; None where it plans none."""
    return None if allocator is None else allocator()


def contiguous_where(operands: Sequence, copies: Sequence[bool]) -> tuple:
    """The operands, those that a plan copies as contiguous copies."""
    return tuple(
        x.contiguous() if copy and x is not None else x
        for x, copy in zip(operands, copies, strict=True)
    )


def is_current(device: torch.device) -> bool:
    """Whether plans for this device may run now: they allocate and launch on the current one."""
    # Of the devices that plans are made for, only a GPU has an index.
    return device.index is None or device.index == current_device()


def layouts(*tensors: torch.Tensor | None) -> tuple[Layout | None, ...]:
    """Dtype and strides of each tensor, None for one that is absent: a part of a plan's key."""
    return tuple([None if x is None else (x.dtype, x.stride()) for x in tensors])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cdiv(number: int, size: int) -> int:
    """How many blocks of ``size`` cover ``number``."""
    return -(-number // size)
