"""What decoding keeps of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass
class KeyCache:
    """Keys, values and indexer keys of the tokens so far, in memory for ``capacity`` of them."""

    keys: Tensor
    values: Tensor
    index_keys: Tensor
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append tokens; all tokens' keys, values and indexer keys.

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
        for tokens, x in zip(cached, new, strict=True):
            tokens[:, first:last] = x
        self.length = last
        return tuple(tokens[:, :last] for tokens in cached)
