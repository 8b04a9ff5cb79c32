"""Barriers in shared memory by which the warps of a program wait for one another."""

from __future__ import annotations

from .kernels_gluon import gl, gluon, mbarrier


@gluon.jit
def barriers_of(PLACES: gl.constexpr, COUNT: gl.constexpr):
    """A barrier for each of so many places, [PLACES, 1], which COUNT arrivals complete. A fence
    has to follow.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(barriers.index(place), count=COUNT)
    return barriers
