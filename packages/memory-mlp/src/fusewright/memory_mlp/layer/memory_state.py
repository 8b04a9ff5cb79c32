"""The state that a NeuralMemory returns from one call for the next: tensors, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.precision import wide_dtype
from ..common import weights as packing
from ..common.weights import MemoryWeights, Weights, mapped, pack, unpack
from ..inputs.memory_input import Writes


class MemoryState(NamedTuple):
    """A memory between two calls. R is B; 1 where one memory serves all rows ("batch_pooled").

    Attributes:
        weights: the memory's tensors ``[R, heads, ...]``, in fp32 (fp64 in an fp64 module), as they
            were at the start of the running chunk: a :class:`MemoryWeights` for two layers, else
            ``(w1, b1, w2, b2, ...)``.
        momentum: likewise. With granularity "token" and two layers both are views of one tensor,
            ``packed``, which the next call takes as it is; gradients are those of separate tensors.
        tail: the tokens of the running chunk, fewer than ``chunk``; their number is a shape.
        convolution: ``[B, convolution - 1, 3 * heads * D]``, the last projections, which the
            causal convolution sees again.
        skipped: ``[B, heads]`` int64, how many tokens were not written because they, their step
            or, of a scan with ``max_grad_norm``, their chunk was not finite.
        position: ``[B]`` int64, how many tokens were seen since the row's start.
    """

    weights: Weights
    momentum: Weights
    tail: Writes
    convolution: Tensor
    skipped: Tensor
    position: Tensor

    @property
    def packed(self) -> Tensor | None:
        """``[R, heads, 2, SIZE]``, weights and momentum of two layers in one tensor, a function of
        them: that of which they are views, or a copy where they are tensors of their own. None for
        any other number of layers.
        """
        if isinstance(self.weights, MemoryWeights) and isinstance(self.momentum, MemoryWeights):
            return pack(self.weights, self.momentum)
        return None

    def weight_norm(self) -> Tensor:
        """``[R, heads]``, of each memory's weights at the running chunk's start, detached."""
        return norm(self.weights)

    def momentum_norm(self) -> Tensor:
        """``[R, heads]``, likewise of the momentum."""
        return norm(self.momentum)


class MemoryStats(NamedTuple):
    """Statistics of one call, detached: tensors that it has computed anyway. Numbers over tokens
    are computed when a caller asks for them.

    Attributes:
        alpha, eta, theta: ``[B, T, heads]``, the gates of the tokens.
        written: ``[B, T, heads]`` bool, which tokens were written.
        skipped: ``[B, heads]`` int64, tokens not written for that.
        loss: the inner loss |M(k) - v|^2, over D where ``reduction`` is a mean: of each token at
            the weights with which its chunk began, ``[B, T, heads]``, 0 where it writes nothing;
            with pooled steps as ``reduction`` has it, of each step ``[B, steps, heads]``.
    """

    alpha: Tensor
    eta: Tensor
    theta: Tensor
    written: Tensor
    skipped: Tensor
    loss: Tensor

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """(alpha, eta, theta) over the written tokens, rows and heads; 0 where nothing was written.
        Reading them is the caller's host sync.
        """
        gates = torch.stack((self.alpha, self.eta, self.theta))
        total = torch.where(self.written, gates, 0.0).sum((1, 2, 3))
        alpha, eta, theta = (total / self.written.sum().clamp(min=1)).unbind()
        return alpha, eta, theta


class Reads(NamedTuple):
    """The memory's outputs for the queries of T tokens, all heads joined, before W_o.

    Attributes:
        y: ``[B, T, heads * D]``.
        kept: ``[B, T, heads]`` bool, in which heads the token was written; the outputs of the
            others are NaN.
        mask: ``[B, T]`` bool or None: the outputs of masked tokens are 0.
    """

    y: Tensor
    kept: Tensor
    mask: Tensor | None

    @classmethod
    def joined(cls, parts: Sequence[Reads]) -> Reads:
        """Of calls that follow one another, at least one."""
        if not parts:
            raise ValueError("wanted at least one Reads to join; got none")
        y, kept, masks = zip(*parts, strict=True)
        if all(mask is None for mask in masks):
            return cls(torch.cat(y, 1), torch.cat(kept, 1), None)
        filled = [kept.new_ones(kept.shape[:2]) if m is None else m for _, kept, m in parts]
        return cls(torch.cat(y, 1), torch.cat(kept, 1), torch.cat(filled, 1))


def fresh_state(
    initial: list[Tensor], batch: int, shared: bool, head_dim: int, reach: int
) -> MemoryState:
    """The state of ``batch`` rows before their first token.

    Args:
        initial: the memory's tensors ``[heads, ...]``.
        batch: number of rows.
        shared: whether one memory serves all of them.
        head_dim: D.
        reach: how many earlier tokens the convolution sees.
    """
    first, heads = initial[0], initial[0].shape[0]
    wide = wide_dtype(first)
    rows = 1 if shared else batch
    none = first.new_zeros((), dtype=wide)
    own = [x.to(wide) for x in initial]
    weights, momentum = tuple(own), tuple(none.expand_as(x) for x in own)
    if len(own) == 4:
        packed = pack(MemoryWeights(*weights), MemoryWeights(*momentum))
        # Every row has its own, which the first scan and the first read take without a copy.
        packed = packed.expand(rows, *packed.shape).clone(memory_format=torch.contiguous_format)
        weights, momentum = unpack(packed, *own[0].shape[-2:])
    else:
        weights, momentum = (
            tuple(x.expand(rows, *x.shape) for x in w) for w in (weights, momentum)
        )
    k = first.new_zeros(batch, 0, heads, head_dim)
    gate = first.new_zeros(batch, 0, heads, dtype=wide)
    return MemoryState(
        weights,
        momentum,
        Writes(k, k, gate, gate, gate, gate.bool()),
        first.new_zeros(batch, reach, 3 * heads * head_dim),
        first.new_zeros(batch, heads, dtype=torch.int64),
        first.new_zeros(batch, dtype=torch.int64),
    )


def detached(state: MemoryState) -> MemoryState:
    """The same numbers, cut from the graph."""
    return MemoryState(
        *packing.detached(state.weights, state.momentum),
        state.tail.map(Tensor.detach),
        state.convolution.detach(),
        state.skipped,
        state.position,
    )


def with_rows_reset(
    state: MemoryState, fresh: MemoryState, rows: Tensor, *, shared: bool
) -> MemoryState:
    """``fresh`` where ``rows [B]`` is True. The running chunk goes on: a row that starts amid it
    has a first chunk that is shorter. A memory that all rows share stays as it is.
    """

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(rows.view(-1, *(1,) * (old.ndim - 1)), new, old)

    def chosen_memory(new: Weights, old: Weights) -> Weights:
        return old if shared else mapped(lambda x, y: chosen(y, x), old, new)

    tail = state.tail
    return MemoryState(
        chosen_memory(fresh.weights, state.weights),
        chosen_memory(fresh.momentum, state.momentum),
        tail._replace(written=tail.written & ~rows.view(-1, 1, 1)),
        chosen(fresh.convolution, state.convolution),
        chosen(fresh.skipped, state.skipped),
        chosen(fresh.position, state.position),
    )


def stats_of(writes: Writes, skipped: Tensor, loss: Tensor) -> MemoryStats:
    """The stats of a call that wrote ``writes``."""
    alpha, eta, theta = (x.detach() for x in (writes.alpha, writes.eta, writes.theta))
    return MemoryStats(alpha, eta, theta, writes.written, skipped, loss)


@torch.no_grad()
def norm(weights: Weights) -> Tensor:
    """The norm over all tensors, for every row and head."""
    parts = [torch.linalg.vector_norm(x.flatten(2), dim=-1) for x in weights]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)
