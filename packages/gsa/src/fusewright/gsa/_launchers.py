"""What the ops call once triton is needed."""

from __future__ import annotations

from ._divergence import launch_divergence
from ._scores import launch_scores, launch_scores_backward
from ._selection import launch_selection
from ._sparse import launch_sparse
from ._sparse_backward import launch_sparse_backward

__all__ = [
    "launch_divergence",
    "launch_scores",
    "launch_scores_backward",
    "launch_selection",
    "launch_sparse",
    "launch_sparse_backward",
]
