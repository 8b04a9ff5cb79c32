"""The flag that chooses an optimizer: its rate, its weights, and what does not go with it."""

from __future__ import annotations

import json
import math
import re

import pytest
from fusewright_models.cli import app
from fusewright_models.training import OPTIMIZER_NAMES, RunFolder

from .commands import assert_refused, invoke, metrics

pytestmark = pytest.mark.usefixtures("without_pictures", "short_samples")
every_optimizer = pytest.mark.parametrize("name", OPTIMIZER_NAMES)


def run(*arguments):
    return invoke(app, *arguments)


TINY = ["transformer-np", "--preset", "tiny", "--steps", "2", "--log-every", "1"]
SMALL = "--preset tiny --dim 16 --num-heads 2 --chunk-size 8 --memory-chunk 4 --seq-len 20"
STEPS = "--steps 2 --batch-size 2 --log-every 1"
TINY_TITAN_MAC = ["titan-mac", *SMALL.split(), *STEPS.split()]


def run_with(folder, name, flags):
    """What a run with this optimizer leaves in its folder: configuration, losses, checkpoint."""
    result = run(*flags, "--optimizer", name, "--out", folder)
    assert result.exit_code == 0, result.output
    config = json.loads((folder / "config.json").read_text())
    losses = [line["loss"] for line in metrics(folder) if "loss" in line]
    return config, losses, RunFolder(folder).load_checkpoint()


def assert_chosen(config, saved, name, weights, *, rate, decay):
    learned = name == "learned"
    assert (config["optimizer"], config["lr"]) == (name, 0.1 if learned else rate)
    assert config["weight_decay"] == (0.0 if learned else decay)
    assert config["optimizer_weights"] == (None if weights is None else str(weights))
    assert saved["optimizer_kind"].startswith("torch." if name == "torch-adamw" else "fusewright.")


@pytest.mark.sampled
@every_optimizer
def test_flag_chooses_the_optimizer_and_its_rate(tmp_path, weights, name):
    mine = weights if name == "learned" else None
    more = [] if mine is None else ["--optimizer-weights", mine]
    config, _, saved = run_with(tmp_path / "run", name, [*TINY, *more])
    assert_chosen(config, saved, name, mine, rate=2e-3, decay=0.01)


@pytest.mark.sampled
@every_optimizer
def test_titan_mac_is_trained_by_the_optimizer_of_the_flag(tmp_path, text, name):
    flags = [*TINY_TITAN_MAC, "--dataset", text]
    config, losses, saved = run_with(tmp_path / "run", name, flags)
    assert_chosen(config, saved, name, None, rate=4e-3, decay=0.1)
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert saved["step"] == 2


def test_titan_mac_is_trained_by_the_network_of_the_flag(tmp_path, text, weights):
    flags = [*TINY_TITAN_MAC, "--dataset", text]
    found = []
    for number, more in enumerate(([], ["--optimizer-weights", weights])):
        config, losses, saved = run_with(tmp_path / str(number), "learned", [*flags, *more])
        assert_chosen(config, saved, "learned", more[1] if more else None, rate=4e-3, decay=0.1)
        found.append((losses, saved))
    # The first loss is of no step, and the second one of a step by another network.
    assert found[0][0][0] == found[1][0][0]
    assert found[0][0][1] != found[1][0][1]
    assert found[0][1]["network"] != found[1][1]["network"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer", "sgd"], "'sgd' is not one of"),
        (["--optimizer-weights", "net"], "only the optimizer learned has weights of its own; got"),
        (["--optimizer", "learned", "--optimizer-weights", "nowhere"], "nowhere"),
        (["--capture", "--device", "cpu"], "--capture needs a CUDA device; got --device cpu"),
        (["--resume", "nowhere", "--optimizer", "muon"], "from its folder; got --optimizer"),
    ],
    ids=["name", "weights", "file", "capture", "resume"],
)
def test_bad_flags_get_one_clear_sentence(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    result = run(*TINY[:3], *flags) if "--resume" not in flags else run(TINY[0], *flags)
    assert_refused(result, re.escape(message), tmp_path)


def test_run_whose_config_names_another_optimizer_is_not_resumed(tmp_path):
    assert run(*TINY, "--out", tmp_path / "run").exit_code == 0
    file = tmp_path / "run/config.json"
    file.write_text(file.read_text().replace('"optimizer": "adamw"', '"optimizer": "m3"'))
    result = run("transformer-np", "--resume", tmp_path / "run")
    assert result.exit_code == 2
    assert "wanted the state of a fusewright.M3" in result.output
    assert "got that of a fusewright.AdamW" in result.output
