"""SiLU gating in Triton, forward and backward in one launch each, and the feed-forward layer that
it makes.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._core.backends import Backend, available_backends
from .gating.silu_mul import silu_mul
from .swiglu.swiglu import SwiGLU

try:
    __version__ = version("fusewright-feed-forward")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = ["Backend", "SwiGLU", "__version__", "available_backends", "silu_mul"]
