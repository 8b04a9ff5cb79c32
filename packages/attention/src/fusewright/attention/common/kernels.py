"""Triton kernels that add partial sums: those of dk and dv which chunks of queries have, and those
of dsinks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_chunks_kernel(
    dk_partial_ptr,
    dv_partial_ptr,
    dk_ptr,
    dv_ptr,
    partial_size,
    task_size,
    task_stride,
    chunks,
    BLOCK: tl.constexpr,
):
    """One program adds the chunks' partial sums of BLOCK elements of a task's dk, and, where there
    is one, dv, in their order. A task has task_size elements in each chunk's partial sums, and
    starts task_stride after the one before in dk and dv.
    """
    blocks = tl.cdiv(task_size, BLOCK)
    task = (tl.program_id(0) // blocks).to(tl.int64)
    in_task = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = in_task < task_size
    dk = tl.zeros([BLOCK], tl.float32)
    dv = tl.zeros([BLOCK], tl.float32)
    for chunk in range(chunks):
        partial = tl.cast(chunk, tl.int64) * partial_size + task * task_size + in_task
        dk += tl.load(dk_partial_ptr + partial, mask=inside, other=0.0)
        if dv_ptr is not None:
            dv += tl.load(dv_partial_ptr + partial, mask=inside, other=0.0)
    at = task * task_stride + in_task
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    if dv_ptr is not None:
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_sinks_kernel(partial_ptr, dsinks_ptr, heads, parts, BLOCK: tl.constexpr):
    """One program adds the partial sums [parts, heads] of a head's dsink, in a fixed order."""
    head = tl.program_id(0)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at = partial_ptr + part.to(tl.int64) * heads + head
        total += tl.load(at, mask=part < parts, other=0.0)
    tl.store(dsinks_ptr + head, tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty))
