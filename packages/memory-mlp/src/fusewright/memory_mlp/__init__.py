"""A neural memory that learns while it reads: fused, causal, differentiable."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._backends import Backend, available_backends
from .memory_read import memory_read
from .memory_scan import MemoryScan, memory_scan
from .memory_state import MemoryState, MemoryStats, Reads
from .memory_update import MemoryUpdate, memory_update
from .neural_memory import NeuralMemory
from .weights import MemoryWeights

try:
    __version__ = version("fusewright-memory-mlp")
except PackageNotFoundError:
    __version__ = "0+source"

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
]
