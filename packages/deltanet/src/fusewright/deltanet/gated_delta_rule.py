r"""The gated delta rule: a linear recurrence whose state forgets, and corrects what it returns
for a key.

For every row and value head, with the state S [K, V] in fp32, alpha_t = exp(g_t):

    S' = alpha_t S_(t-1)
    u_t = beta_t (v_t - S'^T k_t)
    S_t = S' + k_t u_t^T
    o_t = scale S_t^T q_t

Tokens are taken in chunks of 64, within which everything is products of matrices: with G the
cumulated g and L_ij = exp(G_i - G_j), A = the part of (beta k) k^T * L below the diagonal and
T = (I + A)^-1, a chunk that begins with S has

    V' = T (beta v) - T (beta exp(G) k) S
    o = scale ((exp(G) q) S + (q k^T * L) V')
    S <- exp(G_C) S + (exp(G_C - G) k)^T V'

Only the last line goes from chunk to chunk. Saved for the backward pass: the inputs, T, G and the
state with which every chunk began, T and states in q's dtype. Sums have a fixed order. Operands of
products are in q's dtype (fp32: exact, unless torch multiplies fp32 matrices in TF32); sums, T
before it is rounded and the state that is carried are fp32.

Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from . import reference
from ._backends import Backend as OwnBackend
from ._backends import available_backends as kernel_backends
from ._backends import decline, uses_triton, without_autocast
from ._checks import (
    autocast,
    check_backend_or_fla,
    check_residual,
    check_rule,
    checked_scale,
    dtype_of_state,
    given_decay,
)
from ._configs import WIDEST
from ._fla import fla_obstacle, fla_rule, has_fla, takes_fla
from ._rule_op import by_kernels

Tensor = torch.Tensor
Backend = Literal["auto", "fla", "triton", "reference"]
Residual = Literal["none", "qk", "v"]

# An alpha below it counts as it: its logarithm and its gradient stay finite.
LEAST_ALPHA = 1e-6


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
    """Read and write a state for every token, by the gated delta rule.

    Args:
        q, k: ``[B, T, H, K]``, of one dtype with v, fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides; only a tensor whose last axis is not contiguous is copied. Under
            autocast they are cast to its dtype. Keys of length 1 are wanted: with longer ones
            nothing bounds the state.
        v: ``[B, T, HV, V]``, HV a multiple of H: every HV / H value heads in turn share a head of
            q and k.
        g: ``[B, T, HV]``, the log decay, not above 0, floating point; -inf forgets the state. None
            where ``alpha`` is given.
        beta: the same; how much of the difference is corrected, 0 to 1, or 2 for negative
            eigenvalues. Gates are not looked at.
        scale: a number for o; K ** -0.5 where left out.
        initial_state: ``[N, HV, K, V]``, fp32 (fp64 beside fp64 q), zeros where left out; N is B,
            or the number of sequences.
        output_final_state: also return the state after the last token.
        cu_seqlens: ``[N + 1]``, int32 or int64, where sequences of different lengths begin and end
            that lie one after the other in the only row: from 0 to T, never decreasing; a number
            out of range or order counts as the nearest that is not. Tokens that no sequence holds
            have an o of zeros. Only the reference and fla have the host read it.
        d_residual: what o gets beside it: "none", "qk" for D (q_t . k_t) v_t, "v" for D v_t, for
            every head; scale is no part of it.
        d_weight: ``[HV]``, D; ones where left out.
        alpha: the decay itself in place of g, as exp(g); below 1e-6 it counts as that. g is more
            precise near 0 and 1.
        backend: "auto" takes fla for CUDA tensors where it is installed, can serve and is faster,
            else the kernels, and the reference for CPU tensors; "fla" and "triton" raise where
            they cannot serve.

    Returns:
        A :class:`GatedDeltaRule`; o is contiguous.
        What is not finite stays within its sequence and head, but may reach earlier tokens of its
        own chunk.

    Differentiable in every tensor but cu_seqlens; twice, except by fla: the second derivative runs
    in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, cu_seqlens does not hold integers.
        ValueError: the shapes, dtypes or devices are not as above, not one of g and alpha is given,
            or an option is unknown.
        RuntimeError: backend is "fla" or "triton" and cannot serve this call.
    """
    check_backend_or_fla(backend)
    decay = given_decay(g, alpha)
    check_rule(q, k, v, decay | {"beta": beta}, initial_state, cu_seqlens)
    check_residual(d_residual, d_weight, v)
    scale = checked_scale(scale, q)
    q, k, v = autocast(q, k, v)
    g = decay["g"] if "g" in decay else log_decay(decay["alpha"])
    g, beta = (x.to(dtype_of_state(q)) for x in (g, beta))
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
    return reference.wide(alpha).clamp(min=LEAST_ALPHA).log()


def served_by(q: Tensor, v: Tensor, tensors: Sequence[Tensor | None], backend: Backend) -> str:
    """Which of "fla", "triton" and "reference" serves a call on ``tensors``."""
    if backend in ("auto", "fla"):
        differentiates = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in tensors
        )
        if backend == "fla":
            obstacle = fla_obstacle(q, differentiates)
            if obstacle is not None:
                raise RuntimeError(f'backend="fla" cannot serve this call: {obstacle}')
            return "fla"
        if takes_fla(q, differentiates):
            return "fla"
    own: OwnBackend = "auto" if backend == "fla" else backend
    if not uses_triton(q, own):
        return "reference"
    widths = q.shape[-1], v.shape[-1]
    if max(widths) > WIDEST:
        decline(f"the kernels serve keys and values of up to {WIDEST} columns, not {widths}", own)
        return "reference"
    return "triton"


def with_residual(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, d_residual: Residual, d_weight: Tensor | None
) -> Tensor:
    """o + D (q . k) v or o + D v, in fp32, rounded once more."""
    weight = o.new_ones(v.shape[2]) if d_weight is None else d_weight
    if d_residual == "qk":
        matches = (reference.wide(q) * reference.wide(k)).sum(-1)
        weight = weight * matches.repeat_interleave(v.shape[2] // q.shape[2], 2)
    return (reference.wide(o) + weight.unsqueeze(-1) * reference.wide(v)).to(o.dtype)
