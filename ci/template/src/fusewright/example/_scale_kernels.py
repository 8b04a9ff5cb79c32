"""Triton kernel of scale; its backward pass is the same kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._configs import SCALE


@triton.jit
def _scale_kernel(x_ptr, y_ptr, elements, factor, BLOCK: tl.constexpr):
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
    grid = (triton.cdiv(x.numel(), SCALE.block),)
    if x.numel():
        _scale_kernel[grid](x, y, x.numel(), factor, BLOCK=SCALE.block, num_warps=SCALE.num_warps)
    return y
