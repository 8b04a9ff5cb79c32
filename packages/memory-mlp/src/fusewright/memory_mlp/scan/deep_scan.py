r"""The scan of a memory of any number of layers, token by token: what NeuralMemory calls where its
memory has not two.

With the names of ``memory_scan``, for x_0 = k_t, z_l = w_l x_(l-1) + b_l, x_l = act(z_l) and M(k_t)
= z_n, the gradient G_t is an outer product for each layer,

    p_n = 2 (z_n - v_t)    p_l = (w_(l+1)^T p_(l+1)) * act'(z_l)    G_t,l = (p_l x_(l-1)^T, p_l)

so that each layer reads as one of two layers does.

From three layers on kernels serve it; their matrices between hidden layers do not fit one program
and stay in memory, where the second cache holds those of a chunk. Saved for the backward pass: the
inputs, and weights and momentum at every chunk's start, in fp32; everything else is recomputed.
Sums have a fixed order. Operands of products are in q's dtype, accumulation, weights and momentum
in fp32. With ``max_grad_norm`` the scan runs in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.backends import Backend, decline, uses_triton
from .._core.precision import autocast, wide, without_autocast
from .._core.registration import Op
from ..common.deep_weights import pack_deep, unpack_deep
from ..common.operands import WIDEST, WIDEST_HIDDEN
from ..common.weights import Weights
from . import launch_deep, launch_deep_backward, reference, reference_packed
from .reference_packed import of_heads
from .registered import (
    GATES,
    GRADIENTS,
    LONGEST_CHUNK,
    ROWS,
    backward_fake,
    derive_scan,
    outputs_fake,
)

Tensor = torch.Tensor

OPTIONS = "int layers, int hidden, int chunk, str activation, str read, bool residual_norm"


def _forward_fake(q, k, v, state, *gates_and_options):
    _, _, _, _, _, _, _, _, chunk, *_ = gates_and_options
    return outputs_fake(q, state, chunk)


def _backward_reference(dy, dend, q, k, v, state, states, *gates_and_options):
    return reference_packed.packed_deep_backward(dy, dend, q, k, v, state, *gates_and_options)


_forward = Op(
    f"deep_scan({ROWS}, {GATES}, {OPTIONS}) -> (Tensor y, Tensor end, Tensor states, Tensor loss)",
    triton=launch_deep.deep_forward,
    reference=reference_packed.packed_deep_scan,
    fake=_forward_fake,
)
_backward = Op(
    f"deep_scan_backward(Tensor dy, Tensor dend, {ROWS}, Tensor states, {GATES}, {OPTIONS})"
    f" -> {GRADIENTS}",
    triton=launch_deep_backward.deep_backward,
    reference=_backward_reference,
    fake=backward_fake,
)
derive_scan(_forward, _backward)


def deep_memory_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    write_mask: Tensor | None,
    rest: Weights | None = None,
    resets: Tensor | None = None,
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    residual_norm: bool = False,
    max_grad_norm: float | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Weights, Weights, Tensor | None, Tensor]:
    """``memory_scan`` of a memory of any number of layers, (w1, b1, .., wn, bn); the mask is
    [B, T, heads], and nothing is checked. Differentiable in everything but the mask, twice. One
    layer, and two, run in plain torch.

    Returns:
        (y, weights and momentum after the last token, the tokens that were lost, None without
        ``max_grad_norm``, the inner loss of each token).
    """
    q, k, v = autocast(q, k, v)
    layers, hidden, width = len(weights) // 2, weights[1].shape[-1], q.shape[-1]
    options = chunk, activation, read, residual_norm
    if layers > 2 and uses_triton(q, backend) and serves(q, hidden, chunk, max_grad_norm, backend):
        gates = [gate.float() for gate in (alpha, eta, theta)]
        resting = None if rest is None else pack_deep(rest)
        tensors = q, k, v, pack_deep(weights, momentum), *gates, write_mask, resting, resets
        y, end, _, loss = _forward(*tensors, layers, hidden, *options)
        weights, momentum = unpack_deep(end, layers, hidden, width)
        return y, weights, momentum, None, loss
    with without_autocast(q.device):
        dtype = q.dtype
        q, k, v = (wide(x).transpose(1, 2) for x in (q, k, v))
        alpha, eta, theta = (x.mT for x in (alpha, eta, theta))
        written = None if write_mask is None else write_mask.mT
        form: dict[str, Any] = {"chunk": chunk, "activation": activation, "read": read}
        y, weights, momentum, lost, loss = reference.memory_scan(
            *(q, k, v, weights, momentum, alpha, eta, theta, written, rest),
            resets=of_heads(resets, q),
            **form,
            residual_norm=residual_norm,
            max_grad_norm=max_grad_norm,
        )
        return y.transpose(1, 2).to(dtype), weights, momentum, lost, loss.mT


def serves(
    q: Tensor, hidden: int, chunk: int, max_grad_norm: float | None, backend: Backend
) -> bool:
    """Whether the kernels are made for a memory and chunks of this size."""
    if max_grad_norm is not None:
        decline("the kernels of a memory of three layers or more have no max_grad_norm", backend)
        return False
    if q.shape[-1] <= WIDEST and hidden <= WIDEST_HIDDEN and chunk <= LONGEST_CHUNK:
        return True
    obstacle = (
        f"the kernels of a memory of three layers or more serve heads of up to {WIDEST} columns, "
        f"{WIDEST_HIDDEN} hidden units and chunks of {LONGEST_CHUNK} tokens, not {q.shape[-1]}, "
        f"{hidden} and {chunk}"
    )
    decline(obstacle, backend)
    return False
