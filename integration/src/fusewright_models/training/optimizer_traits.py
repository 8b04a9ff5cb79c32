"""What the training loop has to know of an optimizer: who clips, who counts, where rates lie."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from fusewright.optimizer import (
    M3,
    AdamW,
    DeepNestedOptimizer,
    LearnedOptimizer,
    Muon,
    clip_grad_norm_,
)
from torch import Tensor, nn
from torch.optim import Optimizer

OURS = AdamW, DeepNestedOptimizer, LearnedOptimizer, M3, Muon
TORCHS = torch.optim.Adam, torch.optim.AdamW


class Taken(NamedTuple):
    """What became of a step, on the device.

    Attributes:
        norm: of all gradients before clipping, 0-d.
        skipped: whether nothing moved, 0-d; None of an optimizer of others.
    """

    norm: Tensor
    skipped: Tensor | None


def take_step(
    optimizer: Optimizer, loss: Tensor, parameters: Sequence[nn.Parameter], clip_norm: float
) -> Taken:
    """One step, its gradients clipped once: by the optimizer, or before it."""
    # The squares of ours are fp64: no norm is too large for them.
    clip = clip_grad_norm_ if isinstance(optimizer, OURS) else nn.utils.clip_grad_norm_
    norm = None if clips(optimizer) else clip(parameters, clip_norm)
    # Of sharded gradients torch's is sharded, too.
    norm = getattr(norm, "full_tensor", lambda: norm)()
    if isinstance(optimizer, DeepNestedOptimizer):
        optimizer.step(loss)
    else:
        optimizer.step()
    if not isinstance(optimizer, OURS):
        assert norm is not None
        return Taken(norm, None)
    return Taken(optimizer.grad_norm if norm is None else norm, optimizer.skipped)


def clips(optimizer: Optimizer) -> bool:
    """Whether gradients are clipped within its step, which then has their norm."""
    if isinstance(optimizer, DeepNestedOptimizer):
        return optimizer.options.max_grad_norm is not None
    return isinstance(optimizer, AdamW | LearnedOptimizer) and optimizer.max_grad_norm is not None


def kind(optimizer: Optimizer) -> str:
    """Its name and whose it is, for a checkpoint."""
    cls = type(optimizer)
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def network_digest(optimizer: Optimizer) -> str | None:
    """Of the network that makes the steps, its weights and multipliers; None where there is none.
    Waits for the device.
    """
    if not isinstance(optimizer, LearnedOptimizer):
        return None
    mlp = optimizer.mlp
    digest = hashlib.sha256(repr((mlp.exp_mult, mlp.step_mult)).encode())
    for name, x in sorted(mlp.state_dict().items()):
        digest.update(repr((name, x.dtype, tuple(x.shape))).encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rate_dtype(optimizer: Optimizer) -> torch.dtype | None:
    """Of a learning rate on a GPU that a step reads there; None where it wants a number."""
    if not optimizer.param_groups[0]["params"][0].is_cuda:
        return None
    if isinstance(optimizer, OURS):
        # The arithmetic of numbers.
        return torch.float64
    capturable = all(group.get("capturable", False) for group in optimizer.param_groups)
    return torch.float32 if isinstance(optimizer, TORCHS) and capturable else None


def counts(optimizer: Optimizer) -> list[int]:
    """What the host counts of steps, and a replayed one does not."""
    if isinstance(optimizer, DeepNestedOptimizer):
        return [optimizer.global_step]
    if isinstance(optimizer, M3):
        return [group["steps"] for group in optimizer.param_groups]
    return []


def set_counts(optimizer: Optimizer, numbers: Sequence[int]) -> None:
    if isinstance(optimizer, DeepNestedOptimizer):
        (optimizer.global_step,) = numbers
    elif isinstance(optimizer, M3):
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["steps"] = number


def pattern(optimizer: Optimizer) -> Hashable:
    """What the host decides that the next step does: steps of one pattern are one graph."""
    if isinstance(optimizer, DeepNestedOptimizer):
        step, options = optimizer.global_step + 1, optimizer.options
        looks = step == 1 or step % options.controller_update_freq == 0
        return step == 1, looks, step % options.meta_update_freq == 0
    if isinstance(optimizer, M3):
        groups = zip(counts(optimizer), optimizer.param_groups, strict=True)
        return tuple((count + 1) % group["frequency"] == 0 for count, group in groups)
    return None
