"""TransformerNP, its shape and its layers."""

from __future__ import annotations

from .layers import Norm, TransformerNPConfig
from .model import Prediction, TransformerNP

__all__ = ["Norm", "Prediction", "TransformerNP", "TransformerNPConfig"]
