"""Evaluations that are replayed have the numbers of eager ones, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fusewright_models.training import TrainingConfig, make_optimizer
from fusewright_models.training.captured import WARM_UP

from .stood import Stood, leave_out_streams
from .trainers import MODELS, assert_same_bits, quiet_trainer, score_of, tiny

pytestmark = pytest.mark.usefixtures("without_pictures")
CONFIG = TrainingConfig(steps=12, batch_size=2, warmup_steps=2, log_every=3, evaluate_every=3)
# Evaluations of a run: before its first step, and after every third.
EVALUATIONS = 5


class Counting(Stood):
    """Counts the replays of each graph; with ``fails``, of evaluations alone, there are none."""

    def __init__(self, *arguments, say):
        super().__init__(*arguments, say=say)
        self.replays = {}

    def _capture(self, key, work, fail):
        if fail != self._fail and self.fails:
            fail(RuntimeError("it cannot be"))
            return
        fails, self.fails = self.fails, False
        super()._capture(key, work, fail)
        self.fails = fails
        graph = self.graphs[key]

        def replay():
            self.replays[key] = self.replays.get(key, 0) + 1
            graph.replay()

        self.graphs[key] = SimpleNamespace(replay=replay)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    leave_out_streams(monkeypatch)


def make(path, name, *, stood, fails=False):
    model, source, loss = tiny(name, ragged=True)
    optimizer = make_optimizer("adamw", model, lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    parts = model, source, loss, optimizer, CONFIG

    def evaluate():
        return score_of(name, model, trainer.stepper.scored)

    trainer = quiet_trainer(path, *parts, evaluate=evaluate)
    if stood:
        trainer.stepper = Counting(model, loss, optimizer, CONFIG, say=trainer.record.say)
        trainer.stepper.fails = fails
    return trainer


def run_both(path, name, **options):
    """Eager and replayed."""
    trainers = [make(path / str(stood), name, stood=stood, **options) for stood in (False, True)]
    for trainer in trainers:
        trainer.run()
    return trainers


def of_scores(stepper):
    return {key: x for key, x in stepper.replays.items() if key is not None and "scores" in key}


@pytest.mark.parametrize("name", MODELS)
def test_replayed_evaluations_have_the_numbers_of_eager_ones(tmp_path, name):
    one, other = run_both(tmp_path, name)
    assert_same_bits(one, other)
    scores = {line.get("held_out_log_likelihood") for line in one.folder.read_metrics()}
    assert len(scores - {None}) == EVALUATIONS
    # Five batches of 2 x 20 tokens, the last of one window, and one of 9; or three of their sizes.
    counts = {"titan-mac": [4, 1, 1], "transformer-np": [1, 1, 1]}[name]
    replays = of_scores(other.stepper)
    assert [*replays.values()] == [EVALUATIONS * count - WARM_UP for count in counts]


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_evaluations_that_cannot_be_captured_leave_the_steps_replayed(tmp_path, name):
    one, other = run_both(tmp_path, name, fails=True)
    assert_same_bits(one, other)
    assert other.console.file.getvalue().count("evaluations are eager: it cannot be") == 1
    assert "steps are eager" not in other.console.file.getvalue()
    assert other.stepper.replays
    assert not of_scores(other.stepper)


def test_what_is_no_batch_of_tensors_is_scored_eagerly_and_told_of(tmp_path):
    stepper = make(tmp_path, "titan-mac", stood=True).stepper
    said = []
    stepper.say = said.append
    for _ in range(4):
        assert stepper.scored(torch.tensor, 3.0) == 3.0
    assert said == ["evaluations are eager: a float is no dataclass of tensors"]


def test_graphs_of_evaluations_go_with_the_weights_they_were_captured_of(tmp_path):
    """Of a trainer that resumes: what it has loaded may lie elsewhere."""
    trainer = make(tmp_path, "transformer-np", stood=True)
    trainer.run()
    assert of_scores(trainer.stepper)
    trainer.stepper.forget()
    assert not trainer.stepper.graphs
    assert not trainer.stepper.scores
