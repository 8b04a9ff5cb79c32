"""Optimizers by name, and a warm-up followed by a schedule.

adamw         AdamW of fusewright.optimizer, which clips and skips within its step
nested        the same with a rate for each group, set by a network that is trained on the way
m3, muon      momentum, orthogonalised, for the matrices between embedding and head; AdamW elsewhere
learned       a trained network makes the step
torch-adamw   torch's AdamW

One ``lr`` serves all but "learned": steps of "muon" and "m3" are scaled to the size of AdamW's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from fusewright.optimizer import (
    M3,
    AdamW,
    Backend,
    DeepNestedOptimizer,
    LearnedOptimizer,
    Muon,
    group_of,
    load_update_mlp,
    parameter_groups,
    trained_update_mlp,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from ..choices import OPTIMIZER_NAMES, OptimizerName, Schedule
from ..extras import imported
from .padding import padding_here

# Likelihoods have gradients with long tails (1 / sigma of a narrow component): the second moment
# forgets them after some twenty steps, not a thousand.
BETAS = (0.9, 0.95)
# The network that is shipped was trained on models a hundred times smaller than the presets, which
# diverge by steps of its own size; and without decay.
LEARNED_RATE, LEARNED_DECAY = 0.1, 0.0
# The controller of "nested" learns in every so many steps: runs of hundreds should see it move.
META_EVERY, META_RATE = 10, 1e-3
VECTORS = "vectors"
# Where models keep the layers between embedding and head, and which matrices of these make a few
# numbers for each token, as a head does, or have a loss of their own.
HIDDEN = ("blocks.", "stack.layers.", "second.")
SMALL_OUTPUTS = {"gates", "a_proj", "b_proj", "index_q", "index_k", "index_w"}
NO_FACTORS: Mapping[str, float] = {}

Groups = list[dict[str, Any]]


class Asked(NamedTuple):
    """The arguments of `make_optimizer`, for one of its optimizers."""

    model: nn.Module
    lr: float
    weight_decay: float
    clip_norm: float
    betas: tuple[float, float]
    backend: Backend
    weights: str | os.PathLike | None
    rate_factors: Mapping[str, float]


def default_rate(name: OptimizerName, adamws: float) -> float:
    """The peak rate of a run that names none, where AdamW's would be ``adamws``."""
    return LEARNED_RATE if name == "learned" else adamws


def default_decay(name: OptimizerName, adamws: float) -> float:
    """Likewise of the weight decay."""
    return LEARNED_DECAY if name == "learned" else adamws


def make_optimizer(
    name: OptimizerName,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    clip_norm: float,
    betas: tuple[float, float] = BETAS,
    backend: Backend = "auto",
    weights: str | os.PathLike | None = None,
    rate_factors: Mapping[str, float] = NO_FACTORS,
) -> Optimizer:
    """The optimizer of that name over a model that lies where it will be trained.

    Args:
        name: as above.
        model: all its parameters that need gradients are taken.
        lr: of the largest steps; schedules scale it.
        weight_decay: of matrices; norm gains and the like do not decay.
        clip_norm: what gradients are clipped to, by optimizers that clip within their step.
        betas: shares of the first and the second moment that a step keeps.
        backend: of fusewright's kernels.
        weights: of "learned": a safetensors file in the public format.
        rate_factors: what the rate of parameters with such in their names is multiplied by, where
            AdamW moves them and nothing sets the rates of groups.

    Raises:
        ValueError: no optimizer has that name, a number is out of its range, weights or factors are
            given to an optimizer that takes none, or the file is none of such weights.
        RuntimeError: backend is "triton" and kernels cannot serve; weights need a library that is
            not installed.
    """
    if name not in OPTIMIZER_NAMES:
        raise ValueError(f"optimizer must be one of {OPTIMIZER_NAMES}; got {name!r}")
    if weights is not None and name != "learned":
        raise ValueError(f"only the optimizer learned has weights of its own; got {name}")
    if rate_factors and name in ("nested", "learned"):
        raise ValueError(f"the optimizer {name} takes one rate for all parameters; got factors")
    if name == "learned" and betas != BETAS:
        raise ValueError(f"the optimizer learned has no betas; got {betas}")
    asked = Asked(model, lr, weight_decay, clip_norm, betas, backend, weights, rate_factors)
    makers: dict[str, Callable[[Asked], Optimizer]] = {
        "nested": nested,
        "learned": learned,
        "muon": muon,
        "m3": m3,
    }
    if name in makers:
        return makers[name](asked)
    numbers: dict[str, Any] = dict(
        lr=lr, weight_decay=weight_decay, betas=betas, rate_factors=rate_factors
    )
    if name == "torch-adamw":
        return torch_adamw(model, **numbers)
    return adamw(model, **numbers, clip_norm=clip_norm, backend=backend)


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = BETAS,
    clip_norm: float | None = None,
    backend: Backend = "auto",
    rate_factors: Mapping[str, float] = NO_FACTORS,
) -> AdamW:
    """fusewright.optimizer.AdamW: all tensors in one launch.

    With ``clip_norm`` it clips within the step, and skips one whose gradients have no finite norm.
    """
    groups = _decaying(model.named_parameters(), lr, weight_decay, rate_factors)
    return AdamW(groups, lr=lr, betas=betas, max_grad_norm=clip_norm, backend=backend)


def torch_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = BETAS,
    rate_factors: Mapping[str, float] = NO_FACTORS,
) -> Optimizer:
    """torch's fused AdamW, which a CUDA graph may have captured."""
    groups = _decaying(model.named_parameters(), lr, weight_decay, rate_factors)
    on_gpu = any(p.is_cuda for p in model.parameters())
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True, capturable=on_gpu)


def nested(asked: Asked) -> DeepNestedOptimizer:
    """AdamW whose rates a controller sets: for the core, for embeddings and gates, for vectors.

    The controller follows how the next batch's loss depends on the rates, in every tenth step.
    """
    groups = parameter_groups(
        asked.model, lambda name, p: group_of(name, p) if p.ndim > 1 else VECTORS
    )
    for group in groups:
        group["weight_decay"] = 0.0 if group["name"] == VECTORS else asked.weight_decay
    return DeepNestedOptimizer(
        asked.model,
        asked.lr,
        META_RATE,
        grouping=groups,
        betas=asked.betas,
        max_grad_norm=asked.clip_norm,
        meta_update_freq=META_EVERY,
        backend=asked.backend,
    )


def muon(asked: Asked) -> Muon:
    """Muon on hidden matrices, its steps of the size of AdamW's, and AdamW on everything else."""
    hidden, groups = hidden_matrices(asked.model), []
    if hidden:
        groups = [{"params": hidden, "matrix": True, "weight_decay": asked.weight_decay}]
    groups = [*_beside(asked, hidden), *groups]
    return Muon(groups, lr=asked.lr, scale="adamw_rms", adam_betas=asked.betas, skip_nonfinite=True)


def m3(asked: Asked) -> M3:
    """M3 on hidden matrices and AdamW on everything else.

    An orthogonal matrix [r, c] has elements of 1 / sqrt(max(r, c)), root-mean-square: the rate of
    each shape is that of AdamW times 0.2 sqrt(max(r, c)), as Muon scales its steps, and the decay
    is divided by it.
    """
    hidden = hidden_matrices(asked.model)
    shapes: dict[torch.Size, list[Tensor]] = {}
    for p in hidden:
        shapes.setdefault(p.shape, []).append(p)
    groups = _beside(asked, hidden)
    for shape, params in shapes.items():
        factor = 0.2 * math.sqrt(max(shape))
        numbers = {"lr": factor * asked.lr, "weight_decay": asked.weight_decay / factor}
        groups.append({"params": params, "matrix": True, **numbers})
    return M3(groups, lr=asked.lr, adam_betas=asked.betas, skip_nonfinite=True)


def learned(asked: Asked) -> LearnedOptimizer:
    """The learned optimizer with the network of a file, or with the one that its package ships.

    It moves parameters whose gradients are zero, too: what a model stores and does not use is set
    to zero again within the step.
    """
    model, lr = asked.model, asked.lr
    groups = _decaying(model.named_parameters(), lr, asked.weight_decay)
    if asked.weights is None:
        network = trained_update_mlp()
    else:
        imported("safetensors", extra="learned", purpose="weights of the optimizer learned")
        network = load_update_mlp(asked.weights)
    network = network.to(groups[0]["params"][0].device)
    options: dict[str, Any] = {"max_grad_norm": asked.clip_norm, "backend": asked.backend}
    optimizer = LearnedOptimizer(groups, network, lr, **options)

    def clear(*_: Any) -> None:
        # Views are taken again: a model that was moved has other memory.
        torch._foreach_zero_(padding_here(model))

    if any(hasattr(module, "padded") for module in model.modules()):
        optimizer.register_step_post_hook(clear)
    return optimizer


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Weights of the linear layers between embedding and head, but for those that make a few
    numbers for each token, and the indexers'.
    """
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(HIDDEN)
        and not SMALL_OUTPUTS.intersection(name.split("."))
        and module.weight.requires_grad
    ]


def _beside(asked: Asked, hidden: list[Tensor]) -> Groups:
    """What is no hidden matrix, to be moved by AdamW."""
    taken = set(map(id, hidden))
    rest = [(name, p) for name, p in asked.model.named_parameters() if id(p) not in taken]
    groups = _decaying(rest, asked.lr, asked.weight_decay, asked.rate_factors)
    return [group | {"matrix": False} for group in groups]


def _decaying(
    named: Iterable[tuple[str, nn.Parameter]],
    lr: float,
    weight_decay: float,
    rate_factors: Mapping[str, float] = NO_FACTORS,
) -> Groups:
    """Matrices, which decay, and vectors, which do not; those with a rate of their own apart."""
    of_factor: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, p in named:
        found = [factor for part, factor in rate_factors.items() if part in name]
        if p.requires_grad:
            of_factor.setdefault(math.prod(found), []).append(p)
    groups: Groups = []
    for factor, some in of_factor.items():
        rate = {} if factor == 1.0 else {"lr": factor * lr}
        groups += [
            {"params": [p for p in some if p.ndim > 1], "weight_decay": weight_decay, **rate},
            {"params": [p for p in some if p.ndim <= 1], "weight_decay": 0.0, **rate},
        ]
    return [group for group in groups if group["params"]]


def warmup_then(schedule: Schedule, step: int, *, steps: int, warmup_steps: int) -> float:
    """The share of the peak rate that step ``step`` of ``steps``, counted from 0, trains with.

    Linear from 1 / warmup_steps to 1, then half a "cosine" or a line ("linear") down to zero, or
    "constant". It depends on the step alone, so that a resumed run has no schedule to restore.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    passed, length = step - warmup_steps, steps - warmup_steps
    if schedule == "linear":
        return 1.0 - passed / length
    return 0.5 * (1.0 + math.cos(math.pi * passed / length))


def warmup_cosine(step: int, *, steps: int, warmup_steps: int) -> float:
    """`warmup_then` of a cosine."""
    return warmup_then("cosine", step, steps=steps, warmup_steps=warmup_steps)
