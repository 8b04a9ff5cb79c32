"""Models assembled from the fusewright packages, their data and their training program.

A name is imported when it is asked for: the training program's help needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusewright.norm import warm_up

    from .models.hybrid import HYBRID, HybridConfig, HybridLM
    from .models.titan_mac import TITAN_MAC, TitanMAC, TitanMACConfig
    from .models.transformer_np import Prediction, TransformerNP, TransformerNPConfig
    from .patching import Patch, patch
    from .prediction.regressor import TransformerNPRegressor

try:
    __version__ = version("fusewright-models")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "HYBRID",
    "TITAN_MAC",
    "HybridConfig",
    "HybridLM",
    "Patch",
    "Prediction",
    "TitanMAC",
    "TitanMACConfig",
    "TransformerNP",
    "TransformerNPConfig",
    "TransformerNPRegressor",
    "patch",
    "warm_up",
]

HOMES = {
    "HYBRID": ".models.hybrid",
    "HybridConfig": ".models.hybrid",
    "HybridLM": ".models.hybrid",
    "Patch": ".patching",
    "Prediction": ".models.transformer_np",
    "TITAN_MAC": ".models.titan_mac",
    "TitanMAC": ".models.titan_mac",
    "TitanMACConfig": ".models.titan_mac",
    "TransformerNP": ".models.transformer_np",
    "TransformerNPConfig": ".models.transformer_np",
    "TransformerNPRegressor": ".prediction.regressor",
    "patch": ".patching",
    "warm_up": "fusewright.norm",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
