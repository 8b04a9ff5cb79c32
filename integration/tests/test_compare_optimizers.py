from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest
from fusewright_models.cli import options
from fusewright_models.studies import compare_optimizers
from fusewright_models.studies.compare_optimizers import FORMATS, Point, draw, last_score
from fusewright_models.studies.results import columns, read, write

from .commands import assert_refused, invoke


def run(*arguments):
    return invoke(compare_optimizers.main, *arguments)


def compared(out: Path, model: str, optimizers: str, *, seeds: int, grid: str) -> Path:
    flags = ["--preset", "tiny", "--seeds", seeds, "--steps", "2", "--grid", grid]
    flags += ["--grid-seeds", seeds]
    result = run("--model", model, *flags, "--optimizers", optimizers, "--out", out)
    assert result.exit_code == 0, result.output
    (file,) = out.glob("*.csv")
    return file


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr(compare_optimizers, "TRAINING_TOKENS", 50_000)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["titan-mac", "transformer-np"])
def test_optimizers_train_from_the_same_seeds_with_the_rate_of_their_grid(tmp_path, model):
    file = compared(tmp_path, model, "adamw,nested", seeds=2, grid="0.5,1")
    assert file.name.startswith(f"optimizers-{model}-")
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with file.open(newline="") as stream:
        assert next(csv.reader(stream)) == columns(Point)
    points = read(Point, file)
    assert {point.model for point in points} == {model}
    starts = {}
    for optimizer in ("adamw", "nested"):
        mine = [point for point in points if point.optimizer == optimizer]
        grid = [point for point in mine if point.phase == "grid"]
        runs = [point for point in mine if point.phase == "run"]
        assert {point.step for point in mine} == {0, 1, 2}
        first = compare_optimizers.GRID_SEED
        assert {point.seed for point in grid} == {first, first + 1}
        assert {point.seed for point in runs} == {0, 1}
        assert len({point.lr for point in grid}) == 2
        ends = [(point.lr, point.score) for point in grid if point.step == 2]
        sums = {rate: sum(score for lr, score in ends if lr == rate) for rate, _ in ends}
        assert {point.lr for point in runs} == {min(sums, key=sums.__getitem__)}
        assert all(
            point.score < next(p for p in runs if p.seed == point.seed).score
            for point in runs
            if point.step == 2
        )
        assert all(math.isnan(point.loss) == (point.step == 0) for point in mine)
        assert all(point.seconds >= 0.0 for point in mine)
        starts[optimizer] = [point.score for point in runs if point.step == 0]
    # Weights and held-out data of a seed are the same for all.
    assert starts["adamw"] == starts["nested"]
    assert len(set(starts["adamw"])) == 2


def test_rows_of_other_optimizers_are_kept(tmp_path):
    first = read(Point, compared(tmp_path, "transformer-np", "adamw", seeds=1, grid="1"))
    both = read(Point, compared(tmp_path, "transformer-np", "torch-adamw", seeds=1, grid="1"))
    # As text: the loss of no steps is NaN.
    assert [str(point) for point in both if point.optimizer == "adamw"] == list(map(str, first))
    assert {point.optimizer for point in both} == {"adamw", "torch-adamw"}


def test_rows_of_other_steps_are_refused_and_those_of_other_presets_are_apart(tmp_path):
    file = compared(tmp_path, "transformer-np", "adamw", seeds=1, grid="1")
    assert "-tiny-" in file.name
    before = file.read_bytes()
    flags = ["--model", "transformer-np", "--preset", "tiny", "--optimizers", "torch-adamw"]
    result = run(*flags, "--steps", "3", "--out", tmp_path)
    assert result.exit_code == 2
    assert "got runs of 2: give --steps 2, or another folder" in result.output
    assert file.read_bytes() == before


def point(optimizer: str, seed: int, step: int, score: float, phase="run") -> Point:
    return Point("titan-mac", optimizer, phase, 0.01, seed, step, 1.0, score, 0.5)


def test_curves_are_means_within_their_spread(tmp_path):
    points = [point("m3", seed, step, seed + step) for seed in (0, 1) for step in (0, 1, 2)]
    points.append(point("m3", 7, 2, 99.0, phase="grid"))
    figure = draw(points)
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.lines[0].get_ydata().tolist() == [1.5, 2.5]
    assert legend.get_texts()[0].get_text() == "m3, lr 0.01"
    write(points, tmp_path / "made/points.csv", draw, formats=FORMATS)
    assert read(Point, tmp_path / "made/points.csv") == points


def test_run_that_did_not_come_to_its_end_is_no_choice():
    assert last_score([point("m3", 0, 2, 3.0)], 2) == 3.0
    assert last_score([point("m3", 0, 1, 3.0)], 2) == math.inf
    assert last_score([], 2) == math.inf
    assert last_score([point("m3", 0, 1, math.nan), point("m3", 0, 2, 3.0)], 2) == math.inf


def test_rate_that_spoils_the_weights_is_not_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "check_bounds", lambda *given: None)
    flags = ["--model", "transformer-np", "--preset", "tiny", "--seeds", "1", "--steps", "4"]
    more = ["--grid-seeds", "1", "--grid", "1e42,1", "--optimizers", "adamw", "--out", tmp_path]
    result = run(*flags, *more)
    assert result.exit_code == 0, result.output
    assert "inf" in result.output
    (file,) = tmp_path.glob("*.csv")
    assert {point.lr for point in read(Point, file) if point.phase == "run"} == {0.002}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizers", "adamw,sgd"], "got sgd"),
        (["--preset", "huge"], "preset must be one of ('tiny', 'demo', "),
        (["--grid", "1,-1"], "--grid wants positive numbers; got 1,-1"),
        (["--grid", "1,1e9"], "lr must be at least 0 and at most 10; got "),
        (["--grid", "fast"], "could not convert string to float: 'fast'"),
        (["--device", "quantum"], "--device must be cpu, cuda or cuda:N; got 'quantum'"),
        (["--optimizers", "learned", "--optimizer-weights", "nowhere"], "nowhere"),
    ],
    ids=["optimizer", "preset", "sign", "large", "grid", "device", "weights"],
)
def test_bad_flags_get_one_clear_sentence(tmp_path, flags, message):
    assert_refused(run(*flags, "--out", tmp_path), re.escape(message), tmp_path)
