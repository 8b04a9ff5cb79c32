"""RMSNorm and LayerNorm in Triton, with a fused residual addition and a deterministic backward
pass, also with the linear layer behind them, and Sinkhorn-Knopp normalisation of small matrices.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .norm_linear.layer_norm_linear import LayerNormLinear, layer_norm_linear
from .norm_linear.rms_norm_linear import RMSNormLinear, rms_norm_linear
from .row_norm.layer_norm import LayerNorm, add_layer_norm, layer_norm
from .row_norm.rms_norm import RMSNorm, add_rms_norm, rms_norm
from .row_norm.rms_norm_gated import RMSNormGated, rms_norm_gated
from .sinkhorn.sinkhorn_knopp import sinkhorn_knopp

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "LayerNorm",
    "LayerNormLinear",
    "RMSNorm",
    "RMSNormGated",
    "RMSNormLinear",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "available_backends",
    "layer_norm",
    "layer_norm_linear",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_linear",
    "sinkhorn_knopp",
    "warm_up",
]
