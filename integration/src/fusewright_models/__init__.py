"""Models assembled from the fusewright packages, their data and their training program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .transformer_np import Prediction, TransformerNP
from .transformer_np_layers import TransformerNPConfig

try:
    __version__ = version("fusewright-models")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "Prediction",
    "TransformerNP",
    "TransformerNPConfig",
]
