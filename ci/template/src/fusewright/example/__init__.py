"""Scaling of a tensor by a number."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._core.backends import Backend, available_backends
from .elementwise.scale import scale

try:
    __version__ = version("fusewright-example")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = ["Backend", "__version__", "available_backends", "scale"]
