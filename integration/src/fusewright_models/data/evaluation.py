"""Held-out log-likelihood and calibration of a model, beside the data's reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.transformer_np import TransformerNP
from ..training.processes import ALONE, Processes
from ..training.source import Compute, directly
from .calibration import BINS, LEVELS, binned, covered, mixture_crps
from .task import Sampler, Task

# What is told of each task, beside the reference: log-likelihood, CRPS, coverage and PIT.
KINDS = 2 + len(LEVELS) + BINS
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
        crps: continuous ranked probability score, in the units of y.
        coverage: which share of the targets lies in the central interval of each of `LEVELS`.
        pit: of F(y) in each of ten bins from 0 to 1.
    """

    log_likelihood: float
    standard_error: float
    reference: float
    reference_standard_error: float
    crps: float
    coverage: tuple[float, ...]
    pit: tuple[float, ...]


class Evaluator:
    """Scores models on the first batches of the sampler's seed, the same ones at every call.

    Args:
        sampler: of held-out data; it is set back to its seed.
        batch_size: tasks of a batch.
        processes: of which each scores its share of the batches; where they share rows, its part
            of the rows of every task.
    """

    def __init__(self, sampler: Sampler, *, batch_size: int, processes: Processes = ALONE) -> None:
        self.sampler, self.batch_size, self.processes = sampler, batch_size, processes
        # The reference's scores of each task, by the batch's number.
        self.references: dict[int, Tensor] = {}

    @torch.no_grad()
    def score(
        self, model: TransformerNP, batches: int, *, compute: Compute = directly
    ) -> Evaluation:
        """Of so many batches, whose scores ``compute`` computes."""
        sampler, count, rank = self.sampler, self.processes.count, self.processes.rank
        sampler.reset()
        scores = torch.zeros(
            1 + KINDS, batches, self.batch_size, dtype=torch.float64, device=sampler.device
        )
        ours = partial(scores_of, model)
        for number in range(batches):
            task = sampler.sample(self.batch_size)
            whose = number % count
            if whose == rank:
                scores[0, number] = self._reference(number, task)
            if self.processes.shares_rows:
                # Each has as many targets, so that the mean over all is that of the means.
                part: Any = self.processes.rows(task, self.batch_size)
                scores[1:, number] = compute(ours, part) / count
            elif whose == rank:
                scores[1:, number] = compute(ours, task)
            elif number == batches - 1 and whose < rank:
                # It has none of the last ones: all call a sharded model as often.
                compute(ours, task)
        by_task = self.processes.add_(scores).flatten(1)
        mean, error = by_task.mean(1), by_task.std(1) / by_task.shape[1] ** 0.5
        means, errors = torch.stack([mean, error]).tolist()  # sync: the result of the evaluation
        reference, mean_of_model, crps, *shares = means
        told = mean_of_model, errors[1], reference, errors[0], crps
        return Evaluation(*told, *_calibration(shares))

    def _reference(self, number: int, task: Task) -> Tensor:
        """Of each task of the batch of this number, computed once."""
        if number not in self.references:
            scores = self.sampler.reference_log_likelihood(task).double()
            self.references[number] = task.mean_over_targets(scores)
        return self.references[number]


def evaluate(
    model: TransformerNP, sampler: Sampler, *, batches: int, batch_size: int
) -> Evaluation:
    """Score the first ``batches`` batches of the sampler's seed, the same ones at every call."""
    return Evaluator(sampler, batch_size=batch_size).score(model, batches)


def scores_of(model: TransformerNP, task: Task) -> Tensor:
    """Of each task the means over its targets, those of this process where several share its rows,
    of the log-likelihood, of the CRPS, of what each level covers, and of what each bin of the PIT
    has: ``[KINDS, B]``, fp64.
    """
    lengths = task.context_lengths, task.target_lengths
    rows = task.x_context, task.y_context, task.x_target
    shared: dict[str, Any] = {} if task.group is None else {"group": task.group}
    params = model(*rows, *lengths, **shared)
    log_p = model.head.log_likelihood(params, task.y_target).double()
    crps = mixture_crps(model.head, params, task.y_target)
    position = model.head.cdf(params, task.y_target).double()
    scores = [log_p, crps, *covered(position), *binned(position)]
    return torch.stack([task.mean_over_targets(score) for score in scores])


def _calibration(shares: list[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Coverage and PIT, of what `scores_of` has last."""
    return tuple(shares[: len(LEVELS)]), tuple(shares[len(LEVELS) :])


@dataclass(frozen=True)
class Scores:
    """Of a model, averaged over the targets of a task, then over tasks.

    Attributes:
        log_likelihood: nats per target.
        behind: how far that is below the reference's.
        behind_error: standard error of ``behind``, over tasks taken as independent.
        coverage, pit, crps: as of `Evaluation`.
    """

    log_likelihood: float
    behind: float
    behind_error: float
    coverage: tuple[float, ...]
    pit: tuple[float, ...]
    crps: float


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
        log_likelihood, *others = torch.cat(
            [scores_of(model, task) for task in self._parts()], dim=1
        )
        behind = self.reference - log_likelihood
        error = behind.std() / len(behind) ** 0.5
        numbers = torch.stack([log_likelihood.mean(), behind.mean(), error])
        means = torch.stack([each.mean() for each in others])
        found = torch.cat([numbers, means]).tolist()  # sync: the result of the evaluation
        mean, distance, spread, crps, *shares = found
        return Scores(mean, distance, spread, *_calibration(shares), crps)

    def _parts(self) -> list[Task]:
        """As many tasks at once as make `MOST_ROWS` rows."""
        count = len(self.reference)
        step = max(1, MOST_ROWS // (self.task.tokens // count))
        return [self.task.part(first, first + step) for first in range(0, count, step)]
