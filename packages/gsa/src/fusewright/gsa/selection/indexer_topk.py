r"""The keys that each query selects by its indexer's scores, without holding the scores.

    n_t   = keys that row t sees              var_t = variance of I_ts over these n_t keys alone
    k_t   = clamp(floor(k_base f_t), k_min, k_max), and not above n_t
    f_t   = 1/2 + 1 / (1 + r_t)   "inverse"   spread-out scores need fewer keys
            r_t                   "proportional"
            1/2 + H_t             "entropy"   H_t: entropy of softmax(I_t) over log(n_t + 1)
            1                     "fixed"
    r_t   = var_t / variance_ema, or 1 where there is no average yet

A row selects its first ``sinks`` keys, the ``window`` last that it sees, its own among them, and,
by score, the greatest of the others: k_t in all. The scores I are
those of :func:`gated_indexer`; they are computed for a part of the rows at a time, into memory that
the next part overwrites, so that the cost in memory does not grow with T^2. The selection is exact
and the same at every call: ties go to the lowest index.

Gated Sparse Attention, arXiv 2601.15305.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_device, check_dtype, check_floating
from .._core.precision import autocast, without_autocast
from .._core.registration import Derivative, Op, empty_grad
from ..common.checks import (
    Form,
    Law,
    check_indexer,
    check_law,
    checked_offset,
    checked_scale,
    weights_of_form,
)
from ..common.ranges import checked_ranges
from . import launch, reference

Tensor = torch.Tensor


class SelectionStats(NamedTuple):
    """What a selection knows of its rows, ``[B, Tq]`` in fp32 (fp64 for fp64 inputs): the
    population variance of the scores that a row sees, and, for the law "entropy" alone, the entropy
    of their softmax over log(n + 1).
    """

    variance: Tensor
    entropy: Tensor | None


def _topk_triton(*arguments):
    indices, count, variance, entropy = launch.select_keys(*arguments)
    return indices, count, variance, empty_grad(variance) if entropy is None else entropy


def _topk_reference(q, k, w, bias, ranges, variance_ema, scale, law, *options):
    operands = q, k, w, bias, ranges, variance_ema
    *outputs, entropy = reference.indexer_topk(*operands, scale, law, *options)
    return *outputs, entropy if law == "entropy" else empty_grad(entropy)


def _topk_fake(q, k, w, bias, ranges, variance_ema, scale, law, k_base, k_min, k_max, *_):
    rows, wide = q.shape[:2], torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty((*rows, k_max), dtype=torch.int32),
        q.new_empty(rows, dtype=torch.int32),
        q.new_empty(rows, dtype=wide),
        q.new_empty(rows if law == "entropy" else (0,), dtype=wide),
    )


_topk = Op(
    "indexer_topk(Tensor q, Tensor k, Tensor w, Tensor bias, Tensor? ranges,"
    " Tensor? variance_ema, float scale, str law, int k_base, int k_min, int k_max, int sinks,"
    " int window, bool causal, int q_offset, str form)"
    " -> (Tensor indices, Tensor count, Tensor variance, Tensor entropy)",
    triton=_topk_triton,
    reference=_topk_reference,
    fake=_topk_fake,
)


@_topk.derivative
class _IndexerTopk(Derivative):
    """A selection has no gradient."""

    @staticmethod
    def forward(ctx, run, *arguments):
        outputs = run(*arguments)
        ctx.mark_non_differentiable(*outputs)
        ctx.inputs = 1 + len(arguments)
        return outputs

    @staticmethod
    def backward(ctx, *_):
        return (None,) * ctx.inputs


def indexer_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    *,
    k_base: int,
    k_min: int,
    k_max: int,
    law: Law = "inverse",
    sinks: int = 0,
    window: int = 0,
    variance_ema: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    form: Form = "gated",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, SelectionStats]:
    """Select for each query the keys with the greatest scores of :func:`gated_indexer`.

    Args:
        q, k, w, bias, scale, causal, q_offset, cu_seqlens, key_ranges, form, backend: as in
            :func:`gated_indexer`.
        k_base: how many keys a typical row selects, before the law, 1 or more.
        k_min, k_max: the fewest and the most keys of a row that sees as many, 1 <= k_min <= k_max;
            k_max may pass Tkv.
        law: how the number of a row's keys follows from its scores: "inverse" (fewer where they are
            spread out), "proportional", "entropy" or "fixed".
        sinks: this many of the first keys that a row may see, those of its document, are selected
            by it, 0 to k_min.
        window: this many last keys up to a row's own, which is one of them, are selected by it, 0
            to k_min - sinks; with ``key_ranges`` the last that it sees. Above 0 only with these or
            ``causal``. Like the sinks they count among its k.
        variance_ema: one number in fp32 on q's device, an average of the variances of earlier calls
            for the laws "inverse" and "proportional". Where it is None, or not positive, every row
            counts as typical: a mean over the rows of this call would make early rows depend on
            later ones. It is read on the device alone.

    Returns:
        ``(indices, count, stats)``: indices ``[B, Tq, k_max]`` in int32, the first ``count`` of a
        row ascending and no two the same, the rest -1; count ``[B, Tq]`` in int32; stats, see
        :class:`SelectionStats`. A row selects no key that it does not see, and all where it sees no
        more than its law gives it. A score that is NaN counts as 0, in the variance too; a head
        whose w, bias or product with a key is -inf adds 0 to the score.

    The kernels select from their own fp32 scores, exactly, and hold a few rows of them at a time;
    the reference holds all. Two backends may order keys differently whose scores differ by
    rounding. A call that is cut into parts by ``q_offset`` selects the same. There is no gradient.

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
    check_law(law, k_base, k_min, k_max, sinks, window)
    if window and not causal and key_ranges is None:
        raise ValueError(f"window must be 0 without causal or key_ranges, got {window}")
    check_ema(variance_ema, q)
    w = weights_of_form(w, form)
    ranges = checked_ranges(cu_seqlens, key_ranges, q, k.shape[1], q_offset)
    q, k = autocast(q, k)
    check_dtype("k", k, "q", q)
    operands = (q, k, w, bias, ranges, variance_ema)
    options = (scale, law, k_base, k_min, k_max, sinks, window, bool(causal), q_offset, form)
    if uses_triton(q, backend):
        outputs = _topk(*operands, *options)
    else:
        with torch.no_grad(), without_autocast(q.device):
            outputs = _topk_reference(*operands, *options)
    indices, count, variance, entropy = outputs
    return indices, count, SelectionStats(variance, entropy if law == "entropy" else None)


def check_ema(variance_ema: Tensor | None, q: Tensor) -> None:
    """variance_ema must be one fp32 number on q's device."""
    if variance_ema is None:
        return
    check_floating("variance_ema", variance_ema)
    if variance_ema.ndim or variance_ema.dtype != torch.float32:
        raise ValueError(
            f"variance_ema must be one number in float32, got {tuple(variance_ema.shape)} "
            f"in {variance_ema.dtype}"
        )
    check_device("variance_ema", variance_ema, "q", q)
