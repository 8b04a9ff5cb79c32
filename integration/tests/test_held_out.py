"""Scores of a model on tasks that are kept."""

from __future__ import annotations

import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPConfig
from fusewright_models.data import LEVELS, HeldOut, Size, evaluate, evaluation, make_sampler
from fusewright_models.data.task import Task
from torch import nn


def small(x_width):
    torch.manual_seed(0)
    sizes = dict(width=16, layers=2, heads=2, feed_forward_width=20, components=3)
    return TransformerNP(TransformerNPConfig(x_width=x_width, **sizes), backend="reference").eval()


@pytest.mark.parametrize("rows", [64, 2**17], ids=["parts", "whole"])
@pytest.mark.parametrize("name", ["gp-rbf", "blr", "digits"])
def test_scores_are_those_of_an_evaluation_batch_by_batch(
    name, rows, monkeypatch, assert_same_but_for_rounding
):
    monkeypatch.setattr(evaluation, "MOST_ROWS", rows)
    sampler = make_sampler(name, held_out=True, seed=3)
    model = small(sampler.x_width).double()
    expected = evaluate(model, sampler, batches=5, batch_size=4)
    found = HeldOut(sampler, batches=5, batch_size=4).score(model)
    pairs = (
        (found.log_likelihood, expected.log_likelihood),
        (found.behind, expected.reference - expected.log_likelihood),
        (found.crps, expected.crps),
        (found.coverage, expected.coverage),
        (found.pit, expected.pit),
    )
    for ours, theirs in pairs:
        ours, theirs = (torch.tensor(x, dtype=torch.float64) for x in (ours, theirs))
        assert_same_but_for_rounding([ours], [theirs])


class Standard(nn.Module):
    """Predicts N(0, 1) for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.head = small(1).head

    def forward(self, x_context, y_context, x_target, *lengths):
        return torch.zeros(*x_target.shape[:2], 1, 3, 3)


def test_coverage_counts_the_targets_of_each_task_within_central_intervals(
    assert_same_but_for_rounding,
):
    sampler = make_sampler("gp-rbf", seed=5)
    kept = HeldOut(sampler, batches=6, batch_size=4)
    bounds = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(LEVELS) / 2 + 0.5)
    shares = [
        torch.cat([(task.y_target.abs() < bound).double().mean((1, 2)) for task in kept.drawn])
        for bound in bounds
    ]
    found = torch.tensor(kept.score(Standard()).coverage, dtype=torch.float64)
    assert_same_but_for_rounding([found], [torch.stack(shares).mean(1)])


def test_joined_tasks_are_padded_only_where_their_sizes_differ():
    sampler = make_sampler("gp-rbf", context_size=Size(3, 9), target_size=Size(4, 4))
    tasks = [sampler.sample(2) for _ in range(5)]
    joined = Task.joined(tasks)
    assert joined.target_lengths is None
    assert joined.context_lengths.tolist() == [t.x_context.shape[1] for t in tasks for _ in "ab"]
    assert torch.equal(joined.truth["length"], torch.cat([t.truth["length"] for t in tasks]))
    equal = make_sampler("blr")
    assert Task.joined([equal.sample(2), equal.sample(2)]).context_lengths is None
