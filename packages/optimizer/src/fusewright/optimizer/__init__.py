"""Optimizers for PyTorch in Triton: all parameters of a dtype in one launch, and no host in the
loop.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ._backends import Backend, available_backends
from .adamw import AdamW
from .deep_momentum import DeepMomentum
from .deep_nested import DeepNestedOptimizer
from .delta_momentum import DeltaMomentum
from .functional import AdamWState, FunctionalAdamW
from .grad_norm import clip_grad_norm_, grad_norm
from .group_depth import group_of, parameter_groups
from .learned_optimizer import LearnedOptimizer
from .learned_update import (
    FunctionalLearnedOptimizer,
    learned_apply,
    learned_init,
    learned_update,
)
from .m3 import M3
from .muon import Muon
from .nested_controller import NestedController
from .newton_schulz import newton_schulz
from .trained_update_mlp import trained_update_mlp
from .update_mlp import UpdateMLP, load_update_mlp
from .velo import VeLO
from .velo_networks import VeLONetworks, load_velo

try:
    __version__ = version("fusewright-optimizer")
except PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "M3",
    "AdamW",
    "AdamWState",
    "Backend",
    "DeepMomentum",
    "DeepNestedOptimizer",
    "DeltaMomentum",
    "FunctionalAdamW",
    "FunctionalLearnedOptimizer",
    "LearnedOptimizer",
    "Muon",
    "NestedController",
    "UpdateMLP",
    "VeLO",
    "VeLONetworks",
    "__version__",
    "available_backends",
    "clip_grad_norm_",
    "grad_norm",
    "group_of",
    "learned_apply",
    "learned_init",
    "learned_update",
    "load_update_mlp",
    "load_velo",
    "newton_schulz",
    "parameter_groups",
    "trained_update_mlp",
]
