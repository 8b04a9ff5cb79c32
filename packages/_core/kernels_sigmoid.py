"""The sigmoid of fp32 by two operations of the hardware, and fp32 of narrower numbers, in Gluon."""

from __future__ import annotations

from .kernels_gluon import gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def sigmoid(u):
    """1 / (1 + 2 ** (-u log2 e)): the divisor is 1 or more, so the hardware's reciprocal serves."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
        "=f,f",
        [u * -LOG2_E],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def widened(x):
    """fp32 of bf16 or fp16, of pairs of neighbours in each thread.

    bf16 is widened by its bits, both numbers of a register at a time. Triton widens each by itself.
    Where a sum is rounded and the rounded number read again, it then rounds each by itself as well,
    on the unit that sigmoids keep busy.
    """
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float32)
