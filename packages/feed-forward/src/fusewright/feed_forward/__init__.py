"""SiLU gating in Triton, forward and backward in one launch each, and feed-forward layers with it
and with SiLU alone.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .gating.silu_mul import silu_mul
from .perceptron.feed_forward import feed_forward
from .perceptron.layer import FeedForward
from .swiglu.swiglu import SwiGLU

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "FeedForward",
    "SwiGLU",
    "__version__",
    "available_backends",
    "feed_forward",
    "silu_mul",
    "warm_up",
]
