"""The launch of scale: its configuration and its plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Launch, allocator, cdiv, is_current
from .._core.lazy import lazy_module

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class ScaleConfig(NamedTuple):
    """One program takes ``block`` consecutive elements."""

    block: int
    num_warps: int


# Source: unmeasured.
SCALE = ScaleConfig(block=1024, num_warps=4)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * x, contiguous. A tensor that is not contiguous is copied first."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return scale(x, factor)
    x = x.contiguous()
    y = allocator(x.shape, x.dtype, x.device)()
    if x.numel():
        scale_plan(x.numel(), x.dtype, x.device)((x, y), (factor,))
    return y


@functools.lru_cache(maxsize=4096)
def scale_plan(elements: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch for contiguous tensors of this size and dtype."""
    return Launch(
        kernels.scale_kernel,
        (cdiv(elements, SCALE.block),),
        device,
        (elements,),
        dict(num_warps=SCALE.num_warps),
        BLOCK=SCALE.block,
    )
