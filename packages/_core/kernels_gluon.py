"""Names of Gluon, Triton's language for programs of several warp groups, which move from one
release to the next: all kernels take them from here. Triton 3.6 and 3.7 are tested.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@builtin
def tma_add(descriptor, place, source, _semantic=None):
    """The bulk copy engine adds a tile in shared memory to the one in global memory. Gluon has no
    name for that in triton 3.6 and 3.7.
    """
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, source.handle)


__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "tma_add",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
