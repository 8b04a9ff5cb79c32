"""Device functions of the indexer's kernels: one arithmetic of the activation in every pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, product


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def activation(q, k, bias, scale, CONFIG: tl.constexpr):
    """sigmoid(scale q k^T + bias), or its relu, of one head, [rows of q, rows of k]."""
    if CONFIG.GATED:
        z = product(q, tl.trans(k), CONFIG) * (scale * LOG2_E) + bias * LOG2_E
        y = 1.0 / (1.0 + tl.exp2(-z))
    else:
        z = product(q, tl.trans(k), CONFIG) * scale + bias
        # NaN stays.
        y = tl.where(z < 0.0, 0.0, z)
    return y


@triton.jit
def gate_of(w, CONFIG: tl.constexpr):
    """What a head weighs: sigmoid(w), or w."""
    gate = w.to(tl.float32)
    if CONFIG.GATED:
        gate = sigmoid(gate)
    return gate
