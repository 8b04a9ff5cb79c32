"""SiLU gating in Triton, forward and backward in one launch each, feed-forward layers with it and
with SiLU alone, and SiLU of narrow inputs.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .gating.silu_mul import silu_mul
from .narrow.silu_linear import silu_linear
from .perceptron.feed_forward import feed_forward
from .perceptron.layer import FeedForward
from .swiglu.gated_feed_forward import gated_feed_forward
from .swiglu.swiglu import SwiGLU

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "FeedForward",
    "SwiGLU",
    "__version__",
    "available_backends",
    "feed_forward",
    "gated_feed_forward",
    "silu_linear",
    "silu_mul",
    "warm_up",
]
