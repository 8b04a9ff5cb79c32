"""Settings from flags and from files: what is refused at once, and that both say the same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from fusewright_models.cli import app
from fusewright_models.cli.commands import run_of
from fusewright_models.cli.hybrid import HybridRun
from fusewright_models.cli.options import flag, hints_of
from fusewright_models.cli.titan_mac import TitanMACRun
from fusewright_models.cli.transformer_np import TransformerNPRun

from .commands import assert_refused, assert_same_weights, invoke, metrics

pytestmark = pytest.mark.usefixtures("without_pictures", "short_samples")
KINDS = {kind.model_name: kind for kind in (TransformerNPRun, TitanMACRun, HybridRun)}
every_model = pytest.mark.parametrize("model", KINDS)
EVER = (math.nan, math.inf, -math.inf)


def bounds(hint: Any) -> tuple[type, float, float] | None:
    """Of a setting that is a number: its type, the least and the most that it may be."""
    kind, *told = get_args(hint)
    found = {kind} | {*get_args(kind)} - {NoneType}
    if not (numbers := {int, float} & found):
        return None
    least, most = told[0].min, told[0].max
    return numbers.pop(), -math.inf if least is None else least, math.inf if most is None else most


def refused_numbers(kind: type) -> Iterator[tuple[str, float]]:
    """Of each setting that is a number, values that it cannot have: those not finite, those just
    below and above its bounds, and of a count one and a half and one that no machine holds.
    """
    for name, hint in hints_of(kind).items():
        if (found := bounds(hint)) is None:
            continue
        number, least, most = found
        values = [*EVER, -1, 0, 1.5, 10**30]
        for value in values:
            whole = number is float or (math.isfinite(value) and value == int(value))
            beyond = number is int and value > 2**62
            if not (math.isfinite(value) and least <= value <= most and whole) or beyond:
                yield name, value


@every_model
def test_every_number_out_of_its_bounds_is_refused_as_a_flag_in_a_sentence(tmp_path, model):
    seen = {}
    for name, value in refused_numbers(KINDS[model]):
        result = invoke(app, model, f"{flag(name)}={value}", "--out", tmp_path / "run")
        assert_refused(result, f"{flag(name)}|{name}", tmp_path)
        seen.setdefault(name, []).append(value)
    # Each of those that are counted from 1 was asked for none, too.
    assert {"lr", "weight_decay", "beta1", "clip_norm", "warmup_steps", "seed"} <= seen.keys()
    assert all(0 in seen[name] for name in ("steps", "batch_size", "log_every", "keep"))
    assert all(len(values) >= 4 for values in seen.values())


@every_model
def test_every_number_out_of_its_bounds_is_refused_in_a_file(model):
    run = KINDS[model].from_flags({"preset": "tiny", "device": "cpu"})
    for name, value in refused_numbers(KINDS[model]):
        with pytest.raises((ValueError, TypeError), match=f"^{name} must be "):
            replace(run, **{name: value})


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("titan-mac", ["--dim", "100", "--num-heads", "3"], "dim must be"),
        ("titan-mac", ["--dim", "24", "--num-heads", "2"], "dim must be heads times a width"),
        ("titan-mac", ["--chunk-size", "10", "--memory-chunk", "4"], "memory_chunk"),
        ("titan-mac", ["--checkpointing", "keep-attention"], "Invalid value for '--checkpointing'"),
        ("hybrid", ["--checkpointing", "block"], "checkpointing is for mode 'plain'"),
        ("hybrid", ["--selected-keys", "1000"], "selected_keys must be from"),
        ("titan-mac", ["--margin", "nan"], "margin must be finite; got nan"),
        ("titan-mac", ["--clip-norm", "0"], "clip_norm must be positive; got 0.0"),
        (
            "titan-mac",
            ["--steps", "5", "--warmup-steps", "6"],
            "warmup_steps must be 0 to 5",
        ),
        ("hybrid", ["--checkpoint-every", "0"], "checkpoint_every must be a number of steps"),
    ],
)
def test_settings_that_do_not_go_together_are_told_before_data_is_read(
    tmp_path, monkeypatch, model, flags, message
):
    def read(run):
        raise AssertionError("the data was read")

    monkeypatch.setattr(KINDS[model], "corpus", read)
    result = invoke(app, model, "--preset", "tiny", *flags, "--out", tmp_path / "run")
    assert_refused(result, re.escape(message), tmp_path)


def test_betas_of_the_learned_optimizer_are_refused(tmp_path):
    flags = ["--preset", "tiny", "--optimizer", "learned", "--beta1", "0.5"]
    result = invoke(app, "transformer-np", *flags, "--out", tmp_path / "run")
    assert_refused(
        result, re.escape("the optimizer learned has no betas; got (0.5, 0.95)"), tmp_path
    )


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1"])
def test_temperature_that_is_none_is_refused(tmp_path, temperature):
    result = invoke(app, "generate", tmp_path, "--temperature", temperature)
    assert_refused(result, "temperature")


def test_evaluation_that_is_not_finite_ends_the_run_and_leaves_json(tmp_path, monkeypatch):
    from fusewright_models.cli import transformer_np

    score = transformer_np.Evaluator.score
    seen = []

    def failing(*given, **options):
        seen.append(None)
        found = score(*given, **options)
        return replace(found, log_likelihood=math.nan) if len(seen) == 2 else found

    monkeypatch.setattr(transformer_np.Evaluator, "score", failing)
    flags = ["--preset", "tiny", "--steps", "2", "--eval-every", "1", "--out", tmp_path]
    result = invoke(app, "transformer-np", *flags)
    assert result.exit_code == 1
    assert "held out log likelihood nan at step 1: not finite; lower the" in result.output
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in lines
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1]


def test_model_that_has_diverged_is_scored_and_continues_no_text(tmp_path, text):
    # Its memory may diverge.
    flags = ["--preset", "tiny", "--steps", "2", "--batch-size", "2", "--lr", "1"]
    flags += ["--memory-rule", "paper", "--memory-length", "100"]
    data = ["--dataset", text, "--seq-len", "20", "--out", tmp_path]
    result = invoke(app, "titan-mac", *flags, *data)
    assert result.exit_code == 0, result.output
    assert "no text is continued: wanted finite logits over temperature 0.8" in result.output
    assert "after training" in result.output
    assert not (tmp_path / "sample.txt").exists()
    result = invoke(app, "generate", tmp_path)
    assert_refused(result, "wanted finite logits over temperature 0.8; got others")


TOML = """
# Of the smallest run.
preset = "tiny"
steps = 2
batch_size = 2
lr = 0.01
weight_decay = 0
log_every = 1
"""
SAID = {
    "preset": "tiny",
    "steps": 2,
    "batch_size": 2,
    "lr": 0.01,
    "weight_decay": 0.0,
    "log_every": 1,
}


def given(model: str, text: Path) -> list[object]:
    return [] if model == "transformer-np" else ["--dataset", text, "--seq-len", "20"]


def written(folder: Path, content: str) -> Path:
    file = folder / "run.toml"
    file.write_text(content)
    return file


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.sampled
@every_model
def test_file_and_flags_say_the_same_and_what_the_folder_holds_runs_again(tmp_path, text, model):
    data, file = given(model, text), written(tmp_path, TOML)
    flags = [f"{flag(name)}={value}" for name, value in SAID.items()]
    again = ["--config", tmp_path / "flags/config.json"]
    ways = {"flags": [*flags, *data], "file": ["--config", file, *data], "again": again}
    for name, way in ways.items():
        result = invoke(app, model, *way, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
    for name in ("file", "again"):
        assert config(tmp_path / name) == config(tmp_path / "flags")
        assert_same_weights(tmp_path / name, tmp_path / "flags")


def test_flags_win_over_the_file(tmp_path):
    file = written(tmp_path, TOML)
    out = tmp_path / "run"
    flags = ["--config", file, "--steps", "1", "--no-compile", "--seed", "3", "--out", out]
    result = invoke(app, "transformer-np", *flags)
    assert result.exit_code == 0, result.output
    found = config(out)
    assert (found["steps"], found["seed"], found["batch_size"]) == (1, 3, 2)


def test_config_of_before_runs_again(tmp_path, text):
    """By former names, and without settings that came later."""
    run = TitanMACRun.from_flags({"preset": "tiny", "device": "cpu", "dataset": str(text)})
    names = {"steps": "max_steps", "precision": "mixed_precision"}
    before = {names.get(name, name): getattr(run, name) for name in hints_of(TitanMACRun)}
    before |= {"model": "titan-mac", "torch": "2.11", "max_steps": 1, "seq_len": 20}
    for name in ("warmup_steps", "schedule", "beta1", "beta2", "clip_norm", "checkpointing"):
        del before[name]
    (tmp_path / "config.json").write_text(json.dumps(before))
    out = tmp_path / "run"
    result = invoke(app, "titan-mac", "--config", tmp_path / "config.json", "--out", out)
    assert result.exit_code == 0, result.output
    assert config(out)["steps"] == 1


@pytest.mark.parametrize("of_a_run", [True, False])
def test_config_of_before_says_the_memory_that_all_had_then(tmp_path, of_a_run):
    """What a caller wrote leaves it to the preset."""
    run = TitanMACRun.from_flags({"preset": "tiny", "device": "cpu", "memory_rule": "paper"})
    before = {"model": "titan-mac"} | {name: getattr(run, name) for name in hints_of(TitanMACRun)}
    for name in ("memory_rule", "memory_length", "memory_layers", "beta1"):
        del before[name]
    if of_a_run:
        before["torch"] = "2.11"
    (tmp_path / "config.json").write_text(json.dumps(before))
    found = run_of(TitanMACRun, {"config": tmp_path / "config.json"})
    memory = found.memory_rule, found.memory_length, found.memory_layers
    assert memory == (("paper", 100.0, 2) if of_a_run else ("normed", 16384.0, 2))
    # A flag says more.
    flags = {"config": tmp_path / "config.json", "memory_rule": "origin"}
    assert run_of(TitanMACRun, flags).memory_rule == "origin"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepps = 2", "run.toml: no setting is called stepps; steps is"),
        ("batch-size = 2", "no setting is called batch-size; batch_size is"),
        ("[optimization]\nlr = 0.1", "no setting is called optimization; optimizer is"),
        ("colour = 1", "no setting is called colour\n"),
        ("steps = 0", "steps must be at least 1; got 0"),
        ("steps = 2.5", "steps must be int; got 2.5"),
        ('steps = "2"', "steps must be int; got '2'"),
        ("lr = nan", "lr must be at least 0 and at most 10; got nan"),
        ("lr = inf", "lr must be at least 0 and at most 10; got inf"),
        ("clip_norm = inf", "clip_norm must be at least 0 and finite; got inf"),
        ('preset = "huge"', "preset must be one of ('tiny', 'demo', "),
        ("device = 1", "device must be str; got 1"),
        ("lr = [0.1]", "lr must be float; got [0.1]"),
        ("compile = 1", "compile must be bool; got 1"),
        ('model = "hybrid"', "wanted settings of transformer-np in "),
        ("steps = ", "got no TOML: "),
        ("steps = 1\nsteps = 2", "got no TOML: "),
    ],
)
def test_bad_file_gets_one_clear_sentence(tmp_path, content, message):
    file = written(tmp_path, content)
    result = invoke(app, "transformer-np", "--config", file, "--out", tmp_path / "run")
    output = re.sub(r" *│ *", "\n", result.output)
    assert result.exit_code == 2
    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["nowhere.toml", "folder", "bytes.toml", "list.json", "cut.json"])
def test_file_of_no_settings_is_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "cut.json").write_text("{")
    out = tmp_path / "run"
    result = invoke(app, "transformer-np", "--config", tmp_path / name, "--out", out)
    assert_refused(result, re.escape(str(tmp_path / name)), out)


def test_resumed_run_takes_the_settings_of_its_folder(tmp_path):
    file = written(tmp_path, TOML)
    flags = ["--resume", tmp_path, "--config", file]
    result = invoke(app, "transformer-np", *flags)
    assert_refused(result, "--resume takes the settings of its folder; got --config as well")
