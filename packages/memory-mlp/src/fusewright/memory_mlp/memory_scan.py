r"""A neural memory that learns while it reads, token by token.

For every row and head, with A the weights with which token t's chunk of C tokens began, and
M_W(x) = w2 act(w1 x + b1) + b2:

    G_t = gradient of |M_A(k_t) - v_t|^2 by A
    S_t = eta_t S_(t-1) - theta_t G_t
    W_t = (1 - alpha_t) W_(t-1) + S_t
    y_t = M_(W_t)(q_t), or with read="before" M_(W_(t-1))(q_t)

Every G_t is one outer product per layer, so that within a chunk

    W_t = keep_t W + carry_t S - sum_(j <= t) gamma_tj G_j

is read without weights per token: q against k, times gamma, times the gradients. Chunks follow one
another; what a chunk does are products of matrices.

Saved for the backward pass: the inputs, and weights and momentum at every chunk's start, in fp32;
everything else is computed again. Sums have a fixed order. Operands of products are in q's dtype
(fp32: exact, unless torch multiplies fp32 matrices in TF32), accumulation, weights and momentum in
fp32.

Behrouz, Zhong, Mirrokni, Titans: Learning to Memorize at Test Time, arXiv 2501.00663, section 3;
gradients within a chunk as in its equation 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import scan_reference
from ._backends import Backend, decline, launchers, uses_triton, without_autocast
from ._checks import autocast, dtype_of_state
from ._registration import Derivative, Op, second_order
from ._scan_checks import check_scan
from .packing import pack, unpack
from .weights import MemoryWeights

Tensor = torch.Tensor

ROWS = "Tensor q, Tensor k, Tensor v, Tensor state"
GATES = "Tensor alpha, Tensor eta, Tensor theta, Tensor? written"
# What one program holds of a memory.
WIDEST = 64
WIDEST_HIDDEN = 512
LONGEST_CHUNK = 64
OPTIONS = "int hidden, int chunk, str activation, str read"


class MemoryScan(NamedTuple):
    """What :func:`memory_scan` returns.

    Attributes:
        y: ``[B, T, heads, D]``, what the queries read.
        weights, momentum: after the last token, ``[B, heads, ...]`` in fp32.
    """

    y: Tensor
    weights: MemoryWeights
    momentum: MemoryWeights


def _forward_triton(q, k, v, state, alpha, eta, theta, written, *options):
    return launchers().launch_scan(q, k, v, state, alpha, eta, theta, written, *options)


def _forward_fake(q, k, v, state, alpha, eta, theta, written, hidden, chunk, activation, read):
    chunks = -(-q.shape[1] // chunk)
    states = state.new_empty((chunks, *state.shape))
    return q.new_empty(q.shape), state.new_empty(state.shape), states


def _backward_triton(dy, dend, q, k, v, state, states, *gates_and_options):
    return launchers().launch_scan_backward(dy, dend, q, k, v, states, *gates_and_options)


def _backward_reference(dy, dend, q, k, v, state, states, *gates_and_options):
    return scan_reference.packed_scan_backward(dy, dend, q, k, v, state, *gates_and_options)


def _backward_fake(dy, dend, q, k, v, state, states, alpha, eta, theta, written, *options):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, state, alpha, eta, theta))


_forward = Op(
    f"memory_scan({ROWS}, {GATES}, {OPTIONS}) -> (Tensor y, Tensor end, Tensor states)",
    triton=_forward_triton,
    reference=scan_reference.packed_scan,
    fake=_forward_fake,
)
_backward = Op(
    f"memory_scan_backward(Tensor dy, Tensor dend, {ROWS}, Tensor states, {GATES}, {OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dstate, Tensor dalpha, Tensor deta,"
    " Tensor dtheta)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _MemoryScan(Derivative):
    @staticmethod
    def forward(ctx, run, q, k, v, state, alpha, eta, theta, written, *options):
        y, end, states = run(q, k, v, state, alpha, eta, theta, written, *options)
        ctx.save_for_backward(q, k, v, state, states, alpha, eta, theta, written)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return y, end, *_forward.statistics(ctx, run, states)

    @staticmethod
    def backward(ctx, dy, dend, _):
        if dy is None and dend is None:
            return (None,) * 13
        saved = q, _, _, state, *_ = ctx.saved_tensors
        dy = torch.zeros_like(q) if dy is None else dy
        dend = torch.zeros_like(state) if dend is None else dend
        grads = _backward(dy, dend, *saved, *ctx.options)
        return None, *grads, None, None, None, None, None


@_backward.derivative
class _MemoryScanBackward(Derivative):
    @staticmethod
    def forward(ctx, run, dy, dend, q, k, v, state, states, alpha, eta, theta, written, *options):
        ctx.save_for_backward(dy, dend, q, k, v, state, alpha, eta, theta, written)
        ctx.options = options
        return run(dy, dend, q, k, v, state, states, alpha, eta, theta, written, *options)

    @staticmethod
    def backward(ctx, *cotangents):
        *inputs, written = ctx.saved_tensors

        def backward(dy, dend, q, k, v, state, alpha, eta, theta):
            tensors = (dy, dend, q, k, v, state, alpha, eta, theta, written)
            return scan_reference.packed_scan_backward(*tensors, *ctx.options)

        # The states stand for what the inputs say, and have no gradients of their own.
        *before, dalpha, deta, dtheta = second_order(backward, inputs, cotangents)
        return None, *before, None, dalpha, deta, dtheta, None, None, None, None, None


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
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    backend: Backend = "auto",
) -> MemoryScan:
    """Write every token into the memory of its row and head, and read it there.

    Args:
        q, k, v: ``[B, T, heads, D]``, of one dtype, fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides; only a tensor whose last axis is not contiguous is copied. Under
            autocast they are cast to its dtype. The inner loss is the sum over features, so that
            keys of length 1 are wanted.
        weights, momentum: before the first token, ``[B, heads, ...]``, fp32 (fp64 beside fp64 q);
            may be expanded, as one learned start for all rows.
        alpha: ``[B, T, heads]``, floating point; 0 keeps the memory, 1 forgets it.
        eta: the same; decay of the momentum, 0 to 1.
        theta: the same; the inner learning rate, not negative.
        write_mask: ``[B, T]`` or ``[B, T, heads]``, bool: a token where it is False changes neither
            weights nor momentum. Its key, value and gates are not looked at and may be NaN; its
            query is read.
        chunk: tokens whose gradients are taken at the same weights; 1 is the plain recurrence. A
            last chunk may be shorter.
        activation: "silu", "relu" or "gelu" (the exact one).
        read: whether a token reads the memory "after" or "before" it has written itself. Neither
            sees a later token.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        A :class:`MemoryScan`; y is contiguous, in q's dtype. Weights and momentum are views of one
        tensor, which the next scan or read takes as it is: for a gradient by one of them set
        ``retain_grad()`` or a hook before that. The gates' range is not looked at.
        What is not finite stays within its row and head; a memory that diverges is not mended here.

    Differentiable in everything but write_mask, twice; the second derivative runs in plain torch.
    Memory grows with B * heads * T / chunk copies of weights and momentum.

    Raises:
        TypeError: a tensor is not floating point or not strided, the mask is not bool, chunk is no
            integer.
        ValueError: the shapes, dtypes or devices are not as above, or an option is unknown.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    gates = {"alpha": alpha, "eta": eta, "theta": theta}
    check_scan(q, k, v, weights, momentum, gates, write_mask, chunk, activation, read)
    q, k, v = autocast(q, k, v)
    wide = dtype_of_state(q)
    hidden, width = weights.w1.shape[-2:]
    alpha, eta, theta = (gate.to(wide) for gate in (alpha, eta, theta))
    if write_mask is not None and write_mask.ndim == 2:
        write_mask = write_mask.unsqueeze(-1).expand(alpha.shape)
    state = pack(weights, momentum)
    options = (hidden, chunk, activation, read)
    tensors = (q, k, v, state, alpha, eta, theta, write_mask)
    if uses_triton(q, backend) and serves(q, hidden, chunk, backend):
        y, end, _ = _forward(*tensors, *options)
    else:
        with without_autocast(q.device):
            y, end, _ = scan_reference.packed_scan(*tensors, *options, starts=False)
    return MemoryScan(y, *unpack(end, hidden, width))


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
