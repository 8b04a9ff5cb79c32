"""The study of recall over thousands of tokens, on few."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fusewright_models.models.titan_mac import TITAN_MAC
from fusewright_models.studies import far_recall
from fusewright_models.studies.far_recall import (
    Curriculum,
    FarPoint,
    FarTraining,
    draw,
    train_far_recall,
    with_others,
)
from fusewright_models.studies.results import write

SMALL = replace(
    TITAN_MAC["tiny"],
    **{"variant": "mal", "dim": 16, "layers": 1, "heads": 2, "segment": 4, "memory_chunk": 4},
    vocab_size=160,
    memory_heads=1,
    memory_hidden=8,
)
LEVELS = (1, 4), (2, 6), (2, 12)


def points_of(shape, **options):
    training = FarTraining(steps=3, batch_size=2, warmup_steps=1)
    return train_far_recall(shape, training=training, levels=LEVELS, gaps=(5, 20), **options)


def test_next_task_comes_once_nine_answers_in_ten_are_right():
    source = Curriculum(LEVELS, seed=0, device="cpu")
    assert source.sample(3).windows.shape == (3, 2 * 1 + 4 + 1 + 1)
    for share, level in ((0.85, 0), (0.95, 1), (0.95, 2), (0.95, 2)):
        source.shares = [torch.tensor(share)] * 10
        source.sample(3)
        assert source.level == level
        assert not source.finished()
    source.shares = [torch.tensor(0.99)] * 10
    assert source.finished()
    other = Curriculum(LEVELS, seed=0, device="cpu")
    other.load_state_dict(source.state_dict())
    assert torch.equal(other.sample(2).windows, source.sample(2).windows)


def test_answers_are_read_by_the_host_once_in_ten_batches(host_reads):
    class Guessing:
        def __call__(self, tokens):
            return torch.zeros(*tokens.shape, 160), None

        def logits(self, hidden):
            return hidden

    source, model = Curriculum(LEVELS, seed=0, device="cpu"), Guessing()
    with host_reads:
        for _ in range(30):
            source.loss(model, source.sample(2))
            assert not source.finished()
    # The thirtieth batch is looked at before the one behind it.
    assert host_reads.count == 2
    assert source.level == 0


@pytest.mark.parametrize("memory", [True, False])
def test_rows_tell_what_a_model_recalls_over_every_distance(memory):
    found = points_of(replace(SMALL, memory=memory), seed=3)
    assert [point.gap for point in found] == [5, 20]
    for point in found:
        rule = ("normed", 16384.0) if memory else ("none", 0.0)
        assert (point.memory_rule, point.memory_length) == rule
        assert (point.variant, point.seed, point.steps, point.level) == ("mal", 3, 3, 1)
        assert point.outcome == "unfinished"
        assert 0.0 <= point.accuracy <= 1.0
        assert (point.weight_norm > 0.0) == memory


def test_training_that_diverges_is_told(monkeypatch):
    monkeypatch.setattr(Curriculum, "loss", lambda *_: torch.tensor(torch.nan, requires_grad=True))
    assert {point.outcome for point in points_of(SMALL)} == {"diverged"}


def test_rows_of_other_models_stay(tmp_path):
    file = tmp_path / "far-recall.csv"
    first = points_of(SMALL)
    write(first, file, draw, number=".4f")
    other = [replace(point, seed=1) for point in first]
    write(with_others(other, file), file, draw, number=".4f")
    again = [replace(point, accuracy=0.5) for point in first]
    rows = with_others(again, file)
    assert [(row.seed, row.gap) for row in rows] == [(0, 5), (0, 20), (1, 5), (1, 20)]
    assert [row.accuracy for row in rows[:2]] == [0.5, 0.5]
    assert all(isinstance(row, FarPoint) for row in rows)


def test_levels_end_at_the_distance_that_is_asked_for():
    pairs, gap = far_recall.LEVELS[-1]
    assert (pairs, gap, far_recall.VALUES, far_recall.SHAPE.segment) == (32, 8192, 64, 512)
    # What two layers of attention see is nearer than any pair.
    assert min(gap for _, gap in far_recall.LEVELS) > 2 * far_recall.SHAPE.segment
