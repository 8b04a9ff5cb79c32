"""The gated delta rule and Gated DeltaNet in Triton: chunks of matrix products, one serial kernel,
a deterministic backward pass.
"""

from __future__ import annotations

from ._core.version import installed_version
from ._core.warming import warm_up
from .layer.gated_delta_net import DeltaNetCache, GatedDeltaNet
from .rule.gated_delta_rule import Backend, GatedDeltaRule, available_backends, gated_delta_rule
from .rule.gated_delta_rule_step import gated_delta_rule_step

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "DeltaNetCache",
    "GatedDeltaNet",
    "GatedDeltaRule",
    "__version__",
    "available_backends",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "warm_up",
]
