"""What a trained TransformerNP says of rows in their own units."""

from __future__ import annotations

from .predictor import Predicted, Predictor
from .trained import load_trained

__all__ = ["Predicted", "Predictor", "load_trained"]
