"""Runs of the program that are stopped, taken up with other flags, or run out of disk."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fusewright_models.cli import app, commands, transformer_np
from fusewright_models.data import Digits
from fusewright_models.training import RunFolder, StopSignals, warmup_cosine
from fusewright_models.training.processes import ALONE

from .commands import (
    assert_refused,
    assert_same_metrics,
    assert_same_weights,
    flags_of,
    invoke,
    leave_out_pictures,
    metrics,
)
from .test_run_folder import full_disk

pytestmark = pytest.mark.usefixtures("without_pictures")
TINY = ["--preset", "tiny", "--steps", "5", "--log-every", "2", "--eval-every", "3"]


def run(*arguments):
    return invoke(app, "transformer-np", *arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run that nothing stopped, to be copied."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        assert run(*TINY, "--out", folder).exit_code == 0
    return folder


def at_batch(monkeypatch, number: int, what) -> None:
    """Evaluations before the first step and after the third draw one batch, the last one four."""
    sample, seen = Digits.sample, []

    def sampled(self, batch):
        seen.append(batch)
        if len(seen) == number:
            what()
        return sample(self, batch)

    monkeypatch.setattr(Digits, "sample", sampled)


def send(*numbers: int):
    def sent():
        for number in numbers:
            os.kill(os.getpid(), number)

    return sent


ASKED = SIGINT, SIGTERM, SIGUSR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("number", "batch", "step"),
    # In the evaluation of the beginning, in the second step, in the evaluation after the third, in
    # the fourth step, and in the last. What is done does not look at which signal it is.
    [(SIGINT, 1, 0), (SIGTERM, 3, 2), (SIGUSR1, 5, 3), (SIGINT, 6, 4), (SIGTERM, 7, 5)],
    ids=lambda x: x.name if isinstance(x, signal.Signals) else None,
)
def test_signal_ends_the_step_that_runs_and_saves_it(
    tmp_path, monkeypatch, whole, number, batch, step
):
    handlers = [signal.getsignal(each) for each in ASKED]
    with monkeypatch.context() as patch:
        at_batch(patch, batch, send(number))
        stopped = run(*TINY, "--out", tmp_path)
    assert stopped.exit_code == 128 + number
    told = f"stopped by {number.name} after step {step}, which is saved; continue with: "
    assert f"{told}fusewright-train transformer-np --resume {tmp_path}" in stopped.output
    assert [signal.getsignal(each) for each in ASKED] == handlers
    assert RunFolder(tmp_path).load_checkpoint()["step"] == step
    resumed = run("--resume", tmp_path)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, tmp_path)
    assert_same_metrics(whole, tmp_path)


def test_signal_that_comes_while_processes_wait_for_one_another_is_kept(monkeypatch):
    stop = StopSignals(ALONE)

    def wait(value):
        signal.raise_signal(signal.SIGTERM)
        return value

    with stop:
        with monkeypatch.context() as patch:
            patch.setattr(ALONE, "greatest", wait, raising=False)
            stop()
        assert stop()
    assert stop.received == signal.SIGTERM


@pytest.mark.parametrize("first", ASKED, ids=lambda number: number.name)
def test_second_interrupt_leaves_at_once(tmp_path, monkeypatch, whole, first):
    handlers = [signal.getsignal(each) for each in ASKED]
    with monkeypatch.context() as patch:
        at_batch(patch, 6, send(first, signal.SIGINT))
        stopped = run(*TINY, "--out", tmp_path)
    assert stopped.exit_code == 130
    assert f"stopped; continue with: fusewright-train transformer-np --resume {tmp_path}" in (
        stopped.output
    )
    assert [signal.getsignal(each) for each in ASKED] == handlers
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 3
    assert run("--resume", tmp_path).exit_code == 0
    assert_same_weights(whole, tmp_path)
    assert_same_metrics(whole, tmp_path)


def test_signal_while_a_checkpoint_is_written_is_served_after_it(tmp_path, monkeypatch):
    save = RunFolder.save_checkpoint

    def signalled(self, state, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, state, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", signalled)
        assert run(*TINY, "--out", tmp_path).exit_code == 143
    steps = {int(file.parent.name[5:]) for file in RunFolder(tmp_path).checkpoints.files()}
    assert 3 in steps


def test_ignored_signals_stay_ignored(tmp_path, monkeypatch, whole):
    """As those of a terminal are by what runs in its background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        at_batch(monkeypatch, 3, send(signal.SIGINT))
        assert run(*TINY, "--out", tmp_path).exit_code == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same_weights(whole, tmp_path)


def test_full_disk_ends_in_one_sentence_and_the_last_checkpoint_stands(
    tmp_path, monkeypatch, whole
):
    save = RunFolder.save_checkpoint

    def cramped(self, state, **options):
        with full_disk(20_000 if state["step"] == 5 else -1):
            save(self, state, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", cramped)
        stopped = run(*TINY, "--out", tmp_path)
    assert stopped.exit_code == 1
    told = f"stopped: could not write {tmp_path}/checkpoints/step-000005/state.pt: File too large; "
    assert f"{told}the last checkpoint stands; continue with: fusewright-train" in stopped.output
    assert "Traceback" not in stopped.output
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 3
    assert run("--resume", tmp_path).exit_code == 0
    assert_same_weights(whole, tmp_path)
    assert_same_metrics(whole, tmp_path)


def test_folder_that_is_trained_into_is_no_others(tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    message = re.escape(f"no other program trains into; one holds {folder}/run.lock")
    with RunFolder(folder).locked():
        assert_refused(run("--resume", folder), message)
    with RunFolder(tmp_path / "new").locked():
        assert_refused(run(*TINY, "--out", tmp_path / "new"), message.replace("/run/", "/new/"))
    assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["run.lock"]


def test_two_programs_that_find_a_folder_empty_do_not_share_it(tmp_path, monkeypatch, whole):
    """The other one begins and ends while this one reads its data."""
    check = transformer_np.check_device

    def meanwhile(asked):
        shutil.copytree(whole, tmp_path / "run")
        check(asked)

    monkeypatch.setattr(transformer_np, "check_device", meanwhile)
    result = run(*TINY, "--out", tmp_path / "run")
    assert_refused(result, "holds a run: continue it with --resume")
    assert_same_metrics(whole, tmp_path / "run")


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands.time, "strftime", lambda form: "20260131-120000")
    for _ in range(2):
        assert run(*TINY, "--steps", "1").exit_code == 0
    names = [each.name for each in (tmp_path / "runs").iterdir()]
    assert len(names) == 2
    form = r"transformer-np-digits-20260131-120000-[0-9a-f]{6}"
    assert all(re.fullmatch(form, name) for name in names)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_resumed_run_takes_what_changes_nothing_that_is_trained(tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        at_batch(patch, 3, send(signal.SIGTERM))
        assert run(*TINY, "--out", tmp_path).exit_code == 143
    flags = {"log_every": 1, "checkpoint_every": "1", "keep": 4, "backend": "reference"}
    words = [
        str(word)
        for name, value in flags.items()
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    before = config_of(tmp_path)
    resumed = run("--resume", tmp_path, *words)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, tmp_path)
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [2, 3, 4, 5]
    assert config_of(tmp_path) == before | flags
    files = RunFolder(tmp_path).checkpoints.files()
    assert [file.parent.name for file in files] == [f"step-{step:06d}" for step in (5, 4, 3, 2)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "0.1"], "takes what is trained from its folder; got --lr as well"),
        (["--seed", "1", "--keep", "3"], "takes what is trained from its folder; got --seed as"),
        (["--batch-size", "4", "--data", "blr"], "got --data, --batch-size as well"),
        (["--out", "other"], "got --out as well"),
        (["--device", "quantum"], "Invalid value: --device must be cpu, cuda or cuda:N"),
        (["--keep", "0"], "Invalid value for '--keep'"),
        (["--checkpoint-every", "soon"], "such as 500, or of minutes such as 10m; got 'soon'"),
        (["--steps", "3"], "wanted more steps than the 5 that the checkpoint in "),
        (["--capture"], "--capture needs a CUDA device; got --device cpu"),
    ],
    ids=flags_of,
)
def test_what_a_resumed_run_cannot_take_is_refused(tmp_path, whole, flags, message):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = config_of(folder), metrics(folder)
    assert_refused(run("--resume", folder, *flags), re.escape(message))
    assert (config_of(folder), metrics(folder)) == before


def extended(result, *, steps: int, trained: int, before: float, at: int, reached: int) -> bool:
    after = 0.002 * warmup_cosine(reached, steps=steps, warmup_steps=steps // 20)
    told = (
        f"the run is to have {steps} steps, not {trained}: its schedule is the one of {steps} "
        f"steps from here on, and the rate goes from {before:.3g} at step {at} to {after:.3g} at "
        f"step {reached + 1}"
    )
    return told in result.output


def test_number_of_steps_may_change_and_the_change_of_the_rate_is_told(tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    last = metrics(folder)[-2]["lr"]
    longer = run("--resume", folder, "--steps", "8")
    assert longer.exit_code == 0, longer.output
    assert extended(longer, steps=8, trained=5, before=last, at=5, reached=5)
    lines = [line for line in metrics(folder) if "lr" in line]
    assert [line["step"] for line in lines] == [2, 3, 4, 5, 6, 8]
    for line in lines[4:]:
        assert line["lr"] == 0.002 * warmup_cosine(line["step"] - 1, steps=8, warmup_steps=0)
    # From here on it is a run of eight steps, of which nothing is told.
    again = run("--resume", folder)
    assert again.exit_code == 0, again.output
    assert "the run is to have" not in again.output
    assert RunFolder(folder).load_checkpoint()["choices"]["steps"] == 8


def test_run_that_was_killed_as_its_number_of_steps_changed_goes_on(tmp_path, whole):
    """Its config has the new number, and its checkpoint the old."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    RunFolder(folder).write_config(config_of(folder) | {"steps": 8})
    resumed = run("--resume", folder)
    assert resumed.exit_code == 0, resumed.output
    assert "the run is to have 8 steps, not 5" in resumed.output
    assert RunFolder(folder).load_checkpoint()["step"] == 8


def test_run_of_before_with_one_checkpoint_file_resumes(tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        at_batch(patch, 6, send(signal.SIGTERM, signal.SIGINT))
        assert run(*TINY, "--out", tmp_path).exit_code == 130
    torch.save(RunFolder(tmp_path).load_checkpoint(), tmp_path / "checkpoint.pt")
    shutil.rmtree(tmp_path / "checkpoints")
    resumed = run("--resume", tmp_path)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, tmp_path)
    assert_same_metrics(whole, tmp_path)


def test_time_between_checkpoints_reaches_the_run(tmp_path, monkeypatch):
    """Of which no two looks at the clock are less than a minute apart."""
    seconds = itertools.count(step=60.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    assert run(*TINY, "--checkpoint-every", "1m", "--keep", "9", "--out", tmp_path).exit_code == 0
    assert len(RunFolder(tmp_path).checkpoints.files()) == 5


def stress(*arguments: object) -> subprocess.CompletedProcess:
    """In a process that has forked nothing and computed nothing yet."""
    tests = Path(__file__).parent
    command = [sys.executable, "-m", f"{tests.name}.stress", *map(str, arguments)]
    return subprocess.run(command, cwd=tests.parent, capture_output=True, text=True)


def test_a_run_that_is_killed_in_a_write_ends_as_one(tmp_path):
    out = tmp_path / "stops.csv"
    flags = ["--trials", 1, "--models", "transformer-np", "--stops", "kill-in-write"]
    done = stress(*flags, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("model", ["transformer-np", "titan-mac", "hybrid"])
def test_twenty_runs_of_each_kind_end_as_one(model, processes):
    done = stress("--models", model, "--processes", processes)
    assert done.returncode == 0, done.stdout + done.stderr
