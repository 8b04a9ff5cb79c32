"""Cross entropy over a large vocabulary, of which the logits are never all in memory."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._core.backends import Backend, available_backends
from .linear.linear_cross_entropy import linear_cross_entropy

try:
    __version__ = version("fusewright-cross-entropy")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = ["Backend", "__version__", "available_backends", "linear_cross_entropy"]
