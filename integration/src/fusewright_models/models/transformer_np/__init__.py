"""TransformerNP, its shape and its layers."""

from __future__ import annotations

from ...choices import Norm
from .layers import TransformerNPConfig
from .model import EncodedContext, Prediction, TransformerNP

__all__ = ["EncodedContext", "Norm", "Prediction", "TransformerNP", "TransformerNPConfig"]
