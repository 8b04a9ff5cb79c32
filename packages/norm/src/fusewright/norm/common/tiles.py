"""Device functions that the kernels of both families call."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offset(row, inner_rows, outer_stride, inner_stride):
    """Element offset of each row. Rows are counted through two leading axes; 64-bit, for tensors
    past 2**31 elements.
    """
    outer = (row // inner_rows).to(tl.int64) * outer_stride
    return outer + (row % inner_rows).to(tl.int64) * inner_stride
