"""The gated delta rule and Gated DeltaNet in Triton: chunks of matrix products, one serial kernel,
a deterministic backward pass.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .layer.gated_delta_net import DeltaNetCache, GatedDeltaNet
from .rule.gated_delta_rule import Backend, GatedDeltaRule, available_backends, gated_delta_rule
from .rule.gated_delta_rule_step import gated_delta_rule_step

try:
    __version__ = version("fusewright-deltanet")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "Backend",
    "DeltaNetCache",
    "GatedDeltaNet",
    "GatedDeltaRule",
    "__version__",
    "available_backends",
    "gated_delta_rule",
    "gated_delta_rule_step",
]
