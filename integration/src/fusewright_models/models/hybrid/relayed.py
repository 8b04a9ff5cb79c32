"""Caches of a part of a sequence: those of the process before, and afterwards the next one's."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from fusewright.gsa import KeyCache
from torch import Tensor

from ..parts import Relay


class RelayedCaches(dict[int, Any]):
    """Layers take each cache from here once, in their order, and put the one after it back.

    Args:
        relay: to and from the processes beside this one.
        tokens: of this process's part.
    """

    def __init__(self, relay: Relay, tokens: int) -> None:
        super().__init__()
        self.relay, self.tokens = relay, tokens

    def get(self, place: int, default: Any = None) -> Any:
        cache = self.relay.take()
        return self._with_room(*cache) if type(cache) is tuple else cache

    def __setitem__(self, place: int, cache: Any) -> None:
        super().__setitem__(place, cache)
        if isinstance(cache, KeyCache):
            # No more than is held, as a pytree.
            held = cache.keys, cache.values, cache.index_keys
            cache = tuple(memory[:, : cache.length] for memory in held)
        self.relay.give(cache)

    def pass_by(self, layers: int) -> None:
        """Where this process has no tokens."""
        for place in range(layers):
            self[place] = self.get(place)

    def _with_room(self, *held: Tensor) -> KeyCache:
        """For the tokens of this part, and no more of them."""
        keys, values, index_keys = (
            F.pad(x, (0, 0) * (x.ndim - 2) + (0, self.tokens)) for x in held
        )
        return KeyCache(keys, values, index_keys, length=held[0].shape[1])
