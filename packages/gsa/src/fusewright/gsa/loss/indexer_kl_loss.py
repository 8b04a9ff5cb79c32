r"""The loss that an indexer learns by: how far its softmax is from the attention's probabilities.

    p_ts = sum_h exp(s_hts - lse_ht) over its sum over s    s_hts = scale q_ht . k_s
    r_ts = softmax_s(temperature I_ts)                      I_ts: the scores of gated_indexer
    loss = mean_t sum_s p_ts (log p_ts - log r_ts)

over the keys that a row sees (dense warm-up) or over the slots in which it has selected one (sparse
phase): a key in two slots counts twice, as in the attention. The target p is a constant. With N
rows, G_ts = (r_ts - p_ts) temperature / N is the gradient of the scores; those of q_index, k_index,
w and bias follow as in :func:`gated_indexer`, and that of the temperature is
sum_ts (r_ts - p_ts) I_ts / N. The loss is one number, so the forward pass computes its slopes, and
the backward pass multiplies them by the upstream gradient. Scores and target of a chunk of the rows
are in memory at a time. Saved: the slopes, in fp32; and the inputs, for second derivatives.

A score of the gated form is below H: at a temperature of 1 its softmax cannot reach a target that
is peaked among T keys. Log T is a temperature to start with; the selection does not depend on it.

DeepSeek-V3.2-Exp, equations 3 and 4; Gated Sparse Attention, arXiv 2601.15305.
"""

from __future__ import annotations

import functools

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import (
    check_device,
    check_dtype,
    check_floating,
    checked_number,
)
from .._core.precision import autocast, without_autocast
from .._core.registration import Derivative, Op
from ..common.checks import (
    HIGHEST_SCALE,
    Form,
    check_attention,
    check_indexer,
    check_selection,
    checked_offset,
    checked_scale,
    weights_of_form,
)
from ..common.ranges import checked_ranges
from . import launch, reference

Tensor = torch.Tensor
# The operands that get gradients, all, and the options after them.
LEARNING, OPERANDS, OPTIONS = 5, 11, 5


def _loss_fake(q_index, k_index, w, bias, temperature, *_):
    wide = torch.promote_types(q_index.dtype, torch.float32)
    slopes = (q_index, k_index, w, bias, temperature)
    return q_index.new_empty((), dtype=wide), *(x.new_empty(x.shape, dtype=wide) for x in slopes)


def _backward_multiplied(upstream, *arguments):
    operands, slopes = arguments[:LEARNING], arguments[OPERANDS : OPERANDS + LEARNING]
    return tuple((upstream * slope).to(x.dtype) for x, slope in zip(operands, slopes, strict=True))


def _backward_reference(upstream, *arguments):
    operands, options = arguments[:OPERANDS], arguments[OPERANDS + LEARNING :]
    slopes = arguments[OPERANDS : OPERANDS + LEARNING]
    if slopes[0] is None:
        # For a second derivative, in which they follow from the operands.
        slopes = reference.indexer_kl_loss_with_slopes(*operands, *options)[1:]
    return _backward_multiplied(upstream, *operands, *slopes)


def _backward_fake(upstream, *arguments):
    return tuple(x.new_empty(x.shape) for x in arguments[:LEARNING])


_OPERANDS = (
    "Tensor q_index, Tensor k_index, Tensor w, Tensor bias, Tensor temperature, Tensor q, Tensor k,"
    " Tensor lse, Tensor? indices, Tensor? count, Tensor? ranges"
)
_OPTIONS = "float index_scale, float scale, bool causal, int q_offset, str form"
_SLOPES = "Tensor dq_index, Tensor dk_index, Tensor dw, Tensor dbias, Tensor dtemperature"
_loss = Op(
    f"indexer_kl_loss({_OPERANDS}, {_OPTIONS}) -> (Tensor loss, {_SLOPES})",
    triton=launch.divergence,
    reference=reference.indexer_kl_loss_with_slopes,
    fake=_loss_fake,
    inference=functools.partial(launch.divergence, slopes=False),
)
_backward = Op(
    f"indexer_kl_loss_backward(Tensor upstream, {_OPERANDS}, {_SLOPES}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    triton=_backward_multiplied,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_loss.derivative
class _IndexerKLLoss(Derivative):
    @staticmethod
    def forward(ctx, run, *arguments):
        loss, *slopes = run(*arguments)
        ctx.save_for_backward(*arguments[:OPERANDS], *slopes)
        ctx.options = arguments[OPERANDS:]
        ctx.set_materialize_grads(False)
        return loss, *_loss.statistics(ctx, run, *slopes)

    @staticmethod
    def backward(ctx, upstream, *_):
        unlearned = (None,) * (OPERANDS - LEARNING + OPTIONS)
        if upstream is None:
            return None, *(None,) * LEARNING, *unlearned
        grads = _backward(upstream, *ctx.saved_tensors, *ctx.options)
        return None, *grads, *unlearned


_backward.derivative_of_reference("dq_index", "dk_index", "dw", "dbias", "dtemperature")


def indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    bias: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None = None,
    count: Tensor | None = None,
    *,
    temperature: Tensor | float = 1.0,
    index_scale: float | None = None,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_ranges: Tensor | None = None,
    form: Form = "gated",
    backend: Backend = "auto",
) -> Tensor:
    """Kullback-Leibler divergence of the indexer's softmax from the attention's probabilities,
    averaged over the rows; with cu_seqlens or key_ranges, over those that see a key.

    Args:
        q_index, k_index, w, bias: the indexer's, as in :func:`gated_indexer`, which also says what
            ``index_scale`` (there: scale), causal, q_offset, cu_seqlens, key_ranges and
            form are.
        q, k: the attention's, ``[B, T, H, D]`` and ``[B, Tkv, Hkv, D]`` as in
            :func:`sparse_attention`, with its ``scale``.
        lse: ``[B, H, T]``, any floating dtype: the log-sum-exp of the attention's scores, over the
            keys that count here.
        indices, count: ``[B, T, K]`` and ``[B, T]`` as in :func:`sparse_attention`: only the
            selected keys count, of those that a row sees, each as often as it is named. None: all
            that it sees, once.
        temperature: what the scores are multiplied with, one finite number or a tensor of one,
            which may learn.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve. The reference holds all scores.

    Returns:
        One number in nats, in fp32 (fp64 for fp64 inputs), under autocast too. A row without keys
        adds nothing. A NaN score of a key that counts makes the loss and its gradients NaN; a w or
        bias of -inf closes its head; an attention head whose lse is infinite or NaN is left out of
        its row, and a row without any other adds nothing. What a NaN in q or k does to a row with
        a finite lse is not defined.

    Differentiable in q_index, k_index, w, bias and temperature, twice; the second derivative runs
    in plain torch. q, k and lse get no gradient: the attention does not learn from it.

    Raises:
        TypeError: a tensor is of a wrong kind, or an option is no number.
        ValueError: the shapes, dtypes or devices are not as above, or an option is out of its
            range.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_indexer(q_index, k_index, w, bias)
    check_attention(q, k, k)
    check_loss(q_index, k_index, q, k, lse, indices)
    if indices is not None:
        check_selection(q, indices, count, None)
    index_scale = checked_scale(index_scale, q_index.shape[-1])
    scale = checked_scale(scale, q.shape[-1])
    q_offset = checked_offset(q_offset, k.shape[1])
    temperature = checked_temperature(temperature, q_index)
    w = weights_of_form(w, form)
    ranges = checked_ranges(cu_seqlens, key_ranges, q, k.shape[1], q_offset)
    q_index, k_index = autocast(q_index, k_index)
    q, k = autocast(q, k)
    check_dtype("k_index", k_index, "q_index", q_index)
    check_dtype("k", k, "q", q)
    q, k, lse = (x.detach() for x in (q, k, lse))
    operands = (q_index, k_index, w, bias, temperature, q, k, lse, indices, count, ranges)
    options = (index_scale, scale, bool(causal), q_offset, form)
    if not (uses_triton(q_index, backend) and uses_triton(q, backend)):
        with without_autocast(q.device):
            return reference.indexer_kl_loss(*operands, *options)
    return _loss(*operands, *options)[0]


def check_loss(
    q_index: Tensor, k_index: Tensor, q: Tensor, k: Tensor, lse: Tensor, indices: Tensor | None
) -> None:
    """The indexer and the attention must be of the same tokens, lse [B, H, T], and indices of all
    heads.
    """
    for name, x, other_name, other in (
        ("q", q, "q_index", q_index),
        ("k", k, "k_index", k_index),
    ):
        if x.shape[:2] != other.shape[:2]:
            raise ValueError(
                f"{name} must have the tokens of {other_name}, {tuple(other.shape[:2])}, "
                f"got {tuple(x.shape[:2])}"
            )
        check_device(name, x, "q_index", q_index)
    check_floating("lse", lse)
    wanted = (q.shape[0], q.shape[2], q.shape[1])
    if tuple(lse.shape) != wanted:
        raise ValueError(f"lse must have shape {wanted}, got {tuple(lse.shape)}")
    check_device("lse", lse, "q_index", q_index)
    if indices is not None and isinstance(indices, Tensor) and indices.ndim != 3:
        raise ValueError(f"indices must be [batch, tokens, K], got {tuple(indices.shape)}")


def checked_temperature(temperature: Tensor | float, q_index: Tensor) -> Tensor:
    """The temperature as a tensor of one number, on the indexer's device."""
    if isinstance(temperature, Tensor):
        check_floating("temperature", temperature)
        if temperature.numel() != 1:
            raise ValueError(
                f"temperature must be one number, got shape {tuple(temperature.shape)}"
            )
        check_device("temperature", temperature, "q_index", q_index)
        return temperature.reshape(())
    number = checked_number("temperature", temperature, -HIGHEST_SCALE, HIGHEST_SCALE)
    wide = torch.promote_types(q_index.dtype, torch.float32)
    return torch.full((), number, dtype=wide, device=q_index.device)
