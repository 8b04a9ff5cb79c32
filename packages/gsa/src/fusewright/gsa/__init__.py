"""Gated sparse attention in Triton: an indexer that scores keys, the exact selection by its scores,
attention to the selected keys, the loss that the indexer learns by, and the layer of them.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .common.checks import Form, Law, Path
from .indexer.gated_indexer import gated_indexer
from .layer.gated_sparse_attention import GatedSparseAttention, Selection, all_keys
from .layer.key_cache import KeyCache
from .loss.indexer_kl_loss import indexer_kl_loss
from .selection.indexer_topk import SelectionStats, indexer_topk
from .sparse.sparse_attention import sparse_attention, sparse_attention_with_lse

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "Form",
    "GatedSparseAttention",
    "KeyCache",
    "Law",
    "Path",
    "Selection",
    "SelectionStats",
    "__version__",
    "all_keys",
    "available_backends",
    "gated_indexer",
    "indexer_kl_loss",
    "indexer_topk",
    "sparse_attention",
    "sparse_attention_with_lse",
    "warm_up",
]
