r"""Attention of each query to the keys that were selected for it.

    s_tr = scale q_t . k_j(t,r)    lse_t = log sum_r exp(s_tr)    p_tr = exp(s_tr - lse_t)
    o_t  = sum_r p_tr v_j(t,r)     over the slots r of query t, j(t,r) the key in a slot

B sequences, H query heads of width D in groups that share a head of keys, K slots a query. The
backward pass computes p anew, with delta_t = sum_d do_t o_t - dlse_t:

    dp_tr = do_t . v_j    ds = p * (dp - delta)    dq_t = scale sum_r ds_tr k_j
    dk_j = scale sum_{t selects j} ds_tr q_t       dv_j = sum_{t selects j} p_tr do_t

The sums of dk and dv go over the inverse of the selection, for each key its queries in their order,
which a stable sort makes: same inputs, same bits, without atomics. Saved: the inputs, o in fp32,
and two fp32 numbers for each row, its greatest score and one over the sum below it. Products
accumulate in fp32; p, and ds of dq, are rounded to the inputs' dtype for the next product. The work
follows ``count``, and no address is read that no valid slot names.

Gated Sparse Attention, arXiv 2601.15305; Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import torch

from . import reference
from ._backends import Backend, launchers, uses_triton, without_autocast
from ._checks import cast, check_attention, check_same_dtype, check_selection, checked_scale
from ._registration import Derivative, Op, second_order

Tensor = torch.Tensor


def _forward_triton(*arguments):
    o, lse, softmax, o_wide = launchers().launch_sparse(*arguments)
    return o, lse, softmax, lse.new_empty(0) if o_wide is None else o_wide


def _forward_untracked(*arguments):
    return launchers().launch_sparse(*arguments, keep=False)


def _forward_reference(q, k, v, indices, count, scale):
    o, lse = reference.sparse_attention_with_lse(q, k, v, indices, count, scale=scale)
    # The reference's backward pass needs nothing of the forward's.
    return o, lse, *(x.zero_() for x in _forward_fake(q, k, v, indices, count, scale)[2:])


def _forward_fake(q, k, v, indices, count, scale):
    batches, queries, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty(q.shape),
        q.new_empty((batches, heads, queries), dtype=wide),
        q.new_empty((2, batches, heads, queries), dtype=torch.float32),
        q.new_empty(q.shape if q.dtype.itemsize < 4 else (0,), dtype=torch.float32),
    )


def _backward_triton(do, dlse, q, k, v, indices, count, o, softmax, scale):
    return launchers().launch_sparse_backward(do, dlse, q, k, v, indices, count, o, softmax, scale)


def _backward_reference(do, dlse, q, k, v, indices, count, o, softmax, scale):
    found = reference.sparse_attention_backward(do, dlse, q, k, v, indices, count, scale=scale)
    return tuple(x.contiguous() for x in found)


def _backward_fake(do, dlse, q, k, v, indices, count, o, softmax, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


_forward = Op(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor? count, float scale)"
    " -> (Tensor o, Tensor lse, Tensor softmax, Tensor o_wide)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
    untracked=_forward_untracked,
)
_backward = Op(
    "sparse_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v,"
    " Tensor indices, Tensor? count, Tensor o, Tensor softmax, float scale)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _SparseAttention(Derivative):
    @staticmethod
    def forward(ctx, run, q, k, v, indices, count, scale):
        o, lse, softmax, o_wide = run(q, k, v, indices, count, scale)
        precise = o_wide if q.dtype.itemsize < 4 else o
        ctx.save_for_backward(q, k, v, indices, count, precise, softmax)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return o, lse, *_forward.statistics(ctx, run, softmax, o_wide)

    @staticmethod
    def backward(ctx, do, dlse, *_):
        if do is None and dlse is None:
            return (None,) * 7
        q, *others = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(q)
        grads = _backward(do, dlse, q, *others, ctx.scale)
        return None, *grads, None, None, None


@_backward.derivative
class _SparseAttentionBackward(Derivative):
    @staticmethod
    def forward(ctx, run, do, dlse, q, k, v, indices, count, o, softmax, scale):
        ctx.save_for_backward(do, dlse, q, k, v, indices, count)
        ctx.scale = scale
        return run(do, dlse, q, k, v, indices, count, o, softmax, scale)

    @staticmethod
    def backward(ctx, *cotangents):
        *inputs, indices, count = ctx.saved_tensors

        def backward(do, dlse, q, k, v):
            return _backward_reference(do, dlse, q, k, v, indices, count, None, None, ctx.scale)

        # o and softmax stand for what the inputs say, and have no gradients of their own.
        grads = second_order(backward, inputs, cotangents)
        return None, *grads, None, None, None, None, None


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scale q k^T) v for each query and head, over the keys selected for the query.

    Args:
        q: ``[B, T, H, D]``, D from 1 to 256; fp32, bf16 or fp16 (the reference takes fp64 too). Any
            strides; only a tensor whose last axis is not contiguous is copied. Under autocast q, k
            and v are cast to its dtype.
        k, v: ``[B, Tkv, Hkv, D]``, in q's dtype; H is a multiple of Hkv, and each head of keys
            serves H / Hkv neighbouring query heads.
        indices: int32 or int64, ``[B, T, K]``, one selection for all heads, or ``[B, H, T, K]``. A
            slot whose index is below 0 or not below Tkv holds no key. The keys of a query should
            differ: one that is named twice counts twice.
        count: how many of the first slots count, ``[B, T]`` or ``[B, H, T]`` as indices is; None:
            all. The work follows it, and what later slots hold is not looked at.
        mask: which slots count, True or above 0.5, in the shape of indices; None: all.
        scale: factor of the scores, positive; None takes 1 / sqrt(D).
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve. The reference holds all scores.

    Returns:
        ``[B, T, H, D]``, contiguous, in q's dtype. Zero, with gradients of zero, for a query
        without keys. Nothing here is causal: a query attends to what was selected for it.

    fp32 products are exact unless torch multiplies fp32 matrices in TF32
    (``torch.backends.cuda.matmul.fp32_precision``). Differentiable in q, k and v, twice; the second
    derivative runs in plain torch and holds all scores.

    Raises:
        TypeError: q, k or v is not floating point, indices or count not int32 or int64, mask
            neither boolean nor floating point, or scale is no number.
        ValueError: the shapes, dtypes or devices are not as above, or scale is out of its range.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    return _attention(q, k, v, indices, count, mask, scale, backend)[0]


def sparse_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`sparse_attention` and the log-sum-exp of its scores.

    Args:
        q, k, v, indices, count, mask, scale, backend: as in :func:`sparse_attention`.

    Returns:
        The pair ``(o, lse)``; lse ``[B, H, T]`` in fp32 (fp64 for fp64 inputs), natural logarithm,
        -inf for a query without keys. Both are differentiable in q, k and v.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sparse_attention`.
    """
    return _attention(q, k, v, indices, count, mask, scale, backend)


def _attention(q, k, v, indices, count, mask, scale, backend):
    check_attention(q, k, v)
    check_selection(q, indices, count, mask)
    scale = checked_scale(scale, q.shape[-1])
    q, k, v = cast(q), cast(k), cast(v)
    check_same_dtype(q, ("k", k), ("v", v))
    indices, count = of_heads(indices, count, mask)
    if not uses_triton(q, backend):
        with without_autocast(q.device):
            return reference.sparse_attention_with_lse(q, k, v, indices, count, scale=scale)
    return _forward(q, k, v, indices, count, scale)[:2]


def of_heads(
    indices: Tensor, count: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The selection as ``[B, 1 or H, T, K]``, -1 in the slots that the mask leaves out."""
    if mask is not None:
        indices = torch.where(mask if mask.dtype == torch.bool else mask > 0.5, indices, -1)
    if indices.ndim == 3:
        return indices.unsqueeze(1), None if count is None else count.unsqueeze(1)
    return indices, count
