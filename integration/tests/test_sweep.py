"""A sweep trains each combination once, whatever stops it, and its table is of the runs' scores."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from fusewright_models.cli import app, sweep
from fusewright_models.cli.generate import KINDS
from fusewright_models.cli.sweep import Member, combinations, gpus, mean_of
from fusewright_models.training import RunFolder

from .commands import assert_same_metrics, assert_same_weights, invoke, metrics

pytestmark = pytest.mark.usefixtures("without_pictures")
FLAGS = ["--preset", "tiny", "--device", "cpu", "--steps", "2", "--eval-every", "1"]
SWEPT = ["--seed", "0,1", "--lr", "1e-3,2e-3"]
NAMES = [f"seed={seed},lr={lr}" for seed in (0, 1) for lr in ("1e-3", "2e-3")]


class InProcess:
    """A run's command, executed here; `kill` says which fail."""

    def __init__(self, member, kill=()) -> None:
        self.code = 1 if member.name in kill else invoke(app, *member.command[3:]).exit_code

    def poll(self):
        return self.code

    def send_signal(self, number):
        raise AssertionError("it has come to its end")

    def wait(self):
        return self.code


@pytest.fixture
def started(monkeypatch):
    """Runs are executed in this process; the commands of those that were begun, and names of runs
    that are to fail.
    """
    begun, kill = [], set()

    def start(member, device):
        begun.append(member.command[3:])
        return InProcess(member, kill)

    monkeypatch.setattr(sweep, "start", start)
    return begun, kill


def rows_of(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def swept(out, *more, flags=FLAGS):
    return invoke(app, "sweep", "transformer-np", *flags, *SWEPT, "--out", out, *more)


def test_every_combination_is_trained_once_and_its_scores_are_told(tmp_path, started):
    begun, kill = started
    kill.add(NAMES[2])
    out = tmp_path / "sweep"
    result = swept(out)
    assert result.exit_code == 1, result.output
    assert "4 runs of transformer-np, 0 at their end already" in result.output
    assert f"1 runs failed: {NAMES[2]}" in result.output
    assert f"{NAMES[2]}: ended with exit code 1: {out / NAMES[2]}.log" in result.output
    assert len(begun) == 4
    assert [row["finished"] for row in rows_of(out)] == ["True", "True", "False", "True"]

    # The one that failed is trained, and nothing else.
    kill.clear()
    result = swept(out)
    assert result.exit_code == 0, result.output
    assert "4 runs of transformer-np, 3 at their end already" in result.output
    assert len(begun) == 5
    rows = rows_of(out)
    assert [row["folder"] for row in rows] == NAMES
    assert [(row["seed"], row["lr"]) for row in rows] == [
        (seed, lr) for seed in "01" for lr in ("1e-3", "2e-3")
    ]
    for row, name in zip(rows, NAMES, strict=True):
        last = metrics(out / name)[-1]
        assert float(row["held_out_log_likelihood"]) == last["held_out_log_likelihood"]
        assert (row["finished"], row["step"]) == ("True", "2")
    for lr in ("1e-3", "2e-3"):
        found = [float(row["held_out_log_likelihood"]) for row in rows if row["lr"] == lr]
        error = statistics.stdev(found) / 2**0.5
        (line,) = [line for line in result.output.splitlines() if f" {lr} " in line]
        assert f"{statistics.fmean(found):.4f} ± {error:.4f}" in line

    # They are the runs of the command alone.
    alone = ["--seed", "1", "--lr", "1e-3", "--out", tmp_path / "alone"]
    assert invoke(app, "transformer-np", *FLAGS, *alone).exit_code == 0
    assert_same_weights(tmp_path / "alone", out / NAMES[2])


def test_what_was_stopped_is_continued_and_other_settings_are_refused(tmp_path, started):
    begun, _ = started
    out, values = tmp_path / "sweep", ["--seed", "0,1", "--out"]
    command = ["sweep", "transformer-np", *FLAGS, *values, out]
    assert invoke(app, *command).exit_code == 0
    folder, whole = out / "seed=1", tmp_path / "whole"
    folder.rename(whole)
    # What is there before the first checkpoint.
    folder.mkdir()
    shutil.copy(whole / "config.json", folder)
    begun.clear()
    assert invoke(app, *command).exit_code == 0
    assert begun == [["transformer-np", "--resume", str(folder)]]
    assert_same_weights(whole, folder)
    assert_same_metrics(whole, folder)

    result = invoke(app, *command, "--steps", "3", "--norm", "post")
    assert result.exit_code == 2
    assert "seed=0; --norm, --steps differ: give another --out" in result.output


@pytest.mark.parametrize("place", ["flags", "file"])
def test_what_is_continued_takes_where_and_how_it_runs_from_the_command(tmp_path, started, place):
    """All that changes nothing that is trained, and of it what is asked for and differs."""
    begun, kill = started
    out, values = tmp_path / "sweep", ["--seed", "0,1", "--out"]
    assert invoke(app, "sweep", "transformer-np", *FLAGS, *values, out).exit_code == 0
    folder = out / "seed=1"
    config = json.loads((folder / "config.json").read_text())
    shutil.rmtree(folder)
    folder.mkdir()
    there = config | {"device": "cuda", "compile": True, "keep": 5, "backend": "triton"}
    (folder / "config.json").write_text(json.dumps(there))
    begun.clear()
    # Its command is what is asked for here.
    kill.add("seed=1")
    if place == "flags":
        asked = [*FLAGS, "--no-compile", "--keep", "3"]
    else:
        (tmp_path / "run.toml").write_text('device = "cpu"\ncompile = false\nkeep = 3\n')
        asked = ["--preset", "tiny", "--steps", "2", "--config", tmp_path / "run.toml"]
    invoke(app, "sweep", "transformer-np", *asked, *values, out)
    (command,) = begun
    assert command[:3] == ["transformer-np", "--resume", str(folder)]
    assert sorted(command[3:]) == ["--device", "--keep", "--no-compile", "3", "cpu"]


def test_what_is_continued_keeps_the_commit_of_its_data(tmp_path):
    """A branch may have moved on since the run began."""
    asked = {"preset": "tiny", "device": "cpu", "dataset_revision": "main", "keep": 3}
    run = KINDS["titan-mac"].from_flags(asked)
    folder = RunFolder(tmp_path / "run")
    there = asdict(run) | {"dataset_revision": "0a1b", "keep": 5}
    folder.path.mkdir()
    folder.config_file.write_text(json.dumps({"model": "titan-mac"} | there))
    anyhow = {name: asked[name] for name in ("device", "dataset_revision", "keep")}
    command = Member({}, [], anyhow, run, folder).command
    assert command[3:] == ["titan-mac", "--resume", str(folder.path), "--keep", "3"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "0"], "wanted a flag of several values, such as --seed 0,1,2; got none"),
        (["--seed", "0,1", "2"], "wanted flags, each with one value or none; got 2"),
        (["--seed", "0,1", "--seed", "2,3"], "of --seed with commas between them; got it twice"),
        (["--seed", "0,1,0"], "wanted different values of a flag; got one twice"),
        (["--seed", "0,00"], "wanted different values of a flag; got one twice"),
        (["--lr", "1e-3,0.001"], "wanted different values of a flag; got one twice"),
        (["--seed", "0,x"], "Invalid value for '--seed'"),
        (["--sead", "0,1"], "No such option: --sead"),
        (["--lr", "1e-3,nan"], "lr"),
        (["--lr", "1e-3,99"], "Invalid value for '--lr'"),
        (
            ["--warmup-steps", "1,2", "--clip-norm", "inf"],
            "clip_norm must be at least 0",
        ),
        (["--seed", "0,1", "--parallel", "fsdp"], "a sweep has no --parallel of its runs"),
        (["--seed", "0,1", "--indicator", "--norm", "post,mid"], "'mid' is not one of"),
        (["--seed", "0,1", "--dry-run"], "a sweep has no --dry-run of its runs"),
        (["--seed", "0,1", "--resume", "x"], "a sweep has no --resume of its runs"),
        (["--optimizer", "adamw,sgd"], "'sgd' is not one of"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_trained(
    flags, message, tmp_path, started
):
    given = [*FLAGS, *flags, "--out", tmp_path / "sweep"]
    result = invoke(app, "sweep", "transformer-np", *given)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert started[0] == []
    assert not (tmp_path / "sweep").exists()


def test_a_model_that_there_is_not_is_refused(tmp_path):
    result = invoke(app, "sweep", "titan", "--seed", "0,1", "--out", tmp_path / "sweep")
    assert result.exit_code == 2
    assert "wanted one of transformer-np, titan-mac, hybrid; got titan" in result.output


def test_flags_are_combined_in_their_order():
    found = combinations(["--compile", "--a-b", "1,2", "--name=x", "--c", "p,q", "--no-pad"])
    assert [each.values for each in found] == [
        {"a_b": a, "c": c} for a in ("1", "2") for c in ("p", "q")
    ]
    assert found[1].arguments == [
        *("--compile", "--a-b", "1", "--name", "x", "--c", "q", "--no-pad")
    ]


def test_runs_are_spread_over_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(["--seed", "0,1"]) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpus(["--seed", "0,1"]) == ["3", "5"]
    assert gpus(["--device", "cuda:1"]) == gpus(["--device=cpu"]) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpus([]) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "-"),
        ([1.0, float("nan")], "-"),
        ([2.0], "2.0000"),
        ([1.0, 2.0, 3.0], "2.0000 ± 0.5774"),
    ],
)
def test_means_have_their_standard_error(values, said):
    assert mean_of(values) == said


class Waiting(InProcess):
    """A run that ends once it has a signal."""

    signals: list
    code: int | None

    def __init__(self, signals) -> None:
        self.signals, self.code = signals, None

    def send_signal(self, number):
        self.signals.append(number)
        self.code = 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_get_the_signal_and_no_further_one_is_begun(number, tmp_path, monkeypatch):
    signals, begun = [], []

    def start(member, device):
        begun.append(member)
        if len(begun) == 2:
            os.kill(os.getpid(), number)
        return Waiting(signals)

    monkeypatch.setattr(sweep, "start", start)
    result = swept(tmp_path / "sweep", "--jobs", "2")
    assert result.exit_code == 128 + number
    assert f"stopped by {signal.Signals(number).name}; the same command goes on" in result.output
    assert (signals, len(begun)) == ([number] * 2, 2)


@pytest.mark.slow
def test_processes_are_trained_side_by_side_stopped_and_continued(tmp_path):
    out = tmp_path / "sweep"
    program = [sys.executable, "-m", "fusewright_models", "sweep", "transformer-np"]
    flags = ["--preset", "tiny", "--device", "cpu", "--steps", "40", "--eval-every", "20"]
    command = [*program, *flags, "--seed", "0,1,2", "--out", str(out), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    metrics_file = out / "seed=0/metrics.jsonl"
    while not (metrics_file.exists() and metrics_file.read_text().count("\n") > 2):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, told
    assert not (out / "seed=2").exists()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["finished"] for row in rows_of(out)] == ["True"] * 3
    alone = [*program[:3], "transformer-np", *flags, "--out", str(tmp_path / "alone")]
    assert subprocess.run(alone, capture_output=True).returncode == 0
    assert_same_weights(tmp_path / "alone", out / "seed=0")
    assert_same_metrics(tmp_path / "alone", out / "seed=0")
