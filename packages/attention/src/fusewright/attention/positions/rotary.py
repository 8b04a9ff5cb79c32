r"""Rotary positions: pairs of columns of queries and keys, rotated by the angle of their token.

    r'_i         = r_i cos_ti - r_{i + D/2} sin_ti              i < D/2
    r'_{i + D/2} = r_{i + D/2} cos_ti + r_i sin_ti

A rotation keeps lengths. With angles in proportion to the position t, a product q' . k' depends on
the distance of the two tokens alone.

The same launch builds the sequence that is attended to: it interleaves the rows with a second
operand, r_1, s_1, r_2, s_2, ..., and puts a prefix before them, which has no position. The backward
pass rotates back, in one launch too, and sums the gradient of a prefix that the batch shares over
the batch in fp32, in a fixed order.

B rows of the batch, T tokens, K rows (queries, or keys; or keys and values), H heads of
width D, P tokens of the prefix. Saved for the backward pass: cos and sin. Everything is computed in
fp32 and rounded once. All is linear in rows, beside and prefix, so the derivative of the backward
pass is the op again.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_device, check_dtype, check_floating, check_same
from .._core.precision import wide_dtype, without_autocast
from .._core.registration import Derivative, Op
from . import launch, reference

MAX_WIDTH = 256

Tensor = torch.Tensor


def _forward_reference(rows, cos, sin, beside, prefix):
    # Under autocast torch.cat and torch.stack would return another dtype.
    with without_autocast(rows.device):
        return reference.rotary(rows, cos, sin, beside, prefix)


def _forward_fake(rows, cos, sin, beside, prefix):
    batches, tokens, *row = rows.shape
    joint = tokens if beside is None else 2 * tokens
    return rows.new_empty(batches, joint if prefix is None else prefix.shape[-4] + joint, *row)


def _backward_reference(djoint, cos, sin, beside, shared):
    with without_autocast(djoint.device):
        return reference.rotary_backward(djoint, cos, sin, beside, shared)


def _backward_fake(djoint, cos, sin, beside, shared):
    batches, joint, *row = djoint.shape
    tokens = cos.shape[-2]
    prefix = joint - (2 * tokens if beside else tokens)
    rows = batches, tokens, *row
    return (
        djoint.new_empty(rows),
        djoint.new_empty(rows if beside else (0,)),
        djoint.new_empty((prefix, *row) if shared else (batches, prefix, *row)),
    )


_forward = Op(
    "rotary(Tensor rows, Tensor cos, Tensor sin, Tensor? beside, Tensor? prefix) -> Tensor",
    triton=launch.rotary_forward,
    reference=_forward_reference,
    fake=_forward_fake,
)
_backward = Op(
    "rotary_backward(Tensor djoint, Tensor cos, Tensor sin, bool beside, bool shared)"
    " -> (Tensor drows, Tensor dbeside, Tensor dprefix)",
    triton=launch.rotary_backward,
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
    """Rows rotated by the angle of their token, for attention that depends on the distance of two
    tokens.

    Args:
        rows: ``[B, T, K, H, D]``, fp32, bf16 or fp16 (the reference takes fp64 too). K is 1,
            queries or keys, or 2, keys and values, of which values stay as they are. D is even, up
            to 256: column i makes a pair with column i + D / 2.
        cos, sin: ``[T, D / 2]``, or ``[B, T, D / 2]`` for rows of the batch with positions of their
            own, of the angle of each token and pair, in fp32 (fp64 beside fp64). They get no
            gradient.
        beside: a second row for each token and head, shaped as ``rows`` and rotated by the same
            angles, interleaved with the first: r_1, s_1, r_2, s_2, ...
        prefix: ``[P, K, H, D]``, the same for the whole batch, or ``[B, P, K, H, D]``: tokens
            before the others, not rotated.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[B, P + T, K, H, D]``, with ``beside`` ``[B, P + 2 T, K, H, D]``, contiguous, in the dtype
        of rows, under autocast too, as elementwise functions of torch.

    Any strides; the kernels copy only a tensor whose last axis is not contiguous.
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


def check_rotary(
    rows: Tensor, cos: Tensor, sin: Tensor, beside: Tensor | None, prefix: Tensor | None
) -> None:
    """rows and beside must be [B, T, 1 or 2, H, D], prefix as much for other tokens, and cos and
    sin [T, D / 2] or [B, T, D / 2], which get no gradient.
    """
    check_floating("rows", rows)
    if rows.ndim != 5 or rows.shape[2] not in (1, 2):
        raise ValueError(
            f"rows must be [batch, tokens, 1 or 2, heads, width], got {tuple(rows.shape)}"
        )
    batches, tokens, *row = rows.shape
    width = row[-1]
    if width % 2 or not 0 < width <= MAX_WIDTH:
        raise ValueError(f"the width of a head must be even and up to {MAX_WIDTH}, got {width}")
    angles = wide_dtype(rows)
    for name, x in (("cos", cos), ("sin", sin)):
        check_floating(name, x)
        if x.dtype != angles:
            raise ValueError(f"{name} must be {angles} with rows of {rows.dtype}, got {x.dtype}")
        check_device(name, x, "rows", rows)
        if tuple(x.shape) not in ((tokens, width // 2), (batches, tokens, width // 2)):
            raise ValueError(
                f"{name} must be [{tokens}, {width // 2}] or [{batches}, {tokens}, {width // 2}], "
                f"got {tuple(x.shape)}"
            )
        if x.requires_grad:
            raise ValueError(f"{name} gets no gradient, and must not require one")
    if cos.shape != sin.shape:
        raise ValueError(f"sin must be shaped as cos {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if beside is not None:
        check_same("beside", beside, "rows", rows)
    if prefix is not None:
        check_floating("prefix", prefix)
        check_dtype("prefix", prefix, "rows", rows)
        check_device("prefix", prefix, "rows", rows)
        fits = prefix.shape[-3:] == rows.shape[-3:]
        if not fits or prefix.ndim not in (4, 5) or (prefix.ndim == 5 and len(prefix) != batches):
            raise ValueError(
                f"prefix must be [P, {', '.join(map(str, row))}] or so for each of {batches} rows "
                f"of the batch, got {tuple(prefix.shape)}"
            )
