"""Counters in global memory by which programs that are all resident wait for one another: device
functions of one warp, or of several where they say so. The launch is a cooperative one. A counter
is its address, an int64.
"""

from __future__ import annotations

from .._core.kernels_gluon import gl, gluon


@gluon.constexpr_function
def wait_for_text(differs):
    """While the counter at $1 ``differs`` from $2 in this way, a comparison of PTX; what the bulk
    copy engine does comes behind it.
    """
    text = """{
.reg .pred waits;
.reg .b32 seen;
WAIT:
ld.acquire.gpu.global.b32 seen, [$1];
setp.DIFFERS.s32 waits, seen, $2;
vote.sync.any.pred waits, waits, -1;
@waits bra.uni WAIT;
fence.proxy.async.global;
mov.b32 $0, seen;
}"""
    return text.replace("DIFFERS", differs)


@gluon.constexpr_function
def pass_on_text():
    """Bulk copies of this warp are complete before the counter at $1 is one more."""
    return """{
.reg .pred chosen;
.reg .b32 lane;
cp.async.bulk.wait_group 0;
fence.proxy.async.global;
elect.sync lane|chosen, -1;
@chosen red.release.gpu.global.add.u32 [$1], 1;
mov.b32 $0, 0;
}"""


@gluon.constexpr_function
def count_and_wait_text():
    """One more at $1, until it is $2 or more: a meeting that orders no memory."""
    return """{
.reg .pred waits, chosen;
.reg .b32 seen, lane;
elect.sync lane|chosen, -1;
@chosen red.relaxed.gpu.global.add.u32 [$1], 1;
WAIT:
ld.relaxed.gpu.global.b32 seen, [$1];
setp.lt.u32 waits, seen, $2;
vote.sync.any.pred waits, waits, -1;
@waits bra.uni WAIT;
mov.b32 $0, seen;
}"""


@gluon.jit
def wait_for(counter, number):
    """Wait until the counter is this number; bulk copies that follow see those before it."""
    gl.inline_asm_elementwise(
        wait_for_text("ne"), "=&r,l,r", [counter, number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_sums(counter, number):
    """Wait until the counter is this number or more; ordinary loads that follow, of any of the
    warps that wait, see what bulk copies wrote before it.

    The writer's side has the fence between the proxies: its copies are complete, and seen by the
    thread that counts, before ``pass_on`` releases. All threads acquire here what it released, and
    their loads are of the generic proxy, so that no fence is needed between the two.
    """
    gl.inline_asm_elementwise(
        wait_for_text("lt"), "=&r,l,r", [counter, number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_on(counter):
    """Count one once the bulk copies of this warp are in memory."""
    gl.inline_asm_elementwise(
        pass_on_text(), "=&r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_and_wait(counter, number):
    """Count one, and wait until the counter is this number or more."""
    gl.inline_asm_elementwise(
        count_and_wait_text(), "=&r,l,r", [counter, number], dtype=gl.int32, is_pure=False, pack=1
    )
