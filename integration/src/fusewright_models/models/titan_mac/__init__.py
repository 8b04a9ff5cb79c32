"""TitanMAC, its shape and its presets."""

from __future__ import annotations

from ...choices import VARIANTS, Variant
from .config import TitanMACConfig
from .model import TITAN_MAC, TitanMAC, TitanMACState

__all__ = ["TITAN_MAC", "VARIANTS", "TitanMAC", "TitanMACConfig", "TitanMACState", "Variant"]
