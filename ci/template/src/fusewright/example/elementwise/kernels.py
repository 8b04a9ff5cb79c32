"""Triton kernel of scale; its backward pass is the same kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, y_ptr, factor, elements, BLOCK: tl.constexpr):
    """One program scales BLOCK consecutive elements: y = factor * x."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements

    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32)
    y = factor * x

    tl.store(y_ptr + element, y.to(y_ptr.dtype.element_ty), mask=inside)
