"""RMSNorm and LayerNorm in Triton, with a fused residual addition and a deterministic backward
pass, and Sinkhorn-Knopp normalisation of small matrices.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .row_norm.layer_norm import LayerNorm, add_layer_norm, layer_norm
from .row_norm.rms_norm import RMSNorm, add_rms_norm, rms_norm
from .row_norm.rms_norm_gated import RMSNormGated, rms_norm_gated
from .sinkhorn.sinkhorn_knopp import sinkhorn_knopp

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "LayerNorm",
    "RMSNorm",
    "RMSNormGated",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "available_backends",
    "layer_norm",
    "rms_norm",
    "rms_norm_gated",
    "sinkhorn_knopp",
    "warm_up",
]
