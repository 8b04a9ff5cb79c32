"""Held-out log-likelihood of a model, beside that of the data's reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..models.transformer_np import TransformerNP
from .task import Sampler


@dataclass(frozen=True)
class Evaluation:
    """Nats per target, averaged over the targets of a task, then over tasks.

    Attributes:
        log_likelihood: of the model.
        standard_error: of ``log_likelihood``, over tasks taken as independent.
        reference: of the data's reference on the same targets.
        reference_standard_error: of ``reference``.
    """

    log_likelihood: float
    standard_error: float
    reference: float
    reference_standard_error: float


@torch.no_grad()
def evaluate(
    model: TransformerNP, sampler: Sampler, *, batches: int, batch_size: int
) -> Evaluation:
    """Score the first ``batches`` batches of the sampler's seed, the same ones at every call."""
    sampler.reset()
    scores = []
    for _ in range(batches):
        task = sampler.sample(batch_size)
        ours = model.log_likelihood(
            task.x_context,
            task.y_context,
            task.x_target,
            task.y_target,
            task.context_lengths,
            task.target_lengths,
        )
        both = ours, sampler.reference_log_likelihood(task)
        scores.append(torch.stack([task.mean_over_targets(each.double()) for each in both]))
    by_task = torch.cat(scores, dim=1)
    mean, error = by_task.mean(1), by_task.std(1) / by_task.shape[1] ** 0.5
    rows = torch.stack([mean, error], dim=1).tolist()  # sync: the result of the evaluation
    return Evaluation(*rows[0], *rows[1])
