"""Launches that are planned once for each kind of call and then repeated cheaply.

Triton's own dispatch inspects every argument of every call, which takes the host longer than a
small kernel takes the card. Here everything but the tensors and the floats is fixed when a plan is
made, so a repeated call goes straight to the compiled kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

HOOKS = triton.knobs.runtime


class Launch:
    """One launch of a kernel whose parameters are, in this order: tensors, floats, integers,
    constants.

    A plan serves tensors of the dtypes, and integers of the values, that it was made for. Tensors
    that do not start at a multiple of 16 bytes, launches that somebody hooks into and the
    interpreter take Triton's own dispatch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        integers: tuple[int, ...],
        options: dict[str, int],
        **constants: Any,
    ) -> None:
        self.kernel, self.integers, self.constants = kernel, integers, constants
        self.options = options
        self.grid = (*grid, 1, 1)[:3]
        self.compiled: Any = None

    def __call__(
        self,
        device: torch.device,
        tensors: tuple[torch.Tensor | None, ...],
        floats: tuple[float, ...] = (),
    ) -> None:
        if device.type != "cuda":
            self.dispatch(tensors, floats)
            return
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(device, tensors, floats)
            return
        addresses: list[int | None] = []
        bits = 0
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            addresses.append(address)
            bits |= address or 0
        if bits & 15 or HOOKS.launch_enter_hook.calls or HOOKS.launch_exit_hook.calls:
            self.dispatch(tensors, floats)
        elif self.compiled is None:
            self.compiled = self.dispatch(tensors, floats)
            self.tail = (*self.integers, *self.constants.values())
        else:
            compiled = self.compiled
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            # The three None: no metadata for hooks, and no hooks.
            compiled.run(
                *self.grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
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


def readable(x: torch.Tensor) -> torch.Tensor:
    """x itself where the kernels can walk over its rows, else a contiguous copy."""
    if x.is_contiguous() or row_strides(x.shape, x.stride()) is not None:
        return x
    return x.contiguous()


def contiguous(vector: torch.Tensor | None) -> torch.Tensor | None:
    return vector if vector is None else vector.contiguous()


def empty_rows(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Contiguous memory for a tensor of x's shape, in x's dtype or another."""
    if dtype is None and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def row_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """How the rows along the last axis of a tensor are reached.

    Returns:
        ``(inner_rows, outer_stride, inner_stride)``: row i starts at element
        ``i // inner_rows * outer_stride + i % inner_rows * inner_stride``; inner_rows is 1 where
        one stride reaches every row. None where the last axis is not contiguous or the leading axes
        need three strides.
    """
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    axes: list[tuple[int, int]] = []
    for length, stride in zip(shape[:-1], strides[:-1], strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = (axes[-1][0] * length, stride)
        else:
            axes.append((length, stride))
    if len(axes) > 2:
        return None
    if len(axes) == 2:
        return axes[1][0], axes[0][1], axes[1][1]
    return 1, axes[0][1] if axes else 0, 0


def walk(shape: tuple[int, ...], kind: tuple | None) -> tuple[int, int, int]:
    """The row strides of a readable tensor of this kind; for one that is missing, any."""
    if kind is None:
        return 1, 0, 0
    strides = row_strides(shape, kind[1])
    assert strides is not None, "wanted what readable() returned"
    return strides


def kinds(*tensors: torch.Tensor | None) -> tuple:
    """What of the tensors a plan depends on: dtype and strides."""
    return tuple([None if x is None else (x.dtype, x.stride()) for x in tensors])
