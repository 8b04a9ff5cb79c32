r"""A neural memory that learns while it reads, token by token.

For every row and head, with A the weights with which token t's chunk of C tokens began, R those
towards which it forgets, zero unless they are given, and M_W(x) = w2 act(w1 x + b1) + b2:

    G_t = gradient of |M_A(k_t) - v_t|^2 by A
    S_t = eta_t S_(t-1) - theta_t G_t
    W_t = (1 - alpha_t) W_(t-1) + alpha_t R + S_t
    y_t = M_(W_t)(q_t), or with read="before" M_(W_(t-1))(q_t)

With ``residual_norm`` M_W(x) = x + N(w2 act(w1 x + b1) + b2), N a layer norm over the features.

Every G_t is one outer product per layer, so that within a chunk

    W_t = keep_t W + (1 - keep_t) R + carry_t S - sum_(j <= t) gamma_tj G_j

is read without weights per token: q against k, times gamma, times the gradients. Chunks follow one
another; within a chunk all work is products of matrices.

Saved for the backward pass: the inputs, and weights and momentum at every chunk's start, in fp32;
everything else is recomputed. Sums have a fixed order. Operands of products are in q's dtype
(fp32: exact, unless torch multiplies fp32 matrices in TF32), accumulation, weights and momentum in
fp32.

With ``max_grad_norm``, c, every token's gradient is clipped and every chunk guarded:

    G_t is replaced by rho_t G_t,    rho_t = min(1, c / |G_t|), and 0 where |G_t| is not finite
    |G_t|^2 = |p_t|^2 (|k_t|^2 + 1) + |e_t|^2 (|h_t|^2 + 1)
    W, S of the next chunk = those of this one, where W or S after it is not finite

p and e being the gradients by the hidden layer before its activation and by what w2 and b2 make.
rho and which chunks were taken are saved beside the rest.

Behrouz, Zhong, Mirrokni, Titans: Learning to Memorize at Test Time, arXiv 2501.00663, section 3;
gradients within a chunk as in its equation 16. Residual and norm are those of the memory of
titans-pytorch, without its gain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._core.backends import Backend, decline, uses_triton
from .._core.precision import autocast, wide_dtype, without_autocast
from .._core.registration import Derivative, Op
from ..common.checks import check_switch, checked_positive
from ..common.operands import WIDEST, WIDEST_HIDDEN
from ..common.weights import MemoryWeights, pack, packed_copy, unpack
from . import launch, launch_backward, reference, reference_clip, reference_packed
from .checks import check_resets, check_rest, checked_chunk, checked_mask
from .registered import (
    GATES,
    GRADIENTS,
    LONGEST_CHUNK,
    ROWS,
    backward_fake,
    derive_scan,
    operand_gradients,
    outputs_fake,
)

Tensor = torch.Tensor

OPTIONS = "int hidden, int chunk, str activation, str read, bool residual_norm"


class MemoryScan(NamedTuple):
    """The result of :func:`memory_scan`.

    Attributes:
        y: ``[B, T, heads, D]``, what the queries read.
        weights, momentum: after the last token, ``[B, heads, ...]`` in fp32.
        skipped: ``[B, heads]`` int64: of the tokens that were to be written, how many have an inner
            gradient whose norm is not finite, or stand in a chunk after which the memory would not
            have been finite. None without ``max_grad_norm``.
        loss: ``[B, T, heads]`` in fp32, |M(k) - v|^2 of each token at the weights with which its
            chunk began, 0 where it writes nothing; detached.
    """

    y: Tensor
    weights: MemoryWeights
    momentum: MemoryWeights
    skipped: Tensor | None
    loss: Tensor


def _forward_fake(
    q, k, v, state, alpha, eta, theta, written, rest, resets, hidden, chunk, *options
):
    return outputs_fake(q, state, chunk)


def _backward_reference(dy, dend, q, k, v, state, states, *gates_and_options):
    return reference_packed.packed_scan_backward(dy, dend, q, k, v, state, *gates_and_options)


def _clipped_fake(
    q, k, v, state, alpha, eta, theta, written, rest, resets, hidden, chunk, *options
):
    batch, tokens, heads = alpha.shape
    taken = alpha.new_empty((batch, -(-tokens // chunk), heads), dtype=torch.bool)
    return *outputs_fake(q, state, chunk), alpha.new_empty(alpha.shape), taken


def _clipped_backward_reference(dy, dend, q, k, v, state, states, factors, taken, *others):
    return reference_packed.packed_scan_backward(dy, dend, q, k, v, state, *others)


def _clipped_backward_fake(dy, dend, q, k, v, state, states, factors, taken, *others):
    return backward_fake(dy, dend, q, k, v, state, states, *others)


_forward = Op(
    f"memory_scan({ROWS}, {GATES}, {OPTIONS})"
    " -> (Tensor y, Tensor end, Tensor states, Tensor loss)",
    triton=launch.scan_forward,
    reference=reference_packed.packed_scan,
    fake=_forward_fake,
)
_backward = Op(
    f"memory_scan_backward(Tensor dy, Tensor dend, {ROWS}, Tensor states, {GATES}, {OPTIONS})"
    f" -> {GRADIENTS}",
    triton=launch_backward.scan_backward,
    reference=_backward_reference,
    fake=backward_fake,
)
derive_scan(_forward, _backward)


_clipped = Op(
    f"clipped_scan({ROWS}, {GATES}, {OPTIONS}, float max_grad_norm)"
    " -> (Tensor y, Tensor end, Tensor states, Tensor loss, Tensor factors, Tensor taken)",
    triton=launch.clipped_forward,
    reference=reference_packed.packed_clipped_scan,
    fake=_clipped_fake,
)
_clipped_backward = Op(
    f"clipped_scan_backward(Tensor dy, Tensor dend, {ROWS}, Tensor states, Tensor factors,"
    f" Tensor taken, {GATES}, {OPTIONS}, float max_grad_norm) -> {GRADIENTS}",
    triton=launch_backward.clipped_backward,
    reference=_clipped_backward_reference,
    fake=_clipped_backward_fake,
)


@_clipped.derivative
class _ClippedScan(Derivative):
    @staticmethod
    def forward(ctx, run, q, k, v, state, alpha, eta, theta, written, rest, resets, *options):
        gates = alpha, eta, theta, written, rest, resets
        outputs = run(q, k, v, state, *gates, *options)
        _, _, states, loss, *clip = outputs
        ctx.save_for_backward(q, k, v, state, states, *clip, *gates)
        ctx.options = options
        ctx.set_materialize_grads(False)
        # What tokens were skipped follows from these: they are results of a direct call too.
        ctx.mark_non_differentiable(states, loss, *clip)
        return outputs

    @staticmethod
    def backward(ctx, dy, dend, *_):
        return operand_gradients(ctx, _clipped_backward, dy, dend)


_clipped_backward.derivative_of_reference("states", "factors", "taken")


def memory_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: MemoryWeights,
    momentum: MemoryWeights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    write_mask: Tensor | None = None,
    rest: MemoryWeights | None = None,
    resets: Tensor | None = None,
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    residual_norm: bool = False,
    max_grad_norm: float | None = None,
    backend: Backend = "auto",
) -> MemoryScan:
    """Write every token into the memory of its row and head, and read the memory for its query.

    Args:
        q, k, v: ``[B, T, heads, D]``, of one dtype, fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides; only a tensor whose last axis is not contiguous is copied. Under
            autocast they are cast to its dtype. The inner loss is the sum over features, so that
            keys of length 1 are wanted.
        weights, momentum: before the first token, ``[B, heads, ...]``, fp32 (fp64 for fp64 q);
            may be expanded, as one learned start for all rows.
        alpha: ``[B, T, heads]``, floating point; 0 keeps the memory, 1 forgets it: the weights
            become those of ``rest``, before the token is written.
        eta: the same; decay of the momentum, 0 to 1.
        theta: the same; the inner learning rate, not negative.
        write_mask: ``[B, T]`` or ``[B, T, heads]``, bool: a token where it is False changes neither
            weights nor momentum. Its key, value and gates are not used and may be NaN; its
            query is read.
        rest: ``[heads, ...]`` in the weights' dtype, R, for all rows; None is zero.
        resets: ``[B, chunks]``, bool: where it is True, a chunk begins with ``weights`` and
            ``momentum`` again, whatever stands before it. So a row may hold several documents, each
            padded to whole chunks by tokens that are not written; none depends on another. None:
            no chunk does, but for the first.
        chunk: tokens whose gradients are taken at the same weights; 1 is the plain recurrence. A
            last chunk may be shorter.
        activation: "silu", "relu" or "gelu" (the exact one).
        read: whether a token reads the memory "after" or "before" it has written itself. Neither
            sees a later token.
        residual_norm: whether M(x) is x plus the layer norm over its features, without gain, of
            what the two layers make of x; the inner gradient goes through the norm.
        max_grad_norm: the norm to which the inner gradient of each token is scaled down, over all
            four tensors of the memory; a token whose norm is not finite, or so large that the
            factor underflows, then adds nothing, though its alpha and eta still apply. A chunk
            after which weights or momentum of a memory are not finite leaves both as they were, as
            if none of its tokens were written: its own queries read what they wrote, finite or not,
            those of the next chunk the last good state. ``skipped`` counts the tokens of both.
            None: no clip, and nothing is guarded.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        A :class:`MemoryScan`; y is contiguous, in q's dtype. Weights and momentum are views of one
        tensor, which the next scan or read takes without a copy; their gradients are those of
        tensors of their own. The gates' range is not checked.
        Numbers that are not finite stay within their row and head; without ``max_grad_norm`` a
        memory that diverges is not repaired.

    Differentiable in everything but write_mask and resets, twice; the second derivative runs in
    plain torch. The clip's own derivative is part of it. In the backward pass a chunk that was not
    taken is the identity: the gradients of weights and momentum pass unchanged, and all other
    gradients of its tokens, its reads' among them, are zero.
    Memory grows with B * heads * T / chunk copies of weights and momentum.

    Raises:
        TypeError: a tensor is not floating point or not strided, the mask, resets or residual_norm
            is not bool, chunk is no integer.
        ValueError: the shapes, dtypes or devices are not as above, or an option is unknown.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    gates = alpha, eta, theta
    chunk = checked_chunk(q, k, v, weights, momentum, gates, chunk, activation, read)
    if write_mask is not None:
        write_mask = checked_mask(write_mask, q)
    if rest is not None:
        check_rest(rest, weights)
    if resets is not None:
        check_resets(resets, q, chunk)
    check_switch("residual_norm", residual_norm)
    if max_grad_norm is not None:
        max_grad_norm = checked_positive("max_grad_norm", max_grad_norm)
    q, k, v = autocast(q, k, v)
    dtype = wide_dtype(q)
    hidden, width = weights.w1.shape[-2:]
    on_kernels = uses_triton(q, backend) and serves(q, hidden, chunk, backend)
    alpha, eta, theta = (gate.to(dtype) for gate in gates)
    state = pack(weights, momentum)
    options = (hidden, chunk, activation, read, residual_norm)
    resting = None if rest is None else packed_copy(rest)
    tensors = (q, k, v, state, alpha, eta, theta, write_mask, resting, resets)
    if max_grad_norm is None:
        if on_kernels:
            y, end, _, loss = _forward(*tensors, *options)
        else:
            with without_autocast(q.device):
                y, end, _, loss = reference_packed.packed_scan(*tensors, *options, starts=False)
        return MemoryScan(y, *unpack(end, hidden, width), None, loss)
    clip_options = (*options, max_grad_norm)
    if on_kernels:
        y, end, _, loss, factors, taken = _clipped(*tensors, *clip_options)
    else:
        with without_autocast(q.device):
            y, end, _, loss, factors, taken = reference_packed.packed_clipped_scan(
                *tensors, *clip_options, starts=False
            )
    skipped = skipped_tokens(factors, taken, chunk, write_mask)
    return MemoryScan(y, *unpack(end, hidden, width), skipped, loss)


def skipped_tokens(factors: Tensor, taken: Tensor, chunk: int, written: Tensor | None) -> Tensor:
    """``[B, heads]``, of the factors ``[B, T, heads]`` and the chunks ``[B, chunks, heads]``."""
    mask = None if written is None else written.mT
    by_token = reference.of_tokens(taken.mT, chunk, factors.mT)
    return reference_clip.lost_tokens(factors.mT, by_token, mask)


def serves(q: Tensor, hidden: int, chunk: int, backend: Backend) -> bool:
    """Whether the kernels are made for a memory and chunks of this size."""
    if q.shape[-1] <= WIDEST and hidden <= WIDEST_HIDDEN and chunk <= LONGEST_CHUNK:
        return True
    obstacle = (
        f"the kernels of memory_scan serve heads of up to {WIDEST} columns, {WIDEST_HIDDEN} hidden "
        f"units and chunks of {LONGEST_CHUNK} tokens, not {q.shape[-1]}, {hidden} and {chunk}"
    )
    decline(obstacle, backend)
    return False
