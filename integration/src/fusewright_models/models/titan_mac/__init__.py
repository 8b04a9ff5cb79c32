"""TitanMAC, its shape and its presets."""

from __future__ import annotations

from .config import VARIANTS, TitanMACConfig, Variant
from .model import TITAN_MAC, TitanMAC, TitanMACState

__all__ = ["TITAN_MAC", "VARIANTS", "TitanMAC", "TitanMACConfig", "TitanMACState", "Variant"]
