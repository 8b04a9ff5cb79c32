r"""Scores of the gated indexer: how relevant each key is to each query, by a few small heads that
have one key in common.

    z_ths = scale q_th . k_s + b_h
    I_ts  = sum_h sigmoid(w_th) sigmoid(z_ths)    for the keys s that t sees, else -inf

B sequences, H heads of width d. A row sees the keys up to its position, of its own document where
there are several. These scores are between 0 and H. With the gradient G of the scores:

    dw_th = sigmoid'(w_th) sum_s G_ts sigmoid(z_ths)    dz_ths = G_ts sigmoid(w_th) sigmoid'(z_ths)
    dq_th = scale sum_s dz_ths k_s    dk_s = scale sum_th dz_ths q_th    db_h = sum_ts dz_ths

The indexer of DeepSeek-V3.2-Exp is another form, with weights of either sign:

    I_ts = H^(-1/2) sum_h w_th relu(scale q_th . k_s + b_h)    scale = d^(-1/2), b_h = 0

Saved for the backward pass: the inputs. Products accumulate in fp32 and everything else is fp32;
dz is rounded to the inputs' dtype for the next product. Sums have a fixed order: same inputs, same
bits.

Gated Sparse Attention, arXiv 2601.15305; DeepSeek-V3.2-Exp, equation 1 and, for the scales, class
Indexer in inference/model.py of its public repository.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_dtype
from .._core.precision import autocast, without_autocast
from .._core.registration import Derivative, Op
from ..common.checks import Form, check_indexer, checked_offset, checked_scale, weights_of_form
from ..common.ranges import checked_ranges
from . import launch, reference

Tensor = torch.Tensor


def _scores_fake(q, k, *_):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:2], k.shape[1]), dtype=wide)


def _backward_fake(dscores, q, k, w, bias, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, w, bias))


_OPERANDS = "Tensor q, Tensor k, Tensor w, Tensor bias, Tensor? ranges"
_OPTIONS = "float scale, bool causal, int q_offset, str form"
_scores = Op(
    f"gated_indexer({_OPERANDS}, {_OPTIONS}) -> Tensor",
    triton=launch.scores_forward,
    reference=reference.gated_indexer,
    fake=_scores_fake,
)
_backward = Op(
    f"gated_indexer_backward(Tensor dscores, {_OPERANDS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dw, Tensor dbias)",
    triton=launch.scores_backward,
    reference=reference.gated_indexer_backward,
    fake=_backward_fake,
)


@_scores.derivative
class _GatedIndexer(Derivative):
    @staticmethod
    def forward(ctx, run, *arguments):
        ctx.save_for_backward(*arguments[:5])
        ctx.options = arguments[5:]
        return run(*arguments)

    @staticmethod
    def backward(ctx, dscores):
        grads = _backward(dscores, *ctx.saved_tensors, *ctx.options)
        return None, *grads, *(None,) * (1 + len(ctx.options))


_backward.derivative_of_reference()


def gated_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    form: Form = "gated",
    backend: Backend = "auto",
) -> Tensor:
    """sum_h sigmoid(w_h) sigmoid(scale q_h k^T + b_h): the indexer's score of every query and key.

    All scores are held: this is for small sequences and for looking at what an indexer does.
    :func:`indexer_topk` selects by the same scores and holds none of them.

    Args:
        q: ``[B, Tq, H, d]``, H >= 1, d from 1 to 256; fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides; only a tensor whose last axis is not contiguous is copied. Under
            autocast q and k are cast to its dtype.
        k: ``[B, Tkv, d]``, one key for all heads, in q's dtype.
        w: ``[B, Tq, H]``, the heads' gates before their sigmoid, of any of these dtypes.
        bias: ``[H]``, of any of these dtypes.
        scale: factor of the products, positive; None takes 1 / sqrt(d).
        causal: whether a row sees only the keys at its position and before it.
        q_offset: the position of the first row, 0 or more, however much.
        cu_seqlens: ``[N + 1]``, int32 or int64, where documents of different lengths begin and end
            that lie one after the other in the only row of keys: from 0 to Tkv, never decreasing; a
            number out of range or order counts as the nearest that is not. A row sees keys of the
            document at its position alone, and none where there is no document.
        key_ranges: ``[B, Tq, 2]``, int32 or int64, in place of cu_seqlens: of the keys that it
            would see, a row sees those from the first number to before the second. Keys are skipped
            by whole tiles where neither number decreases from row to row.
        form: "gated", or "relu" for H^(-1/2) sum_h w_h relu(scale q_h k^T + b_h), whose w is taken
            as it is, of either sign: the indexer of DeepSeek-V3.2-Exp, with a bias of zeros.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[B, Tq, Tkv]``, contiguous, in fp32 (fp64 for fp64 inputs), under autocast too; -inf where
        a row does not see a key. Keys that are not seen may hold anything.

    fp32 products are exact unless torch multiplies fp32 matrices in TF32
    (``torch.backends.cuda.matmul.fp32_precision``). Differentiable in q, k, w and bias, twice; the
    second derivative runs in plain torch. The gradient of a score of -inf is not read.

    Raises:
        TypeError: a tensor is not floating point or not strided, cu_seqlens or key_ranges does not
            hold integers, or an option is no number.
        ValueError: the shapes, dtypes or devices are not as above, or an option is out of its
            range.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_indexer(q, k, w, bias)
    scale = checked_scale(scale, q.shape[-1])
    q_offset = checked_offset(q_offset, k.shape[1])
    w = weights_of_form(w, form)
    ranges = checked_ranges(cu_seqlens, key_ranges, q, k.shape[1], q_offset)
    q, k = autocast(q, k)
    check_dtype("k", k, "q", q)
    options = (scale, bool(causal), q_offset, form)
    if not uses_triton(q, backend):
        with without_autocast(q.device):
            return reference.gated_indexer(q, k, w, bias, ranges, *options)
    return _scores(q, k, w, bias, ranges, *options)
