"""Every op in plain torch: the specification, the yardstick of the tests and what a CPU runs.

Computed in fp32 (in fp64 for fp64 inputs). Scores of the indexer are returned so; everything else
is rounded once, to the inputs' dtype. All scores of a call are held at once.
"""

from __future__ import annotations

from .attention_reference import (
    of_every_head,
    probabilities,
    sparse_attention_backward,
    sparse_attention_with_lse,
    times_selected,
)
from .indexer_reference import gated_indexer, gated_indexer_backward, gates, keys_seen, wide
from .loss_reference import (
    attention_target,
    indexer_kl_loss,
    indexer_kl_loss_slopes,
    keys_counted,
    log_probabilities,
)
from .selection_reference import greatest, indexer_topk, law_factor, select, spread

__all__ = [
    "attention_target",
    "gated_indexer",
    "gated_indexer_backward",
    "gates",
    "greatest",
    "indexer_kl_loss",
    "indexer_kl_loss_slopes",
    "indexer_topk",
    "keys_counted",
    "keys_seen",
    "law_factor",
    "log_probabilities",
    "of_every_head",
    "probabilities",
    "select",
    "sparse_attention_backward",
    "sparse_attention_with_lse",
    "spread",
    "times_selected",
    "wide",
]
