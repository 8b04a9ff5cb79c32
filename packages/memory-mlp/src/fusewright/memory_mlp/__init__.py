"""A neural memory that learns while it reads: fused, causal, differentiable."""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .common.weights import MemoryWeights
from .layer.memory_state import MemoryState, MemoryStats, Reads
from .layer.neural_memory import NeuralMemory
from .read.memory_read import memory_read
from .scan.memory_scan import MemoryScan, memory_scan
from .update.memory_update import MemoryUpdate, memory_update

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "MemoryScan",
    "MemoryState",
    "MemoryStats",
    "MemoryUpdate",
    "MemoryWeights",
    "NeuralMemory",
    "Reads",
    "__version__",
    "available_backends",
    "memory_read",
    "memory_scan",
    "memory_update",
    "warm_up",
]
