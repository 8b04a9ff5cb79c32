r"""The inputs of the memory, from the joint projection and the gates' logits.

    q, k = normalised(SiLU(conv(joint)))        v = SiLU(conv(joint))
    alpha, eta, rate = sigmoid(logits)          theta = largest (1 - eta) rate, or a constant

with a causal depthwise convolution that also sees the rows before the first token. One launch
forward and two backward: the first recomputes the convolution, the second adds the partial sums of
the taps' gradient. Saved are the inputs. All in fp32, rounded once; sums have a
fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._core.backends import KERNEL_DTYPES, Backend, uses_triton
from .._core.precision import wide, without_autocast
from .._core.registration import Derivative, Op, empty_grad
from . import launch, reference

Tensor = torch.Tensor

# The widest head, and the longest window, that one program holds.
WIDEST_HEAD = 128
LONGEST_REACH = 7

OPERANDS = "Tensor joint, Tensor history, Tensor? taps"
OPTIONS = "int heads, str? key_norm, float largest, float? theta"


class Writes(NamedTuple):
    """The keys, values and gates with which L tokens are written into a memory.

    Attributes:
        k, v: ``[B, L, heads, D]``.
        alpha, eta, theta: ``[B, L, heads]``, in fp32.
        written: ``[B, L, heads]`` bool. Where it is False, the token changes nothing.
    """

    k: Tensor
    v: Tensor
    alpha: Tensor
    eta: Tensor
    theta: Tensor
    written: Tensor

    @property
    def length(self) -> int:
        """L."""
        return self.k.shape[1]

    def map(self, function: Callable[..., Tensor], *others: Writes) -> Writes:
        """``function`` applied to each of the tensors, and to those of ``others`` with it."""
        return Writes(*(function(*parts) for parts in zip(self, *others, strict=True)))

    def part(self, start: int, stop: int) -> Writes:
        """The tokens from ``start`` to before ``stop``, as views."""
        return self.map(lambda x: x[:, start:stop])

    def then(self, later: Writes) -> Writes:
        """These tokens and after them ``later``, in the dtypes of ``later``."""
        if self.length == 0:
            return later
        return self.map(lambda a, b: torch.cat((a.to(b.dtype), b), 1), later)

    def kept(self, like: Writes) -> Writes:
        """Copies in the dtypes of ``like``: a view would keep the whole call's tensors alive."""
        return self.map(lambda x, other: x.to(other.dtype, copy=True), like)


class MemoryInput(NamedTuple):
    """The inputs of a memory from T tokens.

    Attributes:
        q: ``[B, T, heads, D]``, with what the memory is read.
        writes: with what it is written.
        history: ``[B, taps - 1, 3 * heads * D]``, the rows that the next call's convolution sees
            first.
    """

    q: Tensor
    writes: Writes
    history: Tensor


def _forward_fake(joint, history, taps, logits, present, heads, key_norm, largest, theta):
    batch, tokens, channels = joint.shape
    rows = batch, tokens, heads, channels // (3 * heads)
    gate = wide(logits)
    return (
        *(joint.new_empty(rows) for _ in range(3)),
        *(gate.new_empty(rows[:3]) for _ in range(3)),
        joint.new_empty(rows[:3], dtype=torch.bool),
        history.new_empty(history.shape),
    )


def _queries_triton(joint, history, taps, heads, key_norm):
    q, *_, last = launch.memory_input_forward(
        joint, history, taps, None, None, heads, key_norm, 0.0, None
    )
    return q, last


def _queries_fake(joint, history, taps, heads, key_norm):
    batch, tokens, channels = joint.shape
    q = joint.new_empty(batch, tokens, heads, channels // heads)
    return q, history.new_empty(history.shape)


def _backward_triton(joint, *others):
    *grads, dtaps, dlogits = launch.memory_input_backward(joint, *others)
    return *grads, *(empty_grad(joint) if x is None else x for x in (dtaps, dlogits))


def _backward_reference(joint, *others):
    *grads, dtaps, dlogits = reference.memory_input_backward(joint, *others)
    return *grads, *(empty_grad(joint) if x is None else x for x in (dtaps, dlogits))


def _backward_fake(joint, history, taps, logits, dq, dk, dv, dalpha, *others):
    inputs = joint, history, taps, None if dalpha is None else logits
    return tuple(empty_grad(joint) if x is None else x.new_empty(x.shape) for x in inputs)


_forward = Op(
    f"memory_input({OPERANDS}, Tensor logits, Tensor? present, {OPTIONS}) -> (Tensor q, Tensor k,"
    " Tensor v, Tensor alpha, Tensor eta, Tensor theta, Tensor written, Tensor last)",
    triton=launch.memory_input_forward,
    reference=reference.memory_input,
    fake=_forward_fake,
)
_queries = Op(
    f"memory_queries({OPERANDS}, int heads, str? key_norm) -> (Tensor q, Tensor last)",
    triton=_queries_triton,
    reference=reference.memory_queries,
    fake=_queries_fake,
)
_backward = Op(
    f"memory_input_backward({OPERANDS}, Tensor? logits, Tensor? dq, Tensor? dk, Tensor? dv,"
    f" Tensor? dalpha, Tensor? deta, Tensor? dtheta, Tensor? dlast, {OPTIONS})"
    " -> (Tensor djoint, Tensor dhistory, Tensor dtaps, Tensor dlogits)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _MemoryInput(Derivative):
    @staticmethod
    def forward(ctx, run, joint, history, taps, logits, present, *options):
        outputs = run(joint, history, taps, logits, present, *options)
        ctx.save_for_backward(joint, history, taps, logits)
        ctx.options = options
        ctx.set_materialize_grads(False)
        *_, theta, written, _ = outputs
        constant = options[-1] is not None
        ctx.mark_non_differentiable(written, *((theta,) if constant else ()))
        return outputs

    @staticmethod
    def backward(ctx, *cotangents):
        *grads, _, dlast = cotangents
        if all(g is None for g in (*grads, dlast)):
            return (None,) * 10
        rows, gates = grads[:3], grads[3:]
        used = [g for g in gates if g is not None]
        if used:
            gates = [torch.zeros_like(used[0]) if g is None else g for g in gates]
        joint, history, taps, logits = ctx.saved_tensors
        djoint, dhistory, dtaps, dlogits = _backward(
            joint, history, taps, logits, *rows, *gates, dlast, *ctx.options
        )
        own = None if taps is None else dtaps, dlogits if used else None
        return None, djoint, dhistory, *own, *(None,) * 5


@_queries.derivative
class _MemoryQueries(Derivative):
    @staticmethod
    def forward(ctx, run, joint, history, taps, heads, key_norm):
        ctx.save_for_backward(joint, history, taps)
        ctx.options = heads, key_norm, 0.0, None
        ctx.set_materialize_grads(False)
        return run(joint, history, taps, heads, key_norm)

    @staticmethod
    def backward(ctx, dq, dlast):
        if dq is None and dlast is None:
            return (None,) * 6
        joint, history, taps = ctx.saved_tensors
        tensors = joint, history, taps, None, dq, *(None,) * 5, dlast
        djoint, dhistory, dtaps, _ = _backward(*tensors, *ctx.options)
        return None, djoint, dhistory, None if taps is None else dtaps, None, None


_backward.derivative_of_reference()


def memory_input(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    logits: Tensor,
    present: Tensor | None,
    *,
    heads: int,
    key_norm: str | None,
    largest: float,
    theta: float | None,
    backend: Backend,
) -> MemoryInput:
    """Convolution, SiLU and normalisation of ``joint``, gates of ``logits``, and which tokens are
    written.

    Args:
        joint: ``[B, T, 3 * heads * D]``, queries above keys above values.
        history: ``[B, taps - 1, 3 * heads * D]``, of any floating dtype: the projection's rows
            before the first token.
        taps: ``[3 * heads * D, taps]``, the last one for the token itself; None for no convolution.
        logits: ``[B, T, 3 * heads]``, of alpha, eta and rate, in fp32 (fp64 for an fp64 joint);
            of alpha and eta alone where theta is a constant.
        present: ``[B, T]`` bool, or None; the other tokens are not written.
        heads: number of heads.
        key_norm: "l2", "rms" or None.
        largest: what theta / (1 - eta) stays below.
        theta: the constant, or None where it is learned.
        backend: "triton" and "auto" take the kernels where they serve; heads wider than 128 columns
            and more than 8 taps are the reference's.

    Returns:
        A :class:`MemoryInput`: q, k and v contiguous, in joint's dtype; the gates fp32; written in
        the heads where key, value and gates are finite.

    Differentiable in all but present, twice, the history's part included.
    """
    tensors = joint, history, taps, logits, present
    options = heads, key_norm, largest, theta
    if uses_triton(joint, backend) and serves(joint, history, taps, 3 * heads):
        outputs = _forward(*tensors, *options)
    else:
        with without_autocast(joint.device):
            outputs = reference.memory_input(*tensors, *options)
    q, *writes, last = outputs
    return MemoryInput(q, Writes(*writes), last)


def memory_queries(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    *,
    heads: int,
    key_norm: str | None,
    backend: Backend,
) -> Tensor:
    """q ``[B, T, heads, D]`` of a projection of queries alone, ``joint [B, T, heads * D]``; the
    rest as in :func:`memory_input`.
    """
    if uses_triton(joint, backend) and serves(joint, history, taps, heads):
        return _queries(joint, history, taps, heads, key_norm)[0]
    with without_autocast(joint.device):
        return reference.memory_queries(joint, history, taps, heads, key_norm)[0]


def serves(joint: Tensor, history: Tensor, taps: Tensor | None, parts: int) -> bool:
    """Whether the kernels are made for heads, windows and dtypes like these."""
    return (
        joint.shape[-1] // parts <= WIDEST_HEAD
        and history.shape[1] <= LONGEST_REACH
        and history.dtype in KERNEL_DTYPES
        and (taps is None or taps.dtype in KERNEL_DTYPES)
    )
