"""What a HybridLM has read, and how it goes on: token by token from a CUDA graph, since a step of
hundreds of small launches is as slow as the host that launches them, and its replay is not.
"""

from __future__ import annotations

import warnings
from copy import copy
from typing import Any

import torch
from fusewright.deltanet import DeltaNetCache
from fusewright.gsa import KeyCache
from torch import Tensor

from ...devices import capturing, reason_of
from .layers import Caches
from .model import HybridLM


class Going:
    """Reads rows of tokens with what the layers have read before.

    Where tokens come one by one, on a GPU, their step is captured once its like has been taken
    eagerly, for as long as the memory of the keys has room; then they are read eagerly once more,
    into larger memory, and captured again. Replayed and eager steps follow one another in any
    order. Where a capture fails, a warning says why, and all is eager.

    Args:
        model: the model, in evaluation mode.
        captures: whether steps are captured, on a GPU.
    """

    def __init__(self, model: HybridLM, captures: bool) -> None:
        self.model, self.captures = model, captures
        self.caches: Caches = {}
        self.step: Step | None = None
        # Of the eager step before, if tokens come one by one: its shape and precision.
        self.like: Any = None

    def read(self, tokens: Tensor) -> Tensor:
        """Hidden rows ``[B, T, C]`` of the tokens ``[B, T]`` that follow."""
        like = tokens.shape, *precision_of(tokens)
        single = self.captures and tokens.is_cuda and tokens.shape[1] == 1 and self.caches
        if not single or not self._has_room() or like != self.like:
            self.like = self.step = None
        elif self.step is None:
            self._capture(tokens)
        if self.step is not None:
            return self.step(tokens)
        if single:
            know_lengths(self.caches)
            self.like = like
        hidden, self.caches = self.model.read(tokens, self.caches or None)
        return hidden

    def _has_room(self) -> bool:
        """Whether one token more fits the memory that there is."""
        caches = (cache for cache in self.caches.values() if isinstance(cache, KeyCache))
        return all(cache.length < cache.capacity for cache in caches)

    def _capture(self, tokens: Tensor) -> None:
        try:
            self.step = Step(self.model, tokens, self.caches)
        except RuntimeError as error:
            self.captures = False
            # What ended the capture, rather than that it ended.
            reason = reason_of(error.__context__ or error)
            warnings.warn(f"steps of one token are eager: {reason}", stacklevel=4)


class Step:
    """The next token of each row, from a graph that leaves the caches as they are after it.

    Args:
        model: of which such a step has been taken, in the caller's precision.
        tokens: ``[B, 1]``.
        caches: of the tokens before, which `know_lengths` has seen.

    Raises:
        RuntimeError: the step waits for the device, or does else what a capture does not bear.
    """

    def __init__(self, model: HybridLM, tokens: Tensor, caches: Caches) -> None:
        self.tokens, self.caches = tokens.clone(), caches
        self.graph = torch.cuda.CUDAGraph()
        enabled, dtype = precision_of(tokens)
        # Weights that an eager step has cast for autocast are gone when the graph is replayed.
        uncached = torch.autocast(
            tokens.device.type, enabled=enabled, dtype=dtype, cache_enabled=False
        )
        # Nothing of this is run, but the host counts.
        before = {place: copy(cache) for place, cache in caches.items()}
        with torch.no_grad(), capturing(self.graph, tokens.device), uncached:
            self.hidden, after = model.read(self.tokens, before)
            for place, cache in caches.items():
                for old, new in zip(carried(cache), carried(after[place]), strict=True):
                    old.copy_(new)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Hidden rows ``[B, 1, C]``."""
        self.tokens.copy_(tokens)
        self.graph.replay()
        for place, cache in self.caches.items():
            if isinstance(cache, KeyCache):
                cache.length += 1
            else:
                self.caches[place] = cache._replace(tokens=cache.tokens + 1)
        # The next replay writes there.
        return self.hidden.clone()


def know_lengths(caches: Caches) -> None:
    """Have the device know how many tokens there are, which a graph could not ask the host."""
    for cache in caches.values():
        if isinstance(cache, KeyCache) and cache.lengths is None:
            rows = cache.keys.new_ones(cache.batches, dtype=torch.int64)
            cache.lengths = rows * cache.length


def carried(cache: KeyCache | DeltaNetCache) -> tuple[Tensor, ...]:
    """What a step leaves in other memory than it found it in."""
    if isinstance(cache, KeyCache):
        assert cache.lengths is not None
        return (cache.lengths,)
    return (cache.state, *cache.history)


def precision_of(tokens: Tensor) -> tuple[bool, Any]:
    """Whether autocast is on where the tokens are, and to what."""
    kind = tokens.device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
