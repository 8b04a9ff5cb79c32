"""The sigmoid of fp32 by two operations of the hardware, in Gluon."""

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
