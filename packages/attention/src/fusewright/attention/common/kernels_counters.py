"""Counters in global memory by which programs that are all resident wait for one another: device
functions of one warp. The launch is a cooperative one. A counter is its address, an int64.
"""

from __future__ import annotations

from .kernels_gluon import gl, gluon


@gluon.constexpr_function
def wait_for_text():
    """Until the counter at $1 is $2; what the bulk copy engine does comes behind it."""
    return """{
.reg .pred waits;
.reg .b32 seen;
WAIT:
ld.acquire.gpu.global.b32 seen, [$1];
setp.ne.s32 waits, seen, $2;
vote.sync.any.pred waits, waits, -1;
@waits bra.uni WAIT;
fence.proxy.async.global;
mov.b32 $0, seen;
}"""


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
        wait_for_text(), "=&r,l,r", [counter, number], dtype=gl.int32, is_pure=False, pack=1
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
