"""Calls that launch the kernels of groups' learning rates, for the compile tests: tensors are never
read.
"""

from __future__ import annotations

import os
import sys

import torch
from fusewright.optimizer import _norm_launch, deep_nested
from fusewright.optimizer._backends import Card

CARD = Card(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
_norm_launch.card_of = lambda device: CARD
for name in ("adamw", "grad_norm", "_group_rates"):
    # Launches are recorded on CPU tensors.
    sys.modules[f"fusewright.optimizer.{name}"].uses_triton = lambda x, backend: True


def step(dtype: torch.dtype, start: int = 0, scaled: bool = False, **options) -> None:
    """Two steps of two groups and a hypergradient, ``start`` elements off an aligned address."""
    named = []
    for name in ("embed", "core"):
        p = torch.nn.Parameter(torch.empty(8192 + start, dtype=dtype)[start:].view(2, 4096))
        p.grad = torch.empty_like(p)
        named.append((name, p))
    optimizer = deep_nested.DeepNestedOptimizer(named, mode="explicit", **options)
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    for _ in range(2):
        optimizer.step(1.0)
    optimizer._mode.hypergradient(optimizer.param_groups, [p.grad for _, p in named])


def one_of_each() -> None:
    step(torch.float32, controller_update_freq=3)
    step(torch.bfloat16, controller_hidden_dim=128, scaled=True)


def every_kind() -> None:
    """Every dtype, with every option that the kernels distinguish."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for start in (0, 1):
            step(dtype, start, controller_update_freq=3)
    for hidden in (1, 20, 128):
        for layers in (1, 2, 4):
            for features in ("log", "raw"):
                options = dict(controller_hidden_dim=hidden, controller_num_layers=layers)
                step(torch.float32, scaled=hidden == 20, features=features, **options)
