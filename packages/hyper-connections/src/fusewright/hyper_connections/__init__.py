"""Reading and writing residual streams around a layer, as mHC's hyper-connections do."""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .streams.stream_coefficients import stream_coefficients
from .streams.stream_read import StreamReading, stream_read
from .streams.stream_write import stream_write

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "StreamReading",
    "__version__",
    "available_backends",
    "stream_coefficients",
    "stream_read",
    "stream_write",
    "warm_up",
]
