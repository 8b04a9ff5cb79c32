"""Cross entropy over a large vocabulary, of which the logits are never all in memory."""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .linear.linear_cross_entropy import Reduction, linear_cross_entropy

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "Reduction",
    "__version__",
    "available_backends",
    "linear_cross_entropy",
    "warm_up",
]
