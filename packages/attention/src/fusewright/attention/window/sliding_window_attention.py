r"""Attention of a sequence to a window of itself and to a prefix: softmax(scale q k^T) v for each
head, over the keys that a row sees.

Row t of T sees key j where j < prefix, or where prefix <= j and t - window < j <= t:

    s_tj = scale q_t . k_j      lse_t = log (sum_{j seen} exp(s_tj) + exp(sink))
    p_tj = exp(s_tj - lse_t)    o_t = sum_{j seen} p_tj v_j

So a row past the prefix sees all of the prefix and exactly ``window`` keys past it, itself the last
(fewer near the start of the sequence), and a row of the prefix sees the prefix alone, in both
directions. There may be fewer queries than rows: query i is the last of the i-th ``every`` rows.
Of a sequence that is packed from documents, a row sees the prefix and of the keys behind it those
of its own document, t - window < j <= t; a row of padding sees nothing: o is 0, lse minus infinity.

There is no mask in memory: a program multiplies a tile of queries with the tiles of keys that its
rows see, and masks only those at the ends of the band. Time grows as T (prefix + window), memory as
T. A tile is of one document, so that documents cost what they would cost alone, and give the same
bits.

Keys and values may have fewer heads than queries, G of H: head h of the queries reads head
h // (H / G). A head may have a sink, a score that takes part in the softmax and has no value;
without one, exp(sink) is 0.

The backward pass recomputes p, with delta_t = sum_d do_td o_td - dlse_t:

    dp = do v^T    ds = p * (dp - delta)    dq = scale ds k    dk = scale ds^T q    dv = p^T do

    dsink = -sum_t exp(sink - lse_t) delta_t

and sums dk and dv over the queries of all heads that read a key, in their order.

Saved for it: q, k, v, the bounds of documents, o, what its rounding took (o_low, ``rest`` in the
schema, in four bits a number), and two fp32 numbers for each row, the greatest score and one over
the sum below it. Products accumulate in fp32 and the softmax is fp32; its probabilities, and ds,
are rounded to the inputs' dtype for the next product. Outputs are rounded once. Sums have a fixed
order: same inputs, same bits.

Beltagy, Peters and Cohan, arXiv 2004.05150; Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.precision import without_autocast
from .._core.registration import Op, empty_grad
from ..common.checks import (
    check_attention,
    check_documents,
    check_key_lengths,
    check_sinks,
    prepared,
)
from ..common.derivative import give_derivative
from ..common.outputs import new_gradients, new_outputs, outputs_of_launch, outputs_of_reference
from . import launch, reference
from .documents import bounds_of

Tensor = torch.Tensor


def _forward_triton(q, k, v, bounds, sinks, window, prefix, every, scale, with_lse):
    band = launch.Band(window, prefix, every)
    return outputs_of_launch(
        q, launch.attention_forward(q, k, v, bounds, sinks, band, scale, with_lse)
    )


def _forward_inference(q, k, v, bounds, sinks, window, prefix, every, scale, with_lse):
    band = launch.Band(window, prefix, every)
    return launch.attention_forward(q, k, v, bounds, sinks, band, scale, with_lse, keep=False)


def _forward_reference(q, k, v, bounds, sinks, window, prefix, every, scale, with_lse):
    o, lse = reference.sliding_window_attention_with_lse(
        q, k, v, window, prefix, every, bounds, scale=scale, sinks=sinks
    )
    return outputs_of_reference(o, lse, with_lse)


def _forward_fake(q, k, v, bounds, sinks, window, prefix, every, scale, with_lse):
    return new_outputs(q, v, with_lse)


def _backward_inference(
    do, dlse, q, k, v, bounds, sinks, o, o_low, softmax, window, prefix, every, scale
):
    band = launch.Band(window, prefix, every)
    return launch.attention_backward(
        do, dlse, q, k, v, bounds, sinks, o, o_low, softmax, band, scale
    )


def _backward_triton(do, *others):
    *grads, dsinks = _backward_inference(do, *others)
    return *grads, empty_grad(do) if dsinks is None else dsinks


def _backward_reference(
    do, dlse, q, k, v, bounds, sinks, o, o_low, softmax, window, prefix, every, scale
):
    return reference.sliding_window_attention_backward(
        do, dlse, q, k, v, window, prefix, every, bounds, scale=scale, sinks=sinks
    )


def _backward_fake(do, dlse, q, k, v, bounds, sinks, *others):
    return new_gradients(q, k, v, sinks)


_forward = Op(
    "sliding_window_attention(Tensor q, Tensor k, Tensor v, Tensor? bounds, Tensor? sinks,"
    " int window, int prefix, int every, float scale, bool with_lse)"
    " -> (Tensor o, Tensor lse, Tensor softmax, Tensor rest)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=_forward_inference,
)
_backward = Op(
    "sliding_window_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v,"
    " Tensor? bounds, Tensor? sinks, Tensor o, Tensor rest, Tensor softmax, int window,"
    " int prefix, int every, float scale) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    triton=_backward_triton,
    inference=_backward_inference,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("o", "rest", "softmax")
give_derivative(_forward, _backward)


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    prefix: int = 0,
    *,
    every: int = 1,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scale q k^T) v for each head of a sequence: causal, over the last ``window`` tokens
    and a prefix that every row sees.

    Args:
        q: ``[B, Nq, H, D]``, the last Nq of the sequence's T rows: all of them in training, the new
            ones where k and v hold those before from a cache. D is a multiple of 8 up to 256; fp32,
            bf16 or fp16 (the reference takes fp64 too). Strides, copies and autocast as in
            :func:`rectangular_attention`.
        k, v: ``[B, T, G, D]`` and ``[B, T, G, Dv]``, in q's dtype, G a divisor of H, widths and
            heads as in :func:`rectangular_attention`: first the prefix, then the tokens. What no
            row of q sees may be left out: a cache needs the prefix and the last window - 1 + Nq
            tokens.
        window: how many tokens a token sees, itself included; 1 or more. T or more: plain causal
            attention.
        prefix: how many of the T rows are the prefix, 0 to T. Every row sees them, and they see
            nothing else.
        every: rows of k and v for each row of q, the last of them its own; the last row of q is the
            sequence's last. 2: one query after each two keys.
        scale: factor of the scores, positive and in the range of fp32; None takes 1 / sqrt(D).
        cu_seqlens: ``[N + 1]``, int32 or int64, on q's device, where B is 1: N documents lie one
            after the other in the rows of k and v behind the prefix, number d from
            ``cu_seqlens[d]`` to ``cu_seqlens[d + 1]``, out of 0 to T - prefix, never decreasing; a
            number out of range or order counts as the nearest that is not. A row sees the prefix,
            which all documents share, and of the others those of its own document. Rows of none are
            padding. ``[B, N + 1]`` for rows of the batch with documents of their own: where these
            are padded on the left, one each, from T - prefix - n to T - prefix. With ``every``,
            still in rows of k. Read on the device alone, so that one compiled or captured step
            serves all lengths; a document may be empty.
        key_lengths: ``[B]``, int32 or int64, on q's device, where rows of the batch are padded on
            the right: row b has its first ``key_lengths[b]`` rows behind the prefix. Not beside
            cu_seqlens.
        sinks: ``[H]``, as in :func:`rectangular_attention`.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[B, Nq, H, Dv]``, contiguous, in q's dtype. A NaN in a key, or a NaN or infinity in a
        value, reaches no row that does not see it; one in a query stays in its row. Nothing of the
        kind is promised of gradients, but of documents and padding: a row of padding is zeros, has
        gradients of zeros, and nothing that it holds, or that arrives as its gradient, reaches
        anything; what a document holds reaches no output and no gradient of another. Nor does, by
        the kernels, what arrives as the gradient of its outputs: a NaN there reaches all documents
        in the reference.

    fp32 products are exact unless torch multiplies fp32 matrices in TF32
    (``torch.backends.cuda.matmul.fp32_precision``); each pass asks when it runs. Differentiable in
    q, k, v and sinks, twice; the second derivative runs in plain torch and holds all T x T scores,
    as the reference does.

    Raises:
        TypeError: a tensor is not floating point or not strided, cu_seqlens or key_lengths not
            int32 or int64, window or prefix no whole number, or scale no number.
        ValueError: the shapes, dtypes or devices are not as above, a number is out of its range, or
            there are both cu_seqlens and key_lengths.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    documents = cu_seqlens, key_lengths
    return _attention(
        q, k, v, window, prefix, every, scale, documents, sinks, backend, with_lse=False
    )[0]


def sliding_window_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    prefix: int = 0,
    *,
    every: int = 1,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`sliding_window_attention` and the log-sum-exp of its scores, with which attention to
    several sets of keys is merged.

    Args:
        q, k, v, window, prefix, every, scale, cu_seqlens, key_lengths, sinks, backend: as in
            :func:`sliding_window_attention`.

    Returns:
        The pair ``(o, lse)``; lse ``[B, H, Nq]`` in fp32 (fp64 for fp64 inputs), natural logarithm,
        the sink's term included; minus infinity of padding. Both are differentiable in q, k, v and
        sinks.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sliding_window_attention`.
    """
    documents = cu_seqlens, key_lengths
    return _attention(
        q, k, v, window, prefix, every, scale, documents, sinks, backend, with_lse=True
    )


def _attention(q, k, v, window, prefix, every, scale, documents, sinks, backend, with_lse):
    check_attention(q, k, v)
    check_band(window, prefix, every, q, k)
    cu_seqlens, key_lengths = documents
    check_bounds(cu_seqlens, key_lengths, q)
    (q, k, v), scale = prepared(q, k, v, scale)
    if sinks is not None:
        check_sinks(sinks, q)
    bounds = bounds_of(cu_seqlens, key_lengths, k.shape[1] - prefix)
    if not uses_triton(q, backend):
        with without_autocast(q.device):
            return reference.sliding_window_attention_with_lse(
                q, k, v, window, prefix, every, bounds, scale=scale, sinks=sinks
            )
    return _forward(q, k, v, bounds, sinks, window, prefix, every, scale, with_lse)[:2]


def check_band(window: int, prefix: int, every: int, q: Tensor, k: Tensor) -> None:
    """window and every must be 1 or more, prefix a part of the keys, and q rows of the same
    sequence.
    """
    for name, number in (("window", window), ("prefix", prefix), ("every", every)):
        # torch.compile traces a number that varies as a SymInt, which is no Integral.
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name} must be a whole number, got {type(number).__name__}")
    rows, keys = q.shape[1], k.shape[1]
    if every < 1:
        raise ValueError(f"every must be 1 or more rows, got {every}")
    if rows > keys:
        raise ValueError(f"q must be the last rows of {keys} at most, got {rows}")
    if every > 1 and rows and (rows - 1) * every >= keys:
        raise ValueError(
            f"q must be the last of each {every} rows of {keys} at most, got {rows} rows"
        )
    if window < 1:
        raise ValueError(f"window must be 1 or more keys, got {window}")
    if not 0 <= prefix <= keys:
        raise ValueError(f"prefix must be 0 to {keys}, the number of keys, got {prefix}")


def check_bounds(cu_seqlens: Tensor | None, key_lengths: Tensor | None, q: Tensor) -> None:
    """One of the two at most, of q's rows of the batch."""
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q)
    if key_lengths is not None:
        check_key_lengths(key_lengths, q)
        if cu_seqlens is not None:
            raise ValueError("one of cu_seqlens and key_lengths may be given, got both")
