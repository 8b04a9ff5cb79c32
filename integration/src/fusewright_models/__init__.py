"""Models assembled from the fusewright packages, their data and their training program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fusewright.norm import warm_up

from .models.hybrid import HYBRID, HybridConfig, HybridLM
from .models.titan_mac import TITAN_MAC, TitanMAC, TitanMACConfig
from .models.transformer_np import Prediction, TransformerNP, TransformerNPConfig

try:
    __version__ = version("fusewright-models")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "HYBRID",
    "TITAN_MAC",
    "HybridConfig",
    "HybridLM",
    "Prediction",
    "TitanMAC",
    "TitanMACConfig",
    "TransformerNP",
    "TransformerNPConfig",
    "warm_up",
]
