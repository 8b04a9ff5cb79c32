"""Held-out log-likelihood and calibration of a model, beside the data's reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.transformer_np import TransformerNP
from ..training.processes import ALONE, Processes
from .task import Sampler, Task

# Of central intervals: how many of the targets should lie in them.
LEVELS = (0.5, 0.8, 0.95)
# Rows of the model's largest batch in an evaluation.
MOST_ROWS = 2**17


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


class Evaluator:
    """Scores models on the first batches of the sampler's seed, the same ones at every call.

    Args:
        sampler: of held-out data; it is set back to its seed.
        batch_size: tasks of a batch.
        processes: of which each scores its share of the batches.
    """

    def __init__(self, sampler: Sampler, *, batch_size: int, processes: Processes = ALONE) -> None:
        self.sampler, self.batch_size, self.processes = sampler, batch_size, processes
        # The reference's scores of each task, by the batch's number.
        self.references: dict[int, Tensor] = {}

    @torch.no_grad()
    def score(self, model: TransformerNP, batches: int) -> Evaluation:
        """Of so many batches."""
        sampler, count, rank = self.sampler, self.processes.count, self.processes.rank
        sampler.reset()
        scores = torch.zeros(
            2, batches, self.batch_size, dtype=torch.float64, device=sampler.device
        )
        for number in range(batches):
            task = sampler.sample(self.batch_size)
            whose = number % count
            # Those that have none of the last ones score it too: all call a sharded model as often.
            if whose == rank or (number == batches - 1 and whose < rank):
                ours = model.log_likelihood(
                    task.x_context,
                    task.y_context,
                    task.x_target,
                    task.y_target,
                    task.context_lengths,
                    task.target_lengths,
                )
            if whose != rank:
                continue
            if number not in self.references:
                reference = sampler.reference_log_likelihood(task).double()
                self.references[number] = task.mean_over_targets(reference)
            scores[0, number] = task.mean_over_targets(ours.double())
            scores[1, number] = self.references[number]
        by_task = self.processes.add_(scores).flatten(1)
        mean, error = by_task.mean(1), by_task.std(1) / by_task.shape[1] ** 0.5
        rows = torch.stack([mean, error], dim=1).tolist()  # sync: the result of the evaluation
        return Evaluation(*rows[0], *rows[1])


def evaluate(
    model: TransformerNP, sampler: Sampler, *, batches: int, batch_size: int
) -> Evaluation:
    """Score the first ``batches`` batches of the sampler's seed, the same ones at every call."""
    return Evaluator(sampler, batch_size=batch_size).score(model, batches)


@dataclass(frozen=True)
class Scores:
    """Of a model, averaged over the targets of a task, then over tasks.

    Attributes:
        log_likelihood: nats per target.
        behind: how far that is below the reference's.
        behind_error: standard error of ``behind``, over tasks taken as independent.
        coverage: which share of the targets lies in the central interval of each of `LEVELS`.
    """

    log_likelihood: float
    behind: float
    behind_error: float
    coverage: tuple[float, ...]


class HeldOut:
    """The first batches of a sampler's seed, kept for many evaluations: those of `evaluate`.

    Args:
        sampler: of held-out data; it is set back to its seed.
        batches: how many are kept, each with sizes of its own.
        batch_size: tasks of each.

    Attributes:
        drawn: the batches.
        reference: of each task, the mean over its targets, fp64.
    """

    def __init__(self, sampler: Sampler, *, batches: int, batch_size: int) -> None:
        sampler.reset()
        self.drawn = [sampler.sample(batch_size) for _ in range(batches)]
        scores = ((task, sampler.reference_log_likelihood(task).double()) for task in self.drawn)
        self.reference = torch.cat([task.mean_over_targets(score) for task, score in scores])
        self.task = Task.joined(self.drawn)

    @torch.no_grad()
    def score(self, model: TransformerNP) -> Scores:
        """Under the precision that the caller has set."""
        parts = [self._score(model, task) for task in self._parts()]
        log_likelihood, *covered = torch.cat(parts, dim=1)
        behind = self.reference - log_likelihood
        error = behind.std() / len(behind) ** 0.5
        numbers = torch.stack([log_likelihood.mean(), behind.mean(), error])
        shares = torch.stack([each.mean() for each in covered])
        mean, distance, spread, *coverage = torch.cat(
            [numbers, shares]
        ).tolist()  # sync: the result
        return Scores(mean, distance, spread, tuple(coverage))

    def _parts(self) -> list[Task]:
        """As many tasks at once as make `MOST_ROWS` rows."""
        count = len(self.reference)
        step = max(1, MOST_ROWS // (self.task.tokens // count))
        return [self.task.part(first, first + step) for first in range(0, count, step)]

    @staticmethod
    def _score(model: TransformerNP, task: Task) -> Tensor:
        """The log-likelihood of each task and what of it each level covers, ``[1 + levels, B]``."""
        lengths = task.context_lengths, task.target_lengths
        params = model(task.x_context, task.y_context, task.x_target, *lengths)
        log_p = model.head.log_likelihood(params, task.y_target).double()
        distance = (model.head.cdf(params, task.y_target).double() - 0.5).abs()
        scores = [log_p, *((distance < level / 2).double() for level in LEVELS)]
        return torch.stack([task.mean_over_targets(score) for score in scores])
