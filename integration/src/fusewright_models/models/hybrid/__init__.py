"""HybridLM, its shape and its presets."""

from __future__ import annotations

from .config import HYBRID, MODES, HybridConfig
from .model import HybridLM, Losses

__all__ = ["HYBRID", "MODES", "HybridConfig", "HybridLM", "Losses"]
