"""Scaling of a tensor by a number."""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .elementwise.scale import scale

__version__ = installed_version(__name__)

__all__ = ["Backend", "__version__", "available_backends", "scale", "warm_up"]
