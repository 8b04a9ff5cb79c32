r"""Rotary positions: pairs of columns of queries and keys, turned by the angle of their token.

    r'_i         = r_i cos_ti - r_{i + D/2} sin_ti              i < D/2
    r'_{i + D/2} = r_{i + D/2} cos_ti + r_i sin_ti

Rotations keep lengths, and those of two rows differ by the angle between their tokens: with angles
in proportion to the position t, a product q' . k' depends on the distance of the two tokens alone.

Around it what the keys and values of a sequence need before they are attended to, in the same
launch: rows that stand beside those of each token, r_1, s_1, r_2, s_2, ..., and a prefix before
them, which has no position. The backward pass turns back, in one launch too, and the gradient of a
prefix that the batch shares is summed over it in fp32, in a fixed order.

B rows of the batch, T tokens, K kinds of rows (queries, or keys; or keys and values), H heads of
width D, P tokens of the prefix. Saved for the backward pass: cos and sin. Everything is computed in
fp32 and rounded once. All is linear in rows, beside and prefix, so the derivative of the backward
pass is the op again.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
"""

from __future__ import annotations

import torch

from . import reference
from ._backends import Backend, launchers, uses_triton, without_autocast
from ._checks import check_rotary
from ._registration import Derivative, Op

Tensor = torch.Tensor


def _forward_triton(rows, cos, sin, beside, prefix):
    return launchers().launch_rotary(rows, cos, sin, beside, prefix)


def _forward_reference(rows, cos, sin, beside, prefix):
    # Autocast would join tensors in its own dtype.
    with without_autocast(rows.device):
        return reference.rotary(rows, cos, sin, beside, prefix)


def _forward_fake(rows, cos, sin, beside, prefix):
    batches, tokens, *row = rows.shape
    joint = tokens if beside is None else 2 * tokens
    return rows.new_empty(batches, joint if prefix is None else prefix.shape[-4] + joint, *row)


def _backward_triton(djoint, cos, sin, beside, shared):
    return launchers().launch_rotary_backward(djoint, cos, sin, beside, shared)


def _backward_reference(djoint, cos, sin, beside, shared):
    with without_autocast(djoint.device):
        return reference.rotary_backward(djoint, cos, sin, beside, shared)


def _backward_fake(djoint, cos, sin, beside, shared):
    batches, joint, *row = djoint.shape
    tokens = cos.shape[0]
    prefix = joint - (2 * tokens if beside else tokens)
    rows = batches, tokens, *row
    return (
        djoint.new_empty(rows),
        djoint.new_empty(rows if beside else (0,)),
        djoint.new_empty((prefix, *row) if shared else (batches, prefix, *row)),
    )


_forward = Op(
    "rotary(Tensor rows, Tensor cos, Tensor sin, Tensor? beside, Tensor? prefix) -> Tensor",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
)
_backward = Op(
    "rotary_backward(Tensor djoint, Tensor cos, Tensor sin, bool beside, bool shared)"
    " -> (Tensor drows, Tensor dbeside, Tensor dprefix)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _Rotary(Derivative):
    @staticmethod
    def forward(ctx, run, rows, cos, sin, beside, prefix):
        ctx.save_for_backward(cos, sin)
        ctx.parts = beside is not None, prefix is not None, prefix is not None and prefix.ndim == 4
        return run(rows, cos, sin, beside, prefix)

    @staticmethod
    def backward(ctx, djoint):
        beside, prefixed, shared = ctx.parts
        drows, dbeside, dprefix = _backward(djoint, *ctx.saved_tensors, beside, shared)
        parts = dbeside if beside else None, dprefix if prefixed else None
        return None, drows, None, None, *parts


@_backward.derivative
class _RotaryBackward(Derivative):
    @staticmethod
    def forward(ctx, run, djoint, cos, sin, beside, shared):
        ctx.save_for_backward(cos, sin)
        ctx.beside = beside
        return run(djoint, cos, sin, beside, shared)

    @staticmethod
    def backward(ctx, drows, dbeside, dprefix):
        beside = dbeside if ctx.beside else None
        joint = _forward(drows, *ctx.saved_tensors, beside, dprefix)
        return None, joint, None, None, None, None


def rotary(
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    beside: Tensor | None = None,
    prefix: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Rows turned by the angle of their token, for attention that sees how far apart two tokens
    are.

    Args:
        rows: ``[B, T, K, H, D]``, fp32, bf16 or fp16 (the reference takes fp64 too). K is 1,
            queries or keys, or 2, keys and values, of which values stay as they are. D is even, up
            to 256: column i makes a pair with column i + D / 2.
        cos, sin: ``[T, D / 2]``, of the angle of each token and pair, in fp32 (fp64 beside fp64).
            They get no gradient.
        beside: another row for each token and head, shaped as ``rows`` and turned by the same
            angles, which follows on the token's own: r_1, s_1, r_2, s_2, ...
        prefix: ``[P, K, H, D]``, the same for the whole batch, or ``[B, P, K, H, D]``: tokens
            before the others, not turned.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[B, P + T, K, H, D]``, with ``beside`` ``[B, P + 2 T, K, H, D]``, contiguous, in the dtype
        of rows, under autocast too, as elementwise functions of torch.

    Strides are free; the kernels copy only a tensor whose last axis is not contiguous.
    Differentiable in rows, beside and prefix, any number of times.

    Raises:
        TypeError: a tensor is not floating point or not strided.
        ValueError: the shapes, dtypes or devices are not as above, or cos or sin require a
            gradient.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_rotary(rows, cos, sin, beside, prefix)
    if not uses_triton(rows, backend):
        return _forward_reference(rows, cos, sin, beside, prefix)
    return _forward(rows, cos, sin, beside, prefix)
