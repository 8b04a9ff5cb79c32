"""Stacks of layers that run backwards: states are recomputed, to the bit, and not stored."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._core.backends import Backend, available_backends
from .fixed_point.fixed_point import FixedPoint, Stepped
from .midpoint.midpoint_stack import MidpointStack, Mode, Passed
from .midpoint.replay import Tape

try:
    __version__ = version("fusewright-reversible")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "Backend",
    "FixedPoint",
    "MidpointStack",
    "Mode",
    "Passed",
    "Stepped",
    "Tape",
    "__version__",
    "available_backends",
]
