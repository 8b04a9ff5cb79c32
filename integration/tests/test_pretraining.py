"""The training of the network that the regressor has by itself."""

from __future__ import annotations

import json
from math import isnan

import numpy as np
import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPRegressor
from fusewright_models.cli import app
from fusewright_models.data import DrawnInTurn
from fusewright_models.studies import pretraining
from fusewright_models.studies.pretraining import Point, main, run_of, seconds_of_a_step
from fusewright_models.studies.results import read
from fusewright_models.training import RunFolder
from safetensors.torch import load_file

from .commands import invoke

RECIPE = pretraining.RECIPE
TINY = {"preset": "tiny", "batch_size": 2, "ahead": 2, "log_every": 2}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(pretraining, "RECIPE", RECIPE | TINY)
    monkeypatch.setattr(pretraining, "WARM", 1)
    monkeypatch.setattr(pretraining, "TIMED", 2)


def test_a_training_leaves_run_weights_and_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "seconds_of_a_step", lambda run: 0.5)
    monkeypatch.setattr(pretraining, "steps_within", lambda seconds, of_a_step: 12.9)
    main(minutes=0.1, out=tmp_path, device="cpu")
    run = RunFolder(tmp_path / "run")
    config = run.read_config()
    assert {name: config[name] for name in TINY} == TINY
    assert (config["data"], config["optimizer"], config["steps"]) == ("prior", "muon", 12)
    (file,) = tmp_path.glob("pretraining-*.csv")
    points = read(Point, file)
    assert [point.step for point in points] == list(range(13))
    assert isnan(points[0].loss)
    scores = [line["held_out_log_likelihood"] for line in run.read_metrics() if "lr" not in line]
    assert [f"{score:.5f}" for score in scores] == [f"{x.log_likelihood:.5f}" for x in points]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    weights = load_file(tmp_path / "regressor" / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.float16}
    shape = json.loads((tmp_path / "regressor" / "config.json").read_text())["shape"]
    assert (shape["x_width"], shape["indicator"], shape["frequencies"]) == (10, True, 4)
    x = np.random.default_rng(0).normal(size=(20, 3))
    found = TransformerNPRegressor(tmp_path / "regressor", orders=3).fit(x, x[:, 0]).predict(x)
    assert np.isfinite(found).all()


def test_what_a_run_has_come_to_is_written_without_training(tmp_path):
    flags = ["--preset", "tiny", "--data", "prior", "--steps", "4", "--ahead", "2"]
    flags += ["--batch-size", "2", "--eval-every", "2", "--context-size", "5-20"]
    result = invoke(app, "transformer-np", *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    main(minutes=0.0, out=tmp_path, device="cpu")
    assert (tmp_path / "regressor" / "model.safetensors").exists()


def test_network_of_the_recipe_fits_into_5_megabytes_of_16_bits(monkeypatch):
    monkeypatch.setattr(pretraining, "RECIPE", RECIPE)
    run = run_of("cpu")
    with torch.device("meta"):
        model = TransformerNP(run.shape(run.x_width))
    # With the head of its file, some 100 bytes a tensor.
    assert 2 * model.parameter_count() + 2**14 < 5_000_000
    assert isinstance(run.source(padded=True), DrawnInTurn)


def test_as_many_steps_are_taken_as_end_within_the_time():
    within = pretraining.steps_within
    spare = pretraining.SPARE
    assert within(spare, 0.1) == 0.0
    assert within(spare + 100.0, 0.1) == (1.0 - pretraining.OTHERS) * 100.0 / 0.1


def test_a_step_is_timed_at_sizes_as_those_that_are_drawn(monkeypatch):
    sizes = []

    def timed(run, sampler):
        task = sampler.sample(2)
        assert task.x_context.shape[1] in {each.contexts.high for each in sampler.capacities}
        sizes.append(int(task.context_lengths[0]))
        return float(len(sizes))

    plain = pretraining._timed
    monkeypatch.setattr(pretraining, "_timed", timed)
    assert seconds_of_a_step(run_of("cpu")) == 4.5
    assert sizes == sorted(sizes)
    assert 5 <= sizes[0] <= 10
    assert 600 <= sizes[-1] < 1000
    monkeypatch.setattr(pretraining, "_timed", plain)
    monkeypatch.setattr(pretraining, "SIZES", 1)
    assert seconds_of_a_step(run_of("cpu")) > 0.0


def test_exported_numbers_are_rounded_to_the_dtype_that_is_asked_for(tmp_path):
    run = tmp_path / "run"
    flags = ["--preset", "tiny", "--steps", "1", "--batch-size", "2"]
    assert invoke(app, "transformer-np", *flags, "--out", run).exit_code == 0
    assert invoke(app, "export", run, "--out", tmp_path / "whole").exit_code == 0
    half = "export", run, "--out", tmp_path / "half", "--dtype", "bfloat16"
    assert invoke(app, *half).exit_code == 0
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for name, rounded in load_file(tmp_path / "half" / "model.safetensors").items():
        assert torch.equal(rounded, whole[name].bfloat16())
    result = invoke(app, "export", run, "--out", tmp_path / "int", "--dtype", "int8")
    assert result.exit_code == 2
    assert "--dtype must be one of" in result.output
    assert not (tmp_path / "int").exists()
