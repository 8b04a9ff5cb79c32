r"""Attention of Nq queries to M keys, without a mask: softmax(scale q k^T) v for each head.

    s_ij = scale q_i . k_j      lse_i = log (sum_j exp(s_ij) + exp(sink))
    p_ij = exp(s_ij - lse_i)    o_i = sum_j p_ij v_j

B tasks, H heads of width D, whose values may have another; ``key_lengths`` says how many of its M
keys a task has. Keys and values may have fewer heads, G of them: head h of the queries reads head
h // (H / G). A head may have a sink, a score that takes part in the softmax and has no value;
without one, exp(sink) is 0. The backward pass recomputes p, with
delta_i = sum_d do_id o_id - dlse_i:

    dp = do v^T    ds = p * (dp - delta)    dq = scale ds k    dk = scale ds^T q    dv = p^T do

    dsink = -sum_i exp(sink - lse_i) delta_i

and sums dk and dv over the queries of all heads that read a key, in their order.

Saved for it: q, k, v; and, where the keys of a head are more than one tile, o, what its rounding
took (o_low, ``rest`` in the schema, in four bits a number), and two fp32 numbers for each row, the
greatest score or, on Hopper, that of one tile of keys, and one over the sum of exponentials below
it. Up to 128 keys are one tile, whose whole softmax is recomputed. Products accumulate in fp32 and
the softmax is fp32; its probabilities, and ds, are rounded to the inputs' dtype for the next
product. Outputs are rounded once. Sums have a fixed order: same inputs, same bits.

Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import functools

import torch

from .._core.backends import Backend, device_properties, uses_triton
from .._core.precision import without_autocast
from .._core.registration import Op, empty_grad
from ..common.checks import check_attention, check_key_lengths, check_sinks, prepared
from ..common.derivative import give_derivative
from ..common.outputs import new_gradients, new_outputs, outputs_of_launch, outputs_of_reference
from . import launch, launch_backward, reference

Tensor = torch.Tensor


def _forward_triton(q, k, v, key_lengths, sinks, scale, with_lse):
    outputs = launch.attention_forward(q, k, v, key_lengths, sinks, scale, with_lse)
    return outputs_of_launch(q, outputs)


def _forward_reference(q, k, v, key_lengths, sinks, scale, with_lse):
    o, lse = reference.rectangular_attention_with_lse(q, k, v, key_lengths, sinks, scale=scale)
    return outputs_of_reference(o, lse, with_lse, keep=not _in_single_tile(k, v))


def _forward_fake(q, k, v, key_lengths, sinks, scale, with_lse):
    return new_outputs(q, v, with_lse, keep=not _in_single_tile(k, v))


def _in_single_tile(k, v):
    """Whether the keys of a head are one tile."""
    gpu, width = device_properties(k.device), max(k.shape[-1], v.shape[-1])
    return launch.is_single_tile(k.shape[1], width, k.dtype.itemsize, gpu)


def _backward_triton(do, *others):
    *grads, dsinks = launch_backward.attention_backward(do, *others)
    return *grads, empty_grad(do) if dsinks is None else dsinks


def _backward_reference(do, dlse, q, k, v, key_lengths, sinks, o, o_low, softmax, scale):
    return reference.rectangular_attention_backward(
        do, dlse, q, k, v, key_lengths, sinks, scale=scale
    )


def _backward_fake(do, dlse, q, k, v, key_lengths, sinks, o, o_low, softmax, scale):
    return new_gradients(q, k, v, sinks)


_forward = Op(
    "rectangular_attention(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, Tensor? sinks,"
    " float scale, bool with_lse) -> (Tensor o, Tensor lse, Tensor softmax, Tensor rest)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=functools.partial(launch.attention_forward, keep=False),
)
_backward = Op(
    "rectangular_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v,"
    " Tensor? key_lengths, Tensor? sinks, Tensor? o, Tensor? rest, Tensor? softmax, float scale)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    triton=_backward_triton,
    inference=launch_backward.attention_backward,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("o", "rest", "softmax")
give_derivative(_forward, _backward, _in_single_tile)


def rectangular_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scale q k^T) v for each task and head: every query sees every key.

    Args:
        q: ``[B, Nq, H, D]``, D a multiple of 8 up to 256; fp32, bf16 or fp16 (the reference takes
            fp64 too). Any strides; only a tensor whose last axis is not contiguous, whose tokens
            lie more than 2^23 numbers apart, or whose strides are no multiples of 8 is copied.
            Under autocast q, k and v are cast to its dtype, as torch's own attention does.
        k: ``[B, M, G, D]``, in q's dtype, G a divisor of H: head h of q reads head h // (H / G), as
            with torch's ``enable_gqa``. Nothing is expanded.
        v: ``[B, M, G, Dv]``, in q's dtype, Dv a multiple of 8 up to 256.
        scale: factor of the scores, positive and in the range of fp32; None takes 1 / sqrt(D).
        key_lengths: ``[B]``, int32 or int64, on q's device: task b has only its first
            ``key_lengths[b]`` keys. Numbers below 0 count as 0, beyond M as M; they are read on the
            device alone, so that one compiled or captured step serves every length. Keys past the
            length may hold anything, NaN too; their gradients are zero.
        sinks: ``[H]``, fp32 or q's dtype, on q's device: one score more in the softmax of each row
            of a head, for a key that has no value, so that a row's weights sum to less than 1.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[B, Nq, H, Dv]``, contiguous, in q's dtype. Zero where a task has no keys. A NaN in a key
        or value makes its head NaN, one in a query its row; an infinity may do the same.

    fp32 products are exact unless torch multiplies fp32 matrices in TF32
    (``torch.backends.cuda.matmul.fp32_precision``); each pass asks when it runs. Differentiable in
    q, k, v and sinks, twice; the second derivative runs in plain torch and holds all scores.

    Raises:
        TypeError: a tensor is not floating point or not strided, key_lengths not int32 or int64, or
            scale is no number.
        ValueError: the shapes, dtypes or devices are not as above, or scale is out of its range.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    return _attention(q, k, v, scale, key_lengths, sinks, backend, with_lse=False)[0]


def rectangular_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`rectangular_attention` and the log-sum-exp of its scores, with which attention to
    several sets of keys is merged.

    Args:
        q, k, v, scale, key_lengths, sinks, backend: as in :func:`rectangular_attention`.

    Returns:
        The pair ``(o, lse)``; lse ``[B, H, Nq]`` in fp32 (fp64 for fp64 inputs), natural logarithm,
        the sink's term included; without sinks -inf where a task has no keys. Both are
        differentiable in q, k, v and sinks.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`rectangular_attention`.
    """
    return _attention(q, k, v, scale, key_lengths, sinks, backend, with_lse=True)


def _attention(q, k, v, scale, key_lengths, sinks, backend, with_lse):
    check_attention(q, k, v)
    if key_lengths is not None:
        check_key_lengths(key_lengths, q)
    (q, k, v), scale = prepared(q, k, v, scale)
    if sinks is not None:
        check_sinks(sinks, q)
    if not uses_triton(q, backend):
        with without_autocast(q.device):
            return reference.outputs(q, k, v, key_lengths, sinks, scale, with_lse=with_lse)
    return _forward(q, k, v, key_lengths, sinks, scale, with_lse)[:2]
