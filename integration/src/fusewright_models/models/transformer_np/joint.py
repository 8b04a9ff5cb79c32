"""Draws of all targets together, and their joint density.

    p(y_1 ... y_N | context) = prod_n p(y_n | context, y_1 ... y_(n-1))

``predict`` says of every target what is known of it alone, and draws of neighbours need not agree.
Here each target in its turn joins the context of the next. A context row reads all others, so that
nothing of it can be kept: N calls of the model. A model is no exact process: another order gives
another density, and none of them is preferred.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .model import TransformerNP


class JointSample(NamedTuple):
    """A draw of all targets together.

    Attributes:
        y: ``[B, N, d_y]``, in the order of the targets, in the dtype of ``y_context``.
        log_likelihood: ``[B]``, log p of all of ``y`` together, in nats.
        order: ``[B, N]``, int64: the numbers of the targets, the one that was drawn first before
            all others.
    """

    y: Tensor
    log_likelihood: Tensor
    order: Tensor


@torch.no_grad()
def sample_jointly(
    model: TransformerNP,
    x_context: Tensor,
    y_context: Tensor,
    x_target: Tensor,
    *,
    permuted: bool = False,
    generator: torch.Generator | None = None,
) -> JointSample:
    """One draw of all targets together.

    Args:
        model: that predicts each of them.
        x_context: as are y_context and x_target, of the model's ``forward``, with its errors.
        permuted: whether each task draws an order of its own; otherwise it is that of the targets.
        generator: of the device; torch's own one if None.
    """
    order = _order(x_target, permuted, generator)
    x, drawn = _taken(x_target, order), []
    log_p = x_target.new_zeros(len(x_target), dtype=torch.float32)
    for target in x.split(1, dim=1):
        params = model(x_context, y_context, target)
        y = model.head.sample(params, generator=generator).to(y_context.dtype)
        log_p = log_p + model.head.log_likelihood(params, y).sum((1, 2))
        x_context, y_context = torch.cat([x_context, target], 1), torch.cat([y_context, y], 1)
        drawn.append(y)
    y = torch.cat(drawn, dim=1)
    places = order.unsqueeze(-1).expand_as(y)
    return JointSample(torch.empty_like(y).scatter_(1, places, y), log_p, order)


def joint_log_likelihood(
    model: TransformerNP,
    x_context: Tensor,
    y_context: Tensor,
    x_target: Tensor,
    y_target: Tensor,
    *,
    order: Tensor | None = None,
) -> Tensor:
    """log p of all of ``y_target [B, N, d_y]`` together, ``[B]``, in nats.

    Args:
        model: that predicts each of them.
        x_context: as are the others, of the model's ``log_likelihood``, with its errors.
        order: ``[B, N]``, int64, a permutation for each task, as of `JointSample`; None is that of
            the targets.
    """
    if order is None:
        order = _order(x_target, False, None)
    x, y = _taken(x_target, order), _taken(y_target, order)
    parts = []
    for target, known in zip(x.split(1, dim=1), y.split(1, dim=1), strict=True):
        parts.append(model.log_likelihood(x_context, y_context, target, known).sum((1, 2)))
        x_context, y_context = torch.cat([x_context, target], 1), torch.cat([y_context, known], 1)
    return torch.stack(parts).sum(0)


def _order(x_target: Tensor, permuted: bool, generator: torch.Generator | None) -> Tensor:
    """``[B, N]``, the numbers of the targets of each task."""
    batch, targets = x_target.shape[:2]
    device = x_target.device
    if permuted:
        return torch.rand(batch, targets, generator=generator, device=device).argsort(dim=1)
    return torch.arange(targets, device=device).expand(batch, -1)


def _taken(rows: Tensor, order: Tensor) -> Tensor:
    """``rows [B, N, width]`` in that order."""
    return rows.gather(1, order.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
