"""Models assembled from the fusewright packages, their data and their training program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .mixture import mixture_log_likelihood, mixture_mean, mixture_sample, mixture_variance
from .transformer_np import Prediction, TransformerNP, TransformerNPConfig

try:
    __version__ = version("fusewright-models")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "Prediction",
    "TransformerNP",
    "TransformerNPConfig",
    "mixture_log_likelihood",
    "mixture_mean",
    "mixture_sample",
    "mixture_variance",
]
