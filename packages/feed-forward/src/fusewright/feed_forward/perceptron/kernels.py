"""Triton kernels of SiLU and its derivative, elementwise; h may lie where u does, and du where dh
does.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_kernel(u_ptr, h_ptr, elements, BLOCK: tl.constexpr):
    """One program computes BLOCK elements of h = SiLU(u)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h = u * tl.sigmoid(u)
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_backward_kernel(dh_ptr, u_ptr, du_ptr, elements, BLOCK: tl.constexpr):
    """One program computes BLOCK elements of du = dh * SiLU'(u)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.sigmoid(u)
    du = dh * (slope * (1.0 + u * (1.0 - slope)))
    tl.store(du_ptr + at, du.to(du_ptr.dtype.element_ty), mask=inside)
