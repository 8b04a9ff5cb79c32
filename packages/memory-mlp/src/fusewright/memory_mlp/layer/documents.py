"""Rows of a NeuralMemory that hold several documents, and padding in front of a row.

The gradients of a chunk are taken at the weights with which it began. So a document that is to read
what it would read alone begins with a chunk of its own, and so does the first token of a row behind
padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.checks import check_bool, check_device
from .._core.documents import Layout, beginnings, of_tokens, rows_before
from ..inputs.memory_input import Writes, memory_input
from .memory_state import MemoryState, MemoryStats, Reads
from .steps import Rules

Tensor = torch.Tensor


def check_independent(rules: Rules, state: MemoryState | None) -> None:
    """No document may depend on another one, nor on what was read before."""
    if state is not None:
        raise ValueError(
            "state must be None with cu_seqlens or resets, whose documents begin with the first "
            "weights, got one"
        )
    if rules.granularity == "segment":
        raise ValueError(
            'granularity must be "token" or "chunk" with cu_seqlens or resets, got "segment"'
        )
    if rules.scope != "sequence":
        raise ValueError(f'scope must be "sequence" with cu_seqlens or resets, got "{rules.scope}"')


def check_resets(resets: Tensor, x: Tensor, chunk: int) -> None:
    """One bool for each chunk of x, which has whole ones."""
    check_bool("resets", resets)
    rows, tokens = x.shape[:2]
    if tokens % chunk:
        raise ValueError(f"x must have whole chunks of {chunk} tokens with resets, got {tokens}")
    if tuple(resets.shape) != (rows, tokens // chunk):
        raise ValueError(
            f"resets must be [B, T / chunk] = {(rows, tokens // chunk)}, got {tuple(resets.shape)}"
        )
    check_device("resets", resets, "x", x)


class Rotation(NamedTuple):
    """Rows of T tokens with the padding before their first token behind their last one.

    Attributes:
        first: ``[B, 1]`` int64, the first token that is no padding.
        place: ``[T]``.
    """

    first: Tensor
    place: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Rotation:
        """For ``mask [B, T]``, False for padding."""
        # The first of those that are the largest.
        first = mask.int().argmax(1, True) if mask.numel() else mask.long()[:, :1]
        return cls(first, torch.arange(mask.shape[1], device=mask.device))

    def rotated(self, x: Tensor) -> Tensor:
        """``x [B, T, ...]`` from the first token on."""
        return of_tokens(x, (self.place + self.first) % max(len(self.place), 1))

    def back(self, x: Tensor) -> Tensor:
        """The tokens where they came from."""
        return of_tokens(x, (self.place - self.first) % max(len(self.place), 1))


def chunked_input(
    joint: Tensor, logits: Tensor, present: Tensor, resets: Tensor, reach: int, **options: Any
) -> tuple[Tensor, Writes]:
    """q and writes as :func:`memory_input` makes them of rows of whole chunks, whose convolution
    sees nothing from before a chunk that is reset.

    Args:
        joint, logits, present: ``[B, T, ...]``, as for ``memory_input``.
        resets: ``[B, chunks]``.
        reach: rows that the convolution sees before a token.
        options: the others of ``memory_input``.
    """
    rows, chunks = resets.shape
    chunk = joint.shape[1] // chunks
    by_chunk = [x.unflatten(1, (chunks, chunk)).flatten(0, 1) for x in (joint, logits, present)]
    history = rows_before(joint, resets, reach).flatten(0, 1)
    own, own_logits, own_present = by_chunk
    found = memory_input(own, history, logits=own_logits, present=own_present, **options)
    q, *writes = (x.unflatten(0, (rows, chunks)).flatten(1, 2) for x in (found.q, *found.writes))
    return q, Writes(*writes)


def at_end(joint: Tensor, mask: Tensor | None, resets: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Of each row's last document ``joint`` of its last ``reach`` tokens, ``[B, reach, n]``, zeros
    for those that it does not have; and ``[B]`` how many it has, padding behind them left out.
    """
    rows, tokens = joint.shape[:2]
    place = torch.arange(1, tokens + 1, device=joint.device).expand(rows, tokens)
    if mask is not None:
        place = torch.where(mask, place, 0)
    end = place.amax(1)
    chunk = tokens // resets.shape[1]
    # A document that is padding alone has begun, too.
    length = (end - beginnings(resets)[:, -1] * chunk).clamp(min=0)
    back = torch.arange(reach, 0, -1, device=joint.device)
    token = (end.unsqueeze(1) - back).clamp(min=0)
    return of_tokens(joint, token, back <= length.unsqueeze(1)), length


def in_rows(
    layout: Layout, reads: Reads, stats: MemoryStats, *, by_token: bool
) -> tuple[Reads, MemoryStats]:
    """Reads and stats of tokens that were laid out, in the order in which the tokens came."""
    kept, y = layout.in_rows(reads.kept, False), layout.in_rows(reads.y)
    alpha, eta, theta, written = (layout.in_rows(x) for x in stats[:4])
    loss = layout.in_rows(stats.loss) if by_token else stats.loss
    moved = MemoryStats(alpha, eta, theta, written, stats.skipped, loss)
    return Reads(y, kept, layout.present), moved
