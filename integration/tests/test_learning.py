"""The study of what a neural process learns in minutes."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from math import isfinite, isnan

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.studies import learning
from fusewright_models.studies.learning import Other, Point, Recipe, Training, keeper, train_all
from fusewright_models.studies.results import read
from fusewright_models.training import RunFolder

from .commands import invoke

TINY = {"preset": "tiny", "ahead": 2, "log_every": 5, "batch_size": 3, "device": "cpu"}
SMALL = dict(batches=2, tasks=4, warm=(2, 3))
PROCESS = {"data": "gp-rbf", "ragged": True, "target_size": "4", "frequencies": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(learning, "COMMON", TINY)


def recipe(name="rbf", steps=12, **more):
    return Recipe(name=name, steps=steps, **({"flags": PROCESS} | SMALL | more))


@pytest.fixture
def trainings():
    """Makes trainings of recipes, and the list of their evaluations."""
    with ThreadPoolExecutor(2) as pool:
        points: list[Point] = []
        keep = keeper(pool)

        def make(*recipes):
            return [Training(each, 1.0, "cpu", points.append, keep) for each in recipes], points

        yield make


def never():
    return False


def test_a_training_is_that_of_the_training_program(trainings, tmp_path):
    (training,), points = trainings(recipe())
    training.warm_up()
    training.take_time()
    training.train(0.0, never, None)
    flags = ["--steps", 12, "--ragged", "--out", tmp_path / "run"]
    for name, value in (TINY | PROCESS).items():
        if value is not True:
            flags += [f"--{name.replace('_', '-')}", value]
    assert invoke(app, "transformer-np", *flags, "--optimizer", "adamw").exit_code == 0
    state = RunFolder(tmp_path / "run").load_checkpoint()["model"]
    ours = training.model.state_dict()
    assert ours.keys() == state.keys()
    assert all(torch.equal(ours[name], state[name]) for name in state)
    assert [point.step for point in points] == list(range(1, 13))
    last = points[-1]
    assert (last.trained, last.data, last.context, last.steps) == ("rbf", "gp-rbf", "as drawn", 12)
    assert last.step_ms == training.step_ms > 0.0
    assert isfinite(last.attainable)
    assert last.behind == last.oracle - last.log_likelihood


def test_time_of_a_step_is_without_the_scores_that_are_due(trainings, monkeypatch):
    (training,), points = trainings(recipe())
    training.warm_up()
    held_out = training.kept[0].held_out
    score = type(held_out).score

    def slow(self, model):
        time.sleep(0.5)
        return score(self, model)

    monkeypatch.setattr(type(held_out), "score", slow)
    before = len(points)
    training.take_time()
    assert len(points) > before
    assert training.step_ms < 500


def test_one_goes_on_from_the_weights_of_another_and_is_scored_on_others_at_its_end(trainings):
    flags = {"data": "blr", "context_size": "20", "target_size": "5"}
    other = Other({"context_size": "40"}, 1, 2)
    (first, second), points = trainings(
        recipe("short", flags=flags), recipe("long", flags=flags, after="short", others=(other,))
    )
    for each in (first, second):
        each.warm_up()
        each.take_time()
    points.clear()
    train_all([first, second], never, print)
    names = [(point.trained, point.context, point.step) for point in points]
    short = [("short", "20", step) for step in range(6, 13)]
    long = [("long", "20", step) for step in range(5, 13)]
    assert names == [*short, *long, ("long", "40", 12)]
    # Before its own steps it has the scores of the other one's end.
    assert points[len(short)].log_likelihood == points[len(short) - 1].log_likelihood


def test_what_is_late_is_scored_where_it_stands(trainings):
    (training,), points = trainings(recipe(steps=50))
    training.warm_up()
    training.take_time()
    points.clear()
    train_all([training], lambda: True, print)
    assert [point.step for point in points] == [5]


def test_what_fails_is_said_and_raised(trainings):
    (training,), _ = trainings(recipe())
    training.step_ms = float("nan")
    said: list[str] = []
    with pytest.raises(ValueError, match="NaN"):
        train_all([training], never, said.append)
    assert said[0].startswith("rbf: ValueError")


def test_the_command_writes_rows_of_all_recipes_and_a_picture(monkeypatch, tmp_path):
    digits = recipe("digits", flags={"data": "digits", "ragged": True})
    monkeypatch.setattr(learning, "RECIPES", (recipe(), digits))
    flags = ["--out", tmp_path, "--device", "cpu", "--only", "rbf,digits"]
    result = invoke(learning.main, *flags)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("learning-*.csv")
    points = read(Point, file)
    assert points is not None
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for name in ("rbf", "digits"):
        last = [point for point in points if point.trained == name][-1]
        assert last.step == last.steps == 12
        assert isfinite(last.log_likelihood)
        assert isnan(last.attainable) == (name == "digits")
        assert 0.0 <= last.cover_50 <= last.cover_80 <= last.cover_95 <= 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "rbf,cubic"], "recipes are .*; got cubic"),
        (["--share", "0"], "--share wants a positive number; got 0.0"),
        (["--share", "inf"], "--share wants a positive number; got inf"),
    ],
)
def test_choices_that_cannot_be_served_are_refused(flags, message, tmp_path):
    result = invoke(learning.main, "--out", tmp_path, "--device", "cpu", *flags)
    assert result.exit_code == 2
    assert not any(tmp_path.iterdir())
    assert re.search(message, result.output)
