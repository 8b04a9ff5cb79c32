"""What the options of all commands have in common: names, groups, and that help needs no torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import get_args

import pytest
import torch
from fusewright import attention, mixture_head, reversible
from fusewright_models import choices
from fusewright_models.cli import app, presets
from fusewright_models.cli.hybrid import HybridRun
from fusewright_models.cli.titan_mac import TitanMACRun
from fusewright_models.cli.transformer_np import TransformerNPRun
from fusewright_models.training import RunFolder

from .commands import assert_refused, assert_same_weights, invoke, metrics

pytestmark = pytest.mark.usefixtures("without_pictures", "short_samples")
KINDS = {kind.model_name: kind for kind in (TransformerNPRun, TitanMACRun, HybridRun)}
every_model = pytest.mark.parametrize("model", KINDS)
SHARED = """
steps batch-size gradient-accumulation-steps optimizer lr warmup-steps schedule weight-decay beta1
beta2 clip-norm seed precision device parallel compile capture checkpointing backend log-every
eval-every eval-share checkpoint-every keep profile memory-snapshot tensorboard wandb
wandb-project out resume
"""
HELP = """
import sys
from fusewright_models.cli import app
try:
    app(prog_name="fusewright-train")
except SystemExit as end:
    assert end.code == 0, end.code
wide = {"torch", "triton", "sklearn", "matplotlib", "numpy"}
print("imported", sorted(wide & sys.modules.keys()))
"""


def flags(model, text, *more, steps="--steps"):
    """Of two steps of the smallest run."""
    common = ["--preset", "tiny", steps, "2", "--log-every", "1", "--batch-size", "2"]
    data = [] if model == "transformer-np" else ["--dataset", text, "--seq-len", "20"]
    return [model, *common, *data, *more]


@pytest.mark.parametrize("command", [None, *KINDS, "generate", "predict"])
def test_help_imports_nothing_that_takes_long(command):
    program = [sys.executable, "-c", HELP, *([command] if command else []), "--help"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Usage: fusewright-train" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported []"


def test_names_of_choices_are_those_of_the_packages():
    assert get_args(choices.Backend) == get_args(attention.Backend)
    assert get_args(choices.Scale) == get_args(mixture_head.Scale)
    assert get_args(choices.Mode) == get_args(reversible.Mode)
    assert get_args(choices.PresetName) == (*presets.TRANSFORMER_NP,)
    assert get_args(choices.TitanMACPresetName) == (*presets.TITAN_MAC_PRESETS,)
    assert get_args(choices.HybridPresetName) == (*presets.HYBRID_PRESETS,)


@every_model
def test_options_of_all_models_have_one_name_and_stand_in_groups(model):
    shown = invoke(app, model, "--help").output
    assert {f"--{name}" for name in SHARED.split()} <= set(re.findall(r"--[a-z0-9-]+", shown))
    for group in ("Model", "Data", "Optimization", "Devices and speed", "Run folder and progress"):
        assert f"─ {group} ─" in shown
    assert "--max-steps" not in shown
    assert "--mixed-precision" not in shown


@every_model
def test_former_names_go_on_working_with_a_word(tmp_path, text, model):
    given = flags(model, text, "--mixed-precision", "fp32", steps="--max-steps")
    result = invoke(app, *given, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    for old, new in (("--max-steps", "--steps"), ("--mixed-precision", "--precision")):
        assert f"{old} is the former name of {new}" in result.output
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["steps"], config["precision"]) == (2, "fp32")
    both = invoke(app, model, "--steps", "1", "--max-steps", "1", "--out", tmp_path / "both")
    assert_refused(both, "--max-steps is the former name of --steps: give one", tmp_path / "both")


def test_run_of_before_with_former_names_resumes(tmp_path, text):
    """As a run of titan-mac was left before its settings had these names."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    given = [*flags("titan-mac", text), "--eval-every", "1"]
    assert invoke(app, *given, "--out", whole).exit_code == 0
    shutil.copytree(whole, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    later = {"warmup_steps", "schedule", "beta1", "beta2", "clip_norm", "checkpointing"}
    names = {"steps": "max_steps", "precision": "mixed_precision"}
    before = {names.get(name, name): value for name, value in config.items() if name not in later}
    file.write_text(json.dumps(before))
    # Its first step alone was taken.
    checkpoints = RunFolder(folder).checkpoints
    shutil.rmtree(checkpoints.files()[0].parent)
    state = checkpoints.load()[0]
    assert state["choices"].keys().isdisjoint(later)
    state["choices"] = {names.get(name, name): value for name, value in state["choices"].items()}
    shutil.rmtree(folder / "checkpoints")
    torch.save(state, folder / "checkpoint.pt")
    result = invoke(app, "titan-mac", "--resume", folder, "--keep", "3")
    assert result.exit_code == 0, result.output
    assert_same_weights(whole, folder)
    assert json.loads(file.read_text()) == config | {"keep": 3}


@every_model
def test_clip_betas_warm_up_and_schedule_reach_the_steps(tmp_path, text, model):
    given = ["--clip-norm", "0.001", "--beta1", "0.8", "--beta2", "0.9", "--lr", "0.01"]
    given += ["--warmup-steps", "1", "--schedule", "linear", "--steps", "4"]
    given += ["--gradient-accumulation-steps", "2"]
    result = invoke(app, *flags(model, text), *given, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line for line in metrics(tmp_path) if "lr" in line]
    shares = [1.0, 1.0, 1.0 - 1 / 3, 1.0 - 2 / 3]
    assert [line["lr"] for line in lines] == [0.01 * share for share in shares]
    state = RunFolder(tmp_path).load_checkpoint()
    assert all(group["betas"] == (0.8, 0.9) for group in state["optimizer"]["param_groups"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["clip_norm"] == 0.001
    assert config["gradient_accumulation_steps"] == 2


@every_model
def test_blocks_that_are_computed_again_change_no_bit(tmp_path, text, model):
    mode = ["--mode", "plain"] if model == "hybrid" else []
    for how in ("none", "block"):
        asked = [*flags(model, text), *mode, "--checkpointing", how, "--out", tmp_path / how]
        result = invoke(app, *asked)
        assert result.exit_code == 0, result.output
    assert_same_weights(tmp_path / "none", tmp_path / "block")
