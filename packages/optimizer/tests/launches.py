"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os
import sys

import torch
from fusewright.optimizer import M3, AdamW, Muon, _norm_launch, clip_grad_norm_, grad_norm
from fusewright.optimizer._backends import Card

CARD = Card(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
_norm_launch.card_of = lambda device: CARD
for name in ("adamw", "grad_norm", "_matrix_groups"):
    # Launches are recorded on CPU tensors.
    sys.modules[f"fusewright.optimizer.{name}"].uses_triton = lambda x, backend: True


def step(dtype: torch.dtype, start: int = 0, **options) -> None:
    """A step of one parameter, ``start`` elements off an aligned address."""
    p = torch.nn.Parameter(torch.empty(4096 + start, dtype=dtype)[start:])
    p.grad = torch.empty_like(p)
    AdamW([p], **options).step()
    clip_grad_norm_([p], 1.0)
    grad_norm([p.grad])


def matrix_step(make: type, dtype: torch.dtype, start: int = 0, **options) -> None:
    """A step of two matrices, and of a vector that AdamW moves."""
    ps = [torch.nn.Parameter(torch.empty(4096 + start, dtype=dtype)[start:]) for _ in range(3)]
    for p in ps[:2]:
        p.data = p.data.view(32, 128)
    for p in ps:
        p.grad = torch.empty_like(p)
    groups = [dict(params=ps[:2]), dict(params=ps[2:], matrix=False)]
    make(groups, **options).step()


def one_of_each() -> None:
    step(torch.float32, max_grad_norm=1.0, amsgrad=True)
    step(torch.bfloat16, rounding="remainder", state_dtype=torch.float32)
    step(torch.bfloat16, rounding="stochastic")
    matrix_step(Muon, torch.float32)
    matrix_step(M3, torch.float32, skip_nonfinite=True)


def every_kind() -> None:
    """Every dtype of parameters and states with every option that the kernels distinguish."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for start in (0, 1):
            for amsgrad in (False, True):
                for decoupled in (False, True):
                    options = dict(amsgrad=amsgrad, decoupled_weight_decay=decoupled)
                    for state in (None, torch.float32, torch.bfloat16):
                        step(dtype, start, state_dtype=state, **options)
                    for rounding in ("remainder", "stochastic"):
                        step(dtype, start, rounding=rounding, **options)
            for skip in (False, True):
                for ns_dtype in (None, torch.bfloat16):
                    options = dict(skip_nonfinite=skip, ns_dtype=ns_dtype)
                    for nesterov in (False, True):
                        matrix_step(Muon, dtype, start, nesterov=nesterov, **options)
                    for relative in (False, True):
                        matrix_step(M3, dtype, start, relative=relative, **options)
