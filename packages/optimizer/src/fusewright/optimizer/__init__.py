"""Optimizers for PyTorch in Triton: all parameters of a dtype in one launch, and no host in the
loop.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._backends import Backend, available_backends
from .adamw import AdamW
from .functional import AdamWState, FunctionalAdamW
from .grad_norm import clip_grad_norm_, grad_norm

try:
    __version__ = version("fusewright-optimizer")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "AdamW",
    "AdamWState",
    "Backend",
    "FunctionalAdamW",
    "__version__",
    "available_backends",
    "clip_grad_norm_",
    "grad_norm",
]
