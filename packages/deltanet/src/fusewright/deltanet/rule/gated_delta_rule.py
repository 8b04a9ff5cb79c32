r"""The gated delta rule: a linear recurrence whose state decays, and corrects the value that it
returns for a key.

For each row and value head, with the state S [K, V] in fp32, alpha_t = exp(g_t):

    S' = alpha_t S_(t-1)
    u_t = beta_t (v_t - S'^T k_t)
    S_t = S' + k_t u_t^T
    o_t = scale S_t^T q_t

Tokens are taken in chunks of 64, within which everything is products of matrices: with G the
cumulated g and L_ij = exp(G_i - G_j), A = the part of (beta k) k^T * L below the diagonal and
T = (I + A)^-1, a chunk with the state S at its start has

    V' = T (beta v) - T (beta exp(G) k) S
    o = scale ((exp(G) q) S + (q k^T * L) V')
    S <- exp(G_C) S + (exp(G_C - G) k)^T V'

Only the last line goes from chunk to chunk. A g that leaves nothing of a state is a reset. For fp32
G is two sums, of g rounded to sixteenths, which is exact, and of the rest, so that differences keep
their digits; a reset counts as -8192, and all decays across it are 0. For bf16 and fp16, whose
rounding is larger than what one sum loses, G is one sum, in which a reset counts as the least g
that leaves something. Saved for the backward pass: the inputs, T, G and the state at the start of
each chunk, T and states in q's dtype. Sums have a fixed order. Operands of products are in q's
dtype (fp32: exact, unless torch multiplies fp32 matrices in TF32); sums, T before it is rounded and
the carried state are fp32.

Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F

from .._core.backends import available_backends as kernel_backends
from .._core.backends import decline, uses_triton
from .._core.checks import check_option
from .._core.precision import autocast, wide, wide_dtype, without_autocast
from .._core.registration import Derivative, Op, empty_grad
from . import launch, launch_backward, reference
from .checks import check_residual_weight, check_rule, checked_decay, checked_scale
from .fla import fla_obstacle, fla_rule, has_fla

Tensor = torch.Tensor
Backend = Literal["auto", "fla", "triton", "reference"]
Residual = Literal["none", "qk", "v"]
BACKENDS, RESIDUALS = get_args(Backend), get_args(Residual)

# An alpha below it counts as it: its logarithm and its gradient stay finite.
LEAST_ALPHA = 1e-6

OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state, Tensor? cu_seqlens"
SAVED = "Tensor inverses, Tensor states, Tensor decays"


def _forward_fake(q, k, v, g, beta, state, cu_seqlens, scale):
    heads, width = v.shape[2:]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    chunks = reference.count_chunks(q, cu_seqlens)
    return (
        q.new_empty(v.shape),
        g.new_empty(sequences, heads, q.shape[3], width),
        q.new_empty(chunks, heads, reference.CHUNK, reference.CHUNK),
        q.new_empty(chunks, heads, q.shape[3], width),
        g.new_empty(chunks, heads, *reference.decays_shape(q.dtype)),
    )


def _backward_fake(do, dend, q, k, v, g, beta, state, *others):
    dstate = empty_grad(g) if state is None else state.new_empty(state.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, g, beta)), dstate


_forward = Op(
    f"gated_delta_rule({OPERANDS}, float scale) -> (Tensor o, Tensor end, {SAVED})",
    triton=launch.rule_forward,
    reference=reference.chunked_rule,
    fake=_forward_fake,
)
_backward = Op(
    f"gated_delta_rule_backward(Tensor do, Tensor dend, {OPERANDS}, {SAVED}, float scale)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dstate)",
    triton=launch_backward.rule_backward,
    reference=reference.rule_backward,
    fake=_backward_fake,
)


@_forward.derivative
class _GatedDeltaRule(Derivative):
    @staticmethod
    def forward(ctx, run, q, k, v, g, beta, state, cu_seqlens, scale):
        o, end, *saved = run(q, k, v, g, beta, state, cu_seqlens, scale)
        ctx.save_for_backward(q, k, v, g, beta, state, cu_seqlens, *saved)
        ctx.scale, ctx.end = scale, (end.shape, end.dtype, end.device)
        ctx.set_materialize_grads(False)
        return o, end, *_forward.statistics(ctx, run, *saved)

    @staticmethod
    def backward(ctx, do, dend, *_):
        if do is None and dend is None:
            return (None,) * 9
        saved = q, _, v, _, _, state, *_ = ctx.saved_tensors
        if do is None:
            do = q.new_zeros(v.shape)
        if dend is None:
            shape, dtype, device = ctx.end
            dend = torch.zeros(shape, dtype=dtype, device=device)
        *grads, dstate = _backward(do, dend, *saved, ctx.scale)
        return None, *grads, None if state is None else dstate, None, None


# The saved tensors follow from the inputs, whose gradients are complete without them.
_backward.derivative_of_reference("inverses", "states", "decays")


class GatedDeltaRule(NamedTuple):
    """What :func:`gated_delta_rule` returns.

    Attributes:
        o: ``[B, T, HV, V]``, in q's dtype.
        state: ``[N, HV, K, V]`` after the last token, in fp32; None unless asked for.
    """

    o: Tensor
    state: Tensor | None


def available_backends() -> tuple[str, ...]:
    """What this machine can run: always "reference"; "triton" with a supported GPU or under
    ``TRITON_INTERPRET=1``; "fla" with a GPU and fla-core installed.
    """
    own = kernel_backends()
    return ("fla", *own) if has_fla() and torch.cuda.is_available() else own


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    d_residual: Residual = "none",
    d_weight: Tensor | None = None,
    alpha: Tensor | None = None,
    backend: Backend = "auto",
) -> GatedDeltaRule:
    """Read and write a state for each token, by the gated delta rule.

    Args:
        q, k: ``[B, T, H, K]``, of one dtype with v, fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides; only a tensor whose last axis is not contiguous is copied. Under
            autocast they are cast to its dtype. Keys of length 1 are wanted: with longer ones
            nothing bounds the state.
        v: ``[B, T, HV, V]``, HV a multiple of H: HV / H value heads in a row share a head of q
            and k.
        g: ``[B, T, HV]``, the log decay, not above 0, floating point; -inf forgets the state. None
            where ``alpha`` is given.
        beta: the same; how much of the difference is corrected, 0 to 1, or 2 for negative
            eigenvalues. The range of g and beta is not checked.
        scale: a number for o; K ** -0.5 where left out.
        initial_state: ``[N, HV, K, V]``, fp32 (fp64 for fp64 q), zeros where left out; N is B,
            or the number of sequences.
        output_final_state: also return the state after the last token.
        cu_seqlens: ``[N + 1]``, int32 or int64, where sequences of different lengths begin and end
            that lie one after the other in the only row: from 0 to T, never decreasing; a number
            out of range or order counts as the nearest that is not. Tokens outside all sequences
            have an o of zeros. Only the reference and fla have the host read it.
        d_residual: what is added to o: "none", "qk" for D (q_t . k_t) v_t, "v" for D v_t, for
            each head, without scale.
        d_weight: ``[HV]``, D; ones where left out.
        alpha: the decay itself in place of g, as exp(g); below 1e-6 it counts as that. g is more
            precise near 0 and 1.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors; "fla"
            and "triton" raise where they cannot serve.

    Returns:
        A :class:`GatedDeltaRule`; o is contiguous.
        A number that is not finite stays within its sequence and head, but may reach earlier tokens
        of its own chunk.

    Differentiable in every tensor but cu_seqlens; twice, except by fla: the second derivative runs
    in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, cu_seqlens does not hold integers.
        ValueError: the shapes, dtypes or devices are not as above, not one of g and alpha is given,
            or an option is unknown.
        RuntimeError: backend is "fla" or "triton" and cannot serve this call.
    """
    check_option("backend", backend, BACKENDS)
    decay = checked_decay(g, alpha)
    check_rule(q, k, v, decay | {"beta": beta}, initial_state, cu_seqlens)
    check_option("d_residual", d_residual, RESIDUALS)
    if d_weight is not None:
        check_residual_weight(d_weight, d_residual, v)
    scale = checked_scale(scale, q)
    q, k, v = autocast(q, k, v)
    g = decay["g"] if "g" in decay else log_decay(decay["alpha"])
    gate_dtype = wide_dtype(q)
    g, beta = g.to(gate_dtype), beta.to(gate_dtype)
    tensors = (q, k, v, g, beta, initial_state)
    served = served_by(q, v, tensors, backend)
    if served == "fla":
        # Of -inf fla would take differences, which are NaN.
        finite = g.clamp(min=reference.least_decay(g.dtype))
        o, state = fla_rule(q, k, v, finite, beta, initial_state, cu_seqlens, scale)
    elif served == "triton":
        o, state = by_kernels(*tensors, cu_seqlens, scale)
    else:
        with without_autocast(q.device):
            o, state = reference.gated_delta_rule(*tensors, cu_seqlens, scale=scale)
    if d_residual != "none":
        o = with_residual(o, q, k, v, d_residual, d_weight)
    return GatedDeltaRule(o, state if output_final_state else None)


def log_decay(alpha: Tensor) -> Tensor:
    """g of a decay."""
    return wide(alpha).clamp(min=LEAST_ALPHA).log()


def served_by(q: Tensor, v: Tensor, tensors: Sequence[Tensor | None], backend: Backend) -> str:
    """Which of "fla", "triton" and "reference" serves a call on ``tensors``."""
    if backend == "fla":
        differentiates = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in tensors
        )
        obstacle = fla_obstacle(q, differentiates)
        if obstacle is not None:
            raise RuntimeError(f'backend="fla" cannot serve this call: {obstacle}')
        return "fla"
    if not uses_triton(q, backend):
        return "reference"
    widths = q.shape[-1], v.shape[-1]
    if max(widths) > launch.WIDEST:
        obstacle = (
            f"the kernels serve keys and values of up to {launch.WIDEST} columns, not {widths}"
        )
        decline(obstacle, backend)
        return "reference"
    return "triton"


def by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o and the state after the last token. Heads are padded to whole vectors: columns of zeros add
    nothing to a product, and their states stay zero.
    """
    keys, values = q.shape[-1], v.shape[-1]
    pad_keys, pad_values = -keys % launch.VECTOR, -values % launch.VECTOR
    if pad_keys:
        q, k = (F.pad(x, (0, pad_keys)) for x in (q, k))
    if pad_values:
        v = F.pad(v, (0, pad_values))
    if state is not None and (pad_keys or pad_values):
        state = F.pad(state, (0, pad_values, 0, pad_keys))
    o, end, *_ = _forward(q, k, v, g, beta, state, cu_seqlens, scale)
    o, end = o[..., :values], end[..., :keys, :values]
    return o.contiguous() if pad_values else o, end


def with_residual(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, d_residual: Residual, d_weight: Tensor | None
) -> Tensor:
    """o + D (q . k) v or o + D v, in fp32, rounded once more."""
    weight = o.new_ones(v.shape[2]) if d_weight is None else d_weight
    if d_residual == "qk":
        matches = (wide(q) * wide(k)).sum(-1)
        weight = weight * matches.repeat_interleave(v.shape[2] // q.shape[2], 2)
    return (wide(o) + weight.unsqueeze(-1) * wide(v)).to(o.dtype)
