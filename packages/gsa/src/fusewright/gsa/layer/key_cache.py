"""What decoding keeps of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .tokens import places_of, ranges_of_tokens

Tensor = torch.Tensor


class Places(NamedTuple):
    """Where new tokens ``[B, t]`` of sequences of different lengths stand.

    Attributes:
        lengths: ``[B]``, of the sequences before.
        position: ``[B, t]``, each token's in its sequence.
        first: ``[B, 1]``, the first token of each row that is no padding; None where none is.
        hidden: ``[B, t]``, which are padding; None where none is.
    """

    lengths: Tensor
    position: Tensor
    first: Tensor | None = None
    hidden: Tensor | None = None

    def key_ranges(self) -> Tensor:
        """``[B, t, 2]``: each token sees those up to its own, padding none."""
        end = self.position + 1
        if self.hidden is not None:
            end = end.masked_fill(self.hidden, 0)
        return torch.stack([torch.zeros_like(end), end], -1)


@dataclass
class KeyCache:
    """Keys, values and indexer keys of the tokens so far, in memory for ``capacity`` of them.

    Attributes:
        keys, values, index_keys: ``[B, capacity, ..]``.
        length: how many tokens each sequence has; where they differ, at least as many as the
            longest has: the tokens and padding that came.
        lengths: ``[B]``, int64, of each sequence where they may differ; else None.
    """

    keys: Tensor
    values: Tensor
    index_keys: Tensor
    length: int = 0
    lengths: Tensor | None = None

    @property
    def batches(self) -> int:
        return self.keys.shape[0]

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def places(self, x: Tensor, mask: Tensor | None) -> Places:
        """Where the tokens ``[B, t, ..]`` that follow are to stand, and which are padding."""
        batches, tokens = x.shape[:2]
        lengths = self.lengths
        if lengths is None:
            lengths = torch.full((batches,), self.length, device=x.device)
        elif batches != self.batches:
            raise ValueError(f"the cache takes tokens of {self.batches} sequences, got {batches}")
        if mask is None:
            number = torch.arange(tokens, device=x.device)
            return Places(lengths, lengths.unsqueeze(1) + number)
        ranges = ranges_of_tokens(batches, tokens, mask, None)
        assert ranges is not None
        place, hidden = places_of(tokens, ranges)
        first = hidden.long().cumprod(1).sum(1, keepdim=True)
        return Places(lengths, lengths.unsqueeze(1) + place, first, hidden)

    def extend(
        self, *new: Tensor, places: Places | None = None, whole: bool = False
    ) -> tuple[Tensor, ...]:
        """Append tokens; all tokens' keys, values and indexer keys.

        Args:
            new: keys, values and indexer keys ``[B, t, ..]``.
            places: where they stand, if the sequences have different lengths.
            whole: return all of the memory, what no token has been written to among it.

        Raises:
            ValueError: more tokens than there is memory for, or not of as many sequences, heads and
                columns; nothing is written then.
        """
        first, last = self.length, self.length + new[0].shape[1]
        if last > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, got {last}")
        cached = (self.keys, self.values, self.index_keys)
        for tokens, x in zip(cached, new, strict=True):
            wanted = (tokens.shape[0], last - first, *tokens.shape[2:])
            if tuple(x.shape) != wanted:
                raise ValueError(f"the cache takes {wanted}, got {tuple(x.shape)}")
        if places is None:
            for tokens, x in zip(cached, new, strict=True):
                tokens[:, first:last] = x
        else:
            self._write(cached, new, places)
        self.length = last
        return cached if whole else tuple(tokens[:, :last] for tokens in cached)

    def _write(self, cached: tuple[Tensor, ...], new: tuple[Tensor, ...], places: Places) -> None:
        """Each sequence's tokens behind those that it has. What stands behind them is padding,
        which the next tokens overwrite.
        """
        number = torch.arange(new[0].shape[1], device=places.lengths.device)
        row = torch.arange(self.batches, device=number.device).unsqueeze(1)
        target = places.lengths.unsqueeze(1) + number
        if places.first is not None:
            source = (places.first + number).clamp(max=max(len(number) - 1, 0))
            new = tuple(x[row, source] for x in new)
        for tokens, x in zip(cached, new, strict=True):
            tokens[row, target] = x.to(tokens.dtype)
        hidden = places.hidden
        self.lengths = places.lengths + (len(number) if hidden is None else (~hidden).sum(1))
