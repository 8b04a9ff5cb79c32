"""Attention of many queries to a shared set of keys, and of a sequence to a window of itself, in
Triton: streaming and single-tile kernels with a deterministic backward pass; and rotary positions.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .positions.apply_rotary import apply_rotary
from .positions.rotary import rotary
from .rectangular.rectangular_attention import (
    rectangular_attention,
    rectangular_attention_with_lse,
)
from .sdpa import sdpa_backend
from .window.sliding_window_attention import (
    sliding_window_attention,
    sliding_window_attention_with_lse,
)

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "__version__",
    "apply_rotary",
    "available_backends",
    "rectangular_attention",
    "rectangular_attention_with_lse",
    "rotary",
    "sdpa_backend",
    "sliding_window_attention",
    "sliding_window_attention_with_lse",
    "warm_up",
]
