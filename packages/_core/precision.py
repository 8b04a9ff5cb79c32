"""Precisions: what is computed in fp32 or fp64, what autocast casts, how fp32 matrices are
multiplied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

Tensor = torch.Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that statistics, sums and states beside ``x`` are in: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in that dtype."""
    return x if x.dtype == torch.float64 else x.float()


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for this type of device."""
    # Autocast does not know meta tensors.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast casts them for a matrix product: the first one's device and dtype
    decide.
    """
    x = tensors[0]
    if x.dtype == torch.float64 or not autocasts(x.device.type):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(x.device.type)) for x in tensors)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Plain torch in the precision of its operands, with autocast switched off. Outside autocast no
    context of torch's is entered, which takes the host as long as a small kernel.
    """
    if not autocasts(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def run_cast(run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``run`` of the tensors as autocast casts them for a matrix product, with autocast off."""
    tensors = autocast(*tensors)
    with without_autocast(tensors[0].device):
        return run(*tensors)


def allows_tf32() -> bool:
    """Whether torch multiplies fp32 matrices on a GPU in TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def input_precision(dtype: torch.dtype) -> str:
    """``tl.dot``'s precision for tiles of this dtype: fp32 ones as torch multiplies them."""
    return "tf32" if dtype == torch.float32 and allows_tf32() else "ieee"


def round_up(number: int, multiple: int) -> int:
    """The lowest multiple that is not below ``number``."""
    return math.ceil(number / multiple) * multiple


def power_of_2(number: int) -> int:
    """The lowest power of 2 that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()
