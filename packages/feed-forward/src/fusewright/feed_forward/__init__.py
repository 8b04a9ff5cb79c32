"""SiLU gating in Triton, forward and backward in one launch each, and the feed-forward layer that
it makes.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .gating.silu_mul import silu_mul
from .swiglu.swiglu import SwiGLU

__version__ = installed_version(__name__)

__all__ = ["Backend", "SwiGLU", "__version__", "available_backends", "silu_mul", "warm_up"]
