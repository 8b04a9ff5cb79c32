r"""Attention of each query to the keys that were selected for it.

    s_tr = scale q_t . k_j(t,r)    lse_t = log sum_r exp(s_tr)    p_tr = exp(s_tr - lse_t)
    o_t  = sum_r p_tr v_j(t,r)     over the slots r of query t, j(t,r) the key in a slot

B sequences, H query heads of width D in groups that share a head of keys, K slots a query. The
backward pass recomputes p, with delta_t = sum_d do_t o_t - dlse_t:

    dp_tr = do_t . v_j    ds = p * (dp - delta)    dq_t = scale sum_r ds_tr k_j
    dk_j = scale sum_{t selects j} ds_tr q_t       dv_j = sum_{t selects j} p_tr do_t

Two paths compute this. *Queries* gathers the keys of one query after another, for all heads that
share them; its dk and dv go over the inverse of the selection, for each key its queries in their
order, which a stable sort makes. *Tiles* multiplies tiles of neighbouring queries and the union of
their keys on tensor cores, dk and dv tiles of keys and the union of their queries, of which several
programs take a part where it is long, and a bit for each query and key says which products count: T
Tkv / 8 bytes, in memory for a chunk of queries at a time. A bit cannot say how often: the kernel
that sets bits finds queries that name a key in several slots, and these are computed one by one, as
by queries. Either gives the same bits at every call: sums have a fixed order, floats no atomics.

Saved: the inputs, o in fp32, and two fp32 numbers for each row, its greatest score and one over the
sum below it. Products accumulate in fp32; p and ds are rounded to the inputs' dtype for the next
product, except by queries for dk and dv. The work follows ``count``, and no address is read that no
valid slot names.

Gated Sparse Attention, arXiv 2601.15305; Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import functools

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_dtype, check_option, checked_count
from .._core.precision import autocast, without_autocast
from .._core.registration import Derivative, Op
from ..common.checks import PATHS, Path, check_attention, check_selection, checked_scale
from . import launch, launch_backward, reference

Tensor = torch.Tensor


def _forward_triton(*arguments):
    o, lse, softmax, o_wide = launch.sparse_forward(*arguments)
    return o, lse, softmax, lse.new_empty(0) if o_wide is None else o_wide


def _forward_reference(q, k, v, indices, count, scale, path):
    o, lse = reference.sparse_attention_with_lse(q, k, v, indices, count, scale=scale)
    # The reference's backward pass needs nothing of the forward's.
    return o, lse, *(x.zero_() for x in _forward_fake(q, k, v, indices, count, scale, path)[2:])


def _forward_fake(q, k, v, indices, count, scale, path):
    batches, queries, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty(q.shape),
        q.new_empty((batches, heads, queries), dtype=wide),
        q.new_empty((2, batches, heads, queries), dtype=torch.float32),
        q.new_empty(q.shape if q.dtype.itemsize < 4 else (0,), dtype=torch.float32),
    )


def _backward_reference(do, dlse, q, k, v, indices, count, o, softmax, scale, path):
    grads = reference.sparse_attention_backward(do, dlse, q, k, v, indices, count, scale=scale)
    return tuple(grad.contiguous() for grad in grads)


def _backward_fake(do, dlse, q, k, v, indices, count, o, softmax, scale, path):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


_forward = Op(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor? count, float scale,"
    " str path) -> (Tensor o, Tensor lse, Tensor softmax, Tensor o_wide)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=functools.partial(launch.sparse_forward, keep=False),
)
_backward = Op(
    "sparse_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v,"
    " Tensor indices, Tensor? count, Tensor o, Tensor softmax, float scale,"
    " str path) -> (Tensor dq, Tensor dk, Tensor dv)",
    triton=launch_backward.sparse_backward,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _SparseAttention(Derivative):
    @staticmethod
    def forward(ctx, run, q, k, v, indices, count, scale, path):
        o, lse, softmax, o_wide = run(q, k, v, indices, count, scale, path)
        precise = o_wide if q.dtype.itemsize < 4 else o
        ctx.save_for_backward(q, k, v, indices, count, precise, softmax)
        ctx.scale, ctx.path = scale, path
        ctx.set_materialize_grads(False)
        return o, lse, *_forward.statistics(ctx, run, softmax, o_wide)

    @staticmethod
    def backward(ctx, do, dlse, *_):
        if do is None and dlse is None:
            return (None,) * 8
        q, *others = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(q)
        grads = _backward(do, dlse, q, *others, ctx.scale, ctx.path)
        return None, *grads, None, None, None, None


# o and softmax follow from the inputs, and have no gradients of their own.
_backward.derivative_of_reference("o", "softmax")


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    path: Path = "auto",
    dense_below: int = 0,
    check: bool = False,
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
            slot whose index is below 0 or not below Tkv holds no key. Each slot is an entry of the
            softmax: a key that a query names twice counts twice, in o, lse and all gradients.
        count: how many of the first slots count, ``[B, T]`` or ``[B, H, T]`` as indices is; None:
            all. The work follows it, and what later slots hold is not looked at.
        mask: which slots count, True or above 0.5, in the shape of indices; None: all.
        scale: factor of the scores, positive; None takes 1 / sqrt(D).
        path: "queries" gathers the keys of each query, "tiles" multiplies tiles of queries and the
            union of their keys. "auto" chooses once for all passes of a call, by the sizes and the
            GPU's compute capability, as if neighbouring queries had five keys of eight in common;
            it may gather for o and dq and multiply tiles for dk and dv. The rates are in
            ``sparse/launch_paths.py``: on an H200 tiles for o where T is about below 130 K Hkv / H.
            Where neighbouring queries have more in common, "tiles" pays for longer sequences too;
            queries that name a key in several slots gain nothing by it. A key or value with an
            infinity or a NaN reaches by tiles neighbouring queries that have not selected it, and
            all in the reference, which has no paths.
        dense_below: where Tkv is below it, the selection is set aside and each query attends to all
            keys up to its position, the last query at the last key's: dense causal
            attention, another function than the selection's. 0: never.
        check: look at the selection, and refuse what is seldom meant: indices below -1 or not
            below Tkv, and keys that a query names twice, in the slots that count. This waits for
            the GPU, and is for debugging.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve. The reference holds all scores.

    Returns:
        ``[B, T, H, D]``, contiguous, in q's dtype. Zero, with gradients of zero, for a query
        without keys. A score of -inf weighs nothing, and a query without any other is one without
        keys; a score that is inf or NaN makes its query NaN. Nothing here is causal: a query
        attends to what was selected for it.

    fp32 products are exact unless torch multiplies fp32 matrices in TF32
    (``torch.backends.cuda.matmul.fp32_precision``). Differentiable in q, k and v, twice; the second
    derivative runs in plain torch and holds all scores.

    Raises:
        TypeError: q, k or v is not floating point, indices or count not int32 or int64, mask
            neither boolean nor floating point, or scale is no number.
        ValueError: the shapes, dtypes or devices are not as above, scale is out of its range, path
            is none of the three, dense_below negative or set for more queries than keys; or
            ``check`` refuses the selection.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    return _attention(q, k, v, indices, count, mask, scale, path, dense_below, check, backend)[0]


def sparse_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    path: Path = "auto",
    dense_below: int = 0,
    check: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`sparse_attention` and the log-sum-exp of its scores.

    Args:
        q, k, v, indices, count, mask, scale, path, dense_below, check, backend: as in
            :func:`sparse_attention`.

    Returns:
        The pair ``(o, lse)``; lse ``[B, H, T]`` in fp32 (fp64 for fp64 inputs), natural logarithm,
        -inf for a query without keys. Both are differentiable in q, k and v.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sparse_attention`.
    """
    return _attention(q, k, v, indices, count, mask, scale, path, dense_below, check, backend)


def _attention(q, k, v, indices, count, mask, scale, path, dense_below, check, backend):
    check_attention(q, k, v)
    check_selection(q, indices, count, mask)
    check_option("path", path, PATHS)
    dense = checked_dense_below(dense_below, q, k)
    scale = checked_scale(scale, q.shape[-1])
    q, k, v = autocast(q, k, v)
    check_dtype("k", k, "q", q)
    check_dtype("v", v, "q", q)
    serves = uses_triton(q, backend)
    if dense:
        chosen = causal_selection(q.shape[0], q.shape[1], k.shape[1], q.device)
        indices, count = (x.unsqueeze(1) for x in chosen)
    else:
        indices, count = of_heads(indices, count, mask)
        if check:
            check_selected(indices, count, k.shape[1])
    if not serves:
        with without_autocast(q.device):
            return reference.sparse_attention_with_lse(q, k, v, indices, count, scale=scale)
    return _forward(q, k, v, indices, count, scale, path)[:2]


def checked_dense_below(dense_below: int, q: Tensor, k: Tensor) -> bool:
    """Whether attention to these keys is to be dense."""
    checked_count("dense_below", dense_below, lowest=0)
    if not dense_below or k.shape[1] >= dense_below:
        return False
    if q.shape[1] > k.shape[1]:
        raise ValueError(
            f"dense_below asks for as many keys as queries at least, got {q.shape[1]} queries and "
            f"{k.shape[1]} keys"
        )
    return True


def check_selected(indices: Tensor, count: Tensor | None, keys: int) -> None:
    """In the slots that count, of indices [B, R, T, K], must be keys or -1, and no key twice."""
    slot = torch.arange(indices.shape[-1], device=indices.device)
    counts = slot < (indices.shape[-1] if count is None else count.unsqueeze(-1))
    outside = counts & ((indices < -1) | (indices >= keys))
    for place in outside.nonzero()[:1].tolist():  # sync: check=True says that it waits
        index = indices[tuple(place)].item()  # sync: of what is about to be refused
        raise ValueError(
            f"indices must be from -1 to {keys - 1}, got {index} at [batch, head, query, slot] "
            f"{place}"
        )
    # Slots without a key get numbers that differ from each other.
    ordered = torch.where(counts & (indices >= 0), indices, -1 - slot).sort(-1).values
    twice = (ordered.diff(dim=-1) == 0).nonzero()[:1]
    for batch, head, query, slot in twice.tolist():  # sync: as above
        key = ordered[batch, head, query, slot].item()  # sync: of what is about to be refused
        raise ValueError(
            f"the keys of a query must differ, got {key} twice at [batch, head, query] "
            f"{[batch, head, query]}"
        )


def causal_selection(
    batches: int, queries: int, keys: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """All keys up to a query's position, the last query at the last key's: one row of indices,
    expanded to every query, which counts as many of them as it sees.
    """
    number = torch.arange(keys + 1, dtype=torch.int32, device=device)
    indices = number[:keys].expand(batches, queries, keys)
    return indices, number[keys - queries + 1 :].expand(batches, queries)


def of_heads(
    indices: Tensor, count: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The selection as ``[B, 1 or H, T, K]``, -1 in the slots that the mask leaves out."""
    if mask is not None:
        indices = torch.where(mask if mask.dtype == torch.bool else mask > 0.5, indices, -1)
    if indices.ndim == 3:
        return indices.unsqueeze(1), None if count is None else count.unsqueeze(1)
    return indices, count
