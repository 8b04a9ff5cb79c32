"""AdamW with decay on matrices alone, and a warm-up followed by a cosine."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
) -> Optimizer:
    """torch's AdamW, all tensors of a group in one launch; norm gains and the like do not decay.

    Likelihoods have gradients with long tails (1 / sigma of a narrow component): the second moment
    forgets them after some twenty steps, not a thousand.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=betas, fused=True
    )


def warmup_cosine(step: int, *, steps: int, warmup_steps: int) -> float:
    """The share of the peak rate that step ``step`` of ``steps``, counted from 0, trains with.

    Linear from 1 / warmup_steps to 1, then half a cosine down to zero. It depends on the step
    alone, so that a resumed run has no schedule to restore.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))
