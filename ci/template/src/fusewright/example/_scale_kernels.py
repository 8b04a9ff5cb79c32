"""Triton kernel of scale, its plan and its launcher; the backward pass is the same kernel."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ._configs import SCALE
from ._launch import Launch


@triton.jit
def _scale_kernel(x_ptr, y_ptr, factor, elements, BLOCK: tl.constexpr):
    """One program scales BLOCK consecutive elements."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements

    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32)
    y = factor * x

    tl.store(y_ptr + element, y.to(y_ptr.dtype.element_ty), mask=inside)


def launch_scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * x, contiguous. A tensor that is not contiguous is copied first."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        scale_plan(x.numel(), x.dtype, x.device)((x, y), (factor,))
    return y


@functools.lru_cache(maxsize=4096)
def scale_plan(elements: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch for contiguous tensors of this size and dtype."""
    return Launch(
        _scale_kernel,
        (triton.cdiv(elements, SCALE.block),),
        device,
        (elements,),
        dict(num_warps=SCALE.num_warps),
        BLOCK=SCALE.block,
    )
