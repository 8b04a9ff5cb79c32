"""Calls that launch VeLO's kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.optimizer import _learned_base, _norm_launch
from fusewright.optimizer._backends import Card
from fusewright.optimizer.velo import VeLO
from fusewright.optimizer.velo_networks import VeLONetworks

CARD = Card(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
_norm_launch.card_of = lambda device: CARD
# Launches are recorded on CPU tensors.
_learned_base.uses_triton = lambda x, backend: True


def step(dtype: torch.dtype, start: int = 0, **options) -> None:
    """A step of a matrix and a vector, ``start`` elements off an aligned address."""
    ps = [torch.nn.Parameter(torch.empty(n + start, dtype=dtype)[start:]) for n in (256, 4096)]
    ps[1].data = ps[1].data.view(64, 64)
    for p in ps:
        p.grad = torch.empty_like(p)
    VeLO(ps, VeLONetworks(8, 4), 100, **options).step(1.0)


def one_of_each() -> None:
    step(torch.float32, max_grad_norm=1.0, weight_decay=0.1)


def every_kind() -> None:
    """Every dtype with every option that the kernels distinguish."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for start in (0, 1):
            for weight_decay in (0.0, 0.1):
                step(dtype, start, weight_decay=weight_decay)
