"""Processes that train over NCCL take the steps of one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from .commands import metrics

pytestmark = pytest.mark.gpu
SECONDS = 300
# Sums of a loss in another order.
BOUND = 16 * torch.finfo(torch.float32).eps
FLAGS = ["--steps", "8", "--log-every", "1", "--eval-every", "8", "--batch-size", "8"]
MODELS = {
    "transformer-np": ["--preset", "tiny", "--ragged"],
    "titan-mac": ["--preset", "tiny", "--seq-len", "64"],
    "hybrid": ["--preset", "tiny", "--seq-len", "64"],
}


def flags_of(model: str, text: str) -> list[str]:
    flags = [model, *FLAGS, *MODELS[model]]
    if model != "transformer-np":
        flags += ["--dataset", str(text)]
    return flags


def run(arguments: list[object], processes: int | None) -> str:
    """What the program prints: by itself, or by so many processes of torchrun."""
    command = [sys.executable, "-m"]
    if processes is not None:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m"]
    command += ["fusewright_models", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def score(output: str) -> int:
    """Of the model, in the table that an evaluation prints, in units of the last place."""
    (line,) = (line for line in output.splitlines() if "windows of" in line)
    return int(line.split("\u2502")[2].replace(".", ""))


@pytest.mark.parametrize("model", MODELS)
def test_one_process_of_torchrun_replays_the_steps_of_one_without(model, tmp_path, text):
    flags = [*flags_of(model, text), "--capture"]
    run([*flags, "--out", tmp_path / "alone"], None)
    run([*flags, "--out", tmp_path / "torchrun"], 1)
    alone, together = losses(tmp_path / "alone"), losses(tmp_path / "torchrun")
    assert len(alone) == 8
    assert together == alone


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("model", ["titan-mac", "hybrid"])
def test_two_processes_that_share_windows_have_the_score_of_one(model, tmp_path, text):
    run([*flags_of(model, text), "--precision", "fp32", "--out", tmp_path / "run"], None)
    flags = ["evaluate", tmp_path / "run", "--seq-len", "301"]
    alone, both = (score(run(flags, processes)) for processes in (None, 2))
    assert abs(both - alone) <= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["--capture", "--no-capture", "--parallel=fsdp"])
def test_two_processes_have_the_losses_of_one_on_the_same_batches(model, how, tmp_path, text):
    flags = flags_of(model, text)
    flags += ["--precision", "fp32"]
    run([*flags, "--out", tmp_path / "alone"], None)
    run([*flags, how, "--out", tmp_path / "both"], 2)
    alone, both = losses(tmp_path / "alone"), losses(tmp_path / "both")
    assert len(alone) == len(both) == 8
    # Of the first step, and of the second, which knows the gradients of the first.
    assert both[:2] == pytest.approx(alone[:2], rel=BOUND)
    assert alone[0] != alone[1]
