"""What a NeuralMemory carries from one call to the next: tensors, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .packing import pack, unpack
from .weights import MemoryWeights

Weights = tuple[Tensor, ...]


class Writes(NamedTuple):
    """What a run of L tokens asks the memory to remember.

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
        """``function`` of each of the tensors, together with those of ``others``."""
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
        """Copies in the dtypes of ``like``: a view would hold the memory of the whole call."""
        return self.map(lambda x, other: x.to(other.dtype, copy=True), like)


class MemoryState(NamedTuple):
    """A memory between two calls. R is B; 1 where one memory serves all rows ("batch_pooled").

    Attributes:
        weights: the memory's tensors ``[R, heads, ...]``, in fp32 (fp64 in an fp64 module), as they
            were at the start of the running chunk: a :class:`MemoryWeights` for two layers, else
            ``(w1, b1, w2, b2, ...)``.
        momentum: likewise. With two layers both are views of one tensor, which the next call takes
            as it is: a gradient by one of them needs ``retain_grad()`` or a hook set before that.
        tail: the tokens of the running chunk, fewer than ``chunk``; their number is a shape.
        convolution: ``[B, convolution - 1, 3 * heads * D]``, the last projections, which the
            causal convolution sees again.
        skipped: ``[B, heads]`` int64, how many tokens were not written because they were not
            finite.
        position: ``[B]`` int64, how many tokens came since the row's start.
    """

    weights: Weights
    momentum: Weights
    tail: Writes
    convolution: Tensor
    skipped: Tensor
    position: Tensor

    def weight_norm(self) -> Tensor:
        """``[R, heads]``, of each memory's weights at the running chunk's start, detached."""
        return norm(self.weights)

    def momentum_norm(self) -> Tensor:
        """``[R, heads]``, likewise of the momentum."""
        return norm(self.momentum)


class MemoryStats(NamedTuple):
    """What one call tells of itself, detached: no more than what it had computed anyway. Numbers
    over tokens are computed when they are asked for.

    Attributes:
        alpha, eta, theta: ``[B, T, heads]``, the gates.
        written: ``[B, T, heads]`` bool, which tokens were written.
        skipped: ``[B, heads]`` int64, tokens not written for not being finite.
    """

    alpha: Tensor
    eta: Tensor
    theta: Tensor
    written: Tensor
    skipped: Tensor

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """(alpha, eta, theta) over the written tokens, rows and heads; 0 where nothing was written.
        Reading them is the caller's host sync.
        """
        gates = torch.stack((self.alpha, self.eta, self.theta))
        total = torch.where(self.written, gates, 0.0).sum((1, 2, 3))
        alpha, eta, theta = (total / self.written.sum().clamp(min=1)).unbind()
        return alpha, eta, theta


class Reads(NamedTuple):
    """What the queries of T tokens read, all heads joined, before W_o.

    Attributes:
        y: ``[B, T, heads * D]``.
        kept: ``[B, T, heads]`` bool, in which heads the token was written; the outputs of others
            are NaN.
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
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    rows = 1 if shared else batch
    none = first.new_zeros((), dtype=wide)
    own = [x.to(wide) for x in initial]
    weights, momentum = tuple(own), tuple(none.expand_as(x) for x in own)
    if len(own) == 4:
        packed = pack(MemoryWeights(*weights), MemoryWeights(*momentum))
        # Every row has its own, of which the first scan and the first read make nothing new.
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


def like(weights: Weights, tensors: list[Tensor]) -> Weights:
    """``tensors`` as the kind of tuple that ``weights`` is."""
    # Not by the type of ``weights``: torch 2.11 cannot trace that of a tuple made in the graph.
    return MemoryWeights(*tensors) if isinstance(weights, MemoryWeights) else tuple(tensors)


def detached(state: MemoryState) -> MemoryState:
    """The same numbers, cut from the graph."""
    weights, momentum = (like(w, [x.detach() for x in w]) for w in (state.weights, state.momentum))
    return MemoryState(
        weights,
        momentum,
        state.tail.map(Tensor.detach),
        state.convolution.detach(),
        state.skipped,
        state.position,
    )


def with_rows_reset(state: MemoryState, fresh: MemoryState, rows: Tensor) -> MemoryState:
    """``fresh`` where ``rows [B]`` is True. The running chunk goes on: a row that starts amid it
    has a first chunk that is shorter.

    One memory of all rows stays as it is.
    """

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(rows.view(-1, *(1,) * (old.ndim - 1)), new, old)

    def chosen_memory(new: Weights, old: Weights) -> Weights:
        if old[0].shape[0] != rows.shape[0]:
            return old
        return like(old, [chosen(x, y) for x, y in zip(new, old, strict=True)])

    tail = state.tail
    return MemoryState(
        chosen_memory(fresh.weights, state.weights),
        chosen_memory(fresh.momentum, state.momentum),
        tail._replace(written=tail.written & ~rows.view(-1, 1, 1)),
        chosen(fresh.convolution, state.convolution),
        chosen(fresh.skipped, state.skipped),
        chosen(fresh.position, state.position),
    )


def stats_of(writes: Writes, skipped: Tensor) -> MemoryStats:
    """The stats of a call that wrote ``writes``."""
    alpha, eta, theta = (x.detach() for x in (writes.alpha, writes.eta, writes.theta))
    return MemoryStats(alpha, eta, theta, writes.written, skipped)


@torch.no_grad()
def norm(weights: Weights) -> Tensor:
    """The norm over all tensors, for every row and head."""
    parts = [torch.linalg.vector_norm(x.flatten(2), dim=-1) for x in weights]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)
