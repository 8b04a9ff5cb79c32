"""HybridLM as what continues texts knows a model."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .layers import Caches
from .model import HybridLM
from .steps import Going


@dataclass(frozen=True)
class Reading:
    """For `fusewright_models.text.generate`; a state is what goes on, and is changed by it. On a
    GPU tokens that come one by one are read by a CUDA graph, or eagerly without ``captures``.
    """

    model: HybridLM
    captures: bool = True

    def __call__(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        state = Going(self.model, self.captures) if state is None else state
        return state.read(tokens), state

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


@dataclass(frozen=True)
class Drafting:
    """For `fusewright_models.text.speculate`: hidden rows are those before the last norm, and a
    text can go on from an earlier state in another way.
    """

    model: HybridLM

    def __call__(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return self.model.read_unnormed(tokens, standing(state))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(self.model.normed(hidden))

    def drafts(self, hidden: Tensor, following: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        drafted, state = self.model.draft(hidden, following, state)
        return self.model.logits(drafted[:, -1:]), state


def standing(caches: Caches | None) -> Caches | None:
    """Caches that can be read on with while these stay what they are.

    Keys of both lie in one memory, each with a length of its own: what is read on with the one
    takes the place of what was read on with the other.
    """
    return None if caches is None else {place: copy(cache) for place, cache in caches.items()}
