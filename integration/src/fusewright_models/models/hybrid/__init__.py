"""HybridLM, its shape and its presets."""

from __future__ import annotations

from .config import HYBRID, MODES, HybridConfig
from .model import HybridLM, Losses
from .reading import Drafting, Reading

__all__ = ["HYBRID", "MODES", "Drafting", "HybridConfig", "HybridLM", "Losses", "Reading"]
