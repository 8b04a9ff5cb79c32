"""Optimizers for PyTorch in Triton: all parameters of a dtype in one launch, and no host in the
loop.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .adamw.adamw import AdamW
from .adamw.functional_adamw import AdamWState, FunctionalAdamW
from .learned.learned_optimizer import LearnedOptimizer
from .learned.learned_update import (
    FunctionalLearnedOptimizer,
    UpdateMLP,
    learned_apply,
    learned_init,
    learned_update,
)
from .learned.pretrained import load_update_mlp, trained_update_mlp
from .matrix.deep_momentum import DeepMomentum
from .matrix.delta_momentum import DeltaMomentum
from .matrix.m3 import M3
from .matrix.muon import Muon
from .matrix.newton_schulz import newton_schulz
from .nested.deep_nested_optimizer import DeepNestedOptimizer
from .nested.nested_controller import NestedController
from .nested.parameter_groups import group_of, parameter_groups
from .norms.grad_norm import clip_grad_norm_, grad_norm
from .velo.velo import VeLO
from .velo.velo_networks import VeLONetworks, load_velo

__version__ = installed_version(__name__)

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
    "warm_up",
]
