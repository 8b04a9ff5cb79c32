"""Launches that are planned once for each kind of call and then repeated cheaply.

Triton's own dispatch inspects every argument of every call, which takes the host longer than a
small kernel takes the card. Here everything but the tensors and the floats is fixed when a plan is
made, so a repeated call goes straight to the compiled kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

HOOKS = triton.knobs.runtime
# What torch's own compiler allocates with on the current device: a third of empty_strided's time.
EMPTY: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
Kind = tuple[torch.dtype, tuple[int, ...]]


class Launch:
    """One launch of a kernel whose parameters are, in this order: tensors, floats, integers,
    constants.

    A launch serves tensors of the dtypes, and integers of the values, that it was made for, on one
    device. Tensors that do not start at a multiple of 16 bytes, launches that somebody hooks into
    and the interpreter take Triton's own dispatch.
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
        self.device, self.device_index = device, device.index
        self.tail = (*integers, *constants.values())
        # Triton's compiled kernel, from the first launch on.
        self.compiled: Any = None

    def __call__(
        self, tensors: tuple[torch.Tensor | None, ...], floats: tuple[float, ...] = ()
    ) -> None:
        if self.device_index is None:
            self.dispatch(tensors, floats)
            return
        if self.device_index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                self(tensors, floats)
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


class Memory(NamedTuple):
    """Contiguous memory that a plan wants for an output or for an intermediate result."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Memory:
        return cls(tuple(shape), dtype, device, contiguous_strides(shape))

    def allocate(self) -> torch.Tensor:
        shape, dtype, device, strides = self
        if device.index is not None and device.index == torch._C._cuda_getDevice():
            return EMPTY(shape, strides, dtype)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def kinds(*tensors: torch.Tensor | None) -> tuple[Kind | None, ...]:
    """What of the tensors a plan depends on: dtype and strides."""
    return tuple([None if x is None else (x.dtype, x.stride()) for x in tensors])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
