"""Calls that launch the learned optimizer's kernels, for the compile tests: tensors are never
read.
"""

from __future__ import annotations

import os
import sys

import torch
from fusewright.optimizer import _learned_launch, _norm_launch
from fusewright.optimizer._backends import Card
from fusewright.optimizer.learned_optimizer import LearnedOptimizer
from fusewright.optimizer.learned_update import learned_init, learned_update
from fusewright.optimizer.update_mlp import UpdateMLP

CARD = Card(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
_norm_launch.card_of = _learned_launch.card_of = lambda device: CARD
for name in ("_learned_base", "learned_update"):
    # Launches are recorded on CPU tensors.
    sys.modules[f"fusewright.optimizer.{name}"].uses_triton = lambda x, backend: True


def step(dtype: torch.dtype, start: int = 0, extra: int = 0, **options) -> None:
    """A step of a matrix and a vector, ``start`` elements off an aligned address."""
    ps = [torch.nn.Parameter(torch.empty(n + start, dtype=dtype)[start:]) for n in (256, 4096)]
    ps[1].data = ps[1].data.view(64, 64)
    for p in ps:
        p.grad = torch.empty_like(p)
    mlp = UpdateMLP(extra)
    given = torch.empty(extra) if extra else None
    LearnedOptimizer(ps, mlp, extra_features=given, **options).step()


def gradient(dtype: torch.dtype, extra: int = 0) -> None:
    """The update as a function, and its backward pass."""
    p, g = torch.empty(64, 64, dtype=dtype), torch.empty(64, 64, dtype=dtype)
    mlp = UpdateMLP(extra)
    given = [torch.empty(extra)] if extra else None
    (update,), _ = learned_update(mlp, [p], [g], learned_init([p]), given)
    update.sum().backward()


def one_of_each() -> None:
    step(torch.float32, max_grad_norm=1.0)
    gradient(torch.float32)


def every_kind() -> None:
    """Every dtype with every option that the kernels distinguish, and both kinds of products."""
    matmul = torch.backends.cuda.matmul
    for precision in ("ieee", "tf32"):
        matmul.fp32_precision = precision
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for start in (0, 1):
                step(dtype, start, extra=2)
            gradient(dtype, extra=1)
