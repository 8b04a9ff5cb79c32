r"""The mathematics of the controlled learning rates in plain torch.

    m = 0.1 + 1.9 sigmoid(out)      a group's multiplier from the controller's output

Around its start, where sigmoid(START) = 9/19 and m is 1 to the last bit, the same formula is

    m = 1 + 0.95 tanh((out - START) / 2) (1 + tanh(out / 2) / 19)

and the hypergradient of a loss L through one step, exactly,

    p' = p - lr_g d    lr_g = base_lr_g m_g    dL/dm_g = -base_lr_g <grad L(p'), d>_g

where <,>_g sums over the parameters of group g. AdamW's direction follows from its state after the
step and the parameters p' after it, so nothing else is saved:

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    d = u + wd p = (u + wd p') / (1 - lr_g wd)

L is any loss at p': one of held-out data, or that of the next batch (Baydin et al., Online Learning
Rate Adaptation with Hypergradient Descent, arXiv 1703.04782).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core.precision import wide
from ..common.reference import adamw_root

Tensor = torch.Tensor
# Of a parameter and its group's place: how the parameter was updated, per learning rate.
Direction = Callable[[Tensor, int], Tensor | None]
# Bounds of the multiplier, the output at which it is 1, and inputs of the controller.
LOWEST, HIGHEST = 0.1, 2.0
START = math.log(0.9 / 1.0)
INPUTS = 3


def multipliers_of(out: Tensor) -> Tensor:
    """m of the controller's outputs; 1 of those that are not finite."""
    # In the outputs' dtype, as the bias has it.
    start = torch.full((), START, dtype=out.dtype, device=out.device)
    out = torch.where(out.isfinite(), out, start)
    m = 1.0 + 0.95 * ((out - start) / 2).tanh() * (1.0 + (out / 2).tanh() / 19.0)
    return m.clamp(LOWEST, HIGHEST)


def squares_by_group(
    tensors: Sequence[Tensor], numbers: Sequence[int], present: Sequence[int]
) -> Tensor:
    """Sums of squares of tensors, whose groups ``numbers`` has: ``[groups present]`` in fp64."""
    squares: dict[int, list[Tensor]] = {group: [] for group in present}
    for x, number in zip(tensors, numbers, strict=True):
        squares[number].append(x.double().square().sum())
    return torch.stack([torch.stack(some).sum() for some in squares.values()])


def by_group(partials: Tensor, owner: Tensor, groups: int) -> Tensor:
    """``[partials]`` in fp64 added by group, ``[groups]``."""
    in_group = owner == torch.arange(groups, device=owner.device)[:, None]
    # Selected, not multiplied by 0: infinities and NaN stay in their group.
    return torch.where(in_group, partials, 0.0).sum(1)


def adamw_direction(p: Tensor, state: dict[str, Any], group: dict[str, Any], lr: Tensor) -> Tensor:
    """d of AdamW's last step, in fp32 or fp64.

    Args:
        p: the parameter after the step.
        state: of the parameter, after the step: exp_avg, exp_avg_sq and step.
        group: with betas, eps and weight_decay.
        lr: that the step was taken with, 0-d.
    """
    m, v, t = wide(state["exp_avg"]), wide(state["exp_avg_sq"]), state["step"].double()
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    u = m / adamw_root(v, t, beta2, group["eps"]) / (1.0 - beta1**t).to(v.dtype)
    return (u + decay * wide(p)) / (1.0 - lr.double() * decay).to(v.dtype)


def dots_by_group(
    groups: Sequence[dict[str, Any]],
    gradients: Sequence[Tensor | None],
    direction: Direction,
    device: torch.device,
) -> Tensor:
    """<grad L, d> of each group, ``[groups]`` in fp64, without waiting for the device.

    Args:
        groups: of parameters, as an optimizer has them.
        gradients: of L at the parameters after the step, in their order; None counts as zero.
        direction: gives d of a parameter and its group's place, None where it was not updated.
        device: of all parameters.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    remaining = iter(gradients)
    sums = []
    for number, group in enumerate(groups):
        dots = []
        for p in group["params"]:
            g = next(remaining)
            d = None if g is None else direction(p, number)
            if g is not None and d is not None:
                dots.append((wide(g) * d).sum(dtype=torch.float64))
        sums.append(torch.stack(dots).sum() if dots else zero)
    return torch.stack(sums)
