"""Stacks of layers that run backwards: states are recomputed, to the bit, and not stored."""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .fixed_point.fixed_point import FixedPoint, Stepped
from .midpoint.midpoint_stack import MidpointStack, Mode, Passed
from .midpoint.replay import Tape

__version__ = installed_version(__name__)

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
    "warm_up",
]
