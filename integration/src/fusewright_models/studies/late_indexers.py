"""Training in which the indexers learn nothing at first, so that one sees what they learn later.

Attention sharpens while a model trains, and the more it does, the harder it is to follow. An
indexer that learns beside it from the first step is never far away; one that begins when there is
something to follow has to come nearer. It is the order in which sparse attention is put into models
that were trained dense (DeepSeek-V3.2): first attention, then its indexers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cli.hybrid import HybridBatch, WarmedWindows, all_losses
from ..models.hybrid import HybridLM
from ..training import Told


@dataclass(frozen=True)
class LateBatch(HybridBatch):
    """
    Attributes:
        followed: the indexers learn from it.
    """

    followed: bool


class LateWindows(WarmedWindows):
    """`WarmedWindows` of whose first batches the indexers learn nothing."""

    def __init__(self, warmed: WarmedWindows, unfollowed: int) -> None:
        super().__init__(warmed.windows, warmed.dense)
        self.unfollowed = unfollowed

    def sample(self, batch: int) -> LateBatch:
        followed = self.windows.batches >= self.unfollowed
        some = super().sample(batch)
        return LateBatch(**vars(some), followed=followed)


def late_losses(model: HybridLM, batch: LateBatch) -> Told:
    """`all_losses`, that of the indexers without weight where they learn nothing."""
    told = all_losses(model, batch)
    if batch.followed:
        return told
    # Taken off again, so that the indexers' gradients are zeros and not missing.
    return told._replace(loss=told.loss - model.config.index_weight * told.means["indexer_loss"])
