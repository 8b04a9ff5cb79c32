"""Files that tell what steps do and what holds memory."""

from __future__ import annotations

import errno
import gzip
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.training import RunFolder, memory_history, steps_of

from .commands import assert_refused, assert_same_metrics, flags_of, invoke

pytestmark = pytest.mark.usefixtures("without_pictures")
TINY = ["--preset", "tiny", "--steps", "5", "--log-every", "2", "--eval-every", "5"]


def run(*arguments):
    return invoke(app, "transformer-np", *arguments)


def ranges(folder: Path) -> dict[str, tuple[float, float]]:
    """Begin and end of each step in a trace, by name."""
    with gzip.open(folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [each for each in events if re.fullmatch(r"step \d+", each.get("name", ""))]
    assert all(each["ph"] == "X" and each["dur"] > 0 for each in steps)
    found = {each["name"]: (each["ts"], each["ts"] + each["dur"]) for each in steps}
    assert len(found) == len(steps)
    # What torch has executed lies within the steps, some of it in each.
    for begin, end in found.values():
        within = [e for e in events if e.get("cat") == "cpu_op" and begin <= e["ts"] < end]
        assert any(each["name"].startswith("aten::") for each in within)
    return found


def test_trace_has_a_range_for_each_step_that_was_asked_for(tmp_path):
    result = run(*TINY, "--profile", "2:4", "--out", tmp_path / "traced")
    assert result.exit_code == 0, result.output
    found = ranges(tmp_path / "traced")
    assert [*found] == ["step 2", "step 3", "step 4"]
    bounds = [bound for each in found.values() for bound in each]
    assert bounds == sorted(bounds)
    told = f"the trace is in {tmp_path}/traced/trace.json.gz: open it at https://ui.perfetto.dev"
    assert result.output.count(told) == 1
    # It changes nothing that is trained.
    assert run(*TINY, "--out", tmp_path / "plain").exit_code == 0
    assert_same_metrics(tmp_path / "plain", tmp_path / "traced")


def test_resumed_run_traces_what_is_left_of_the_steps_and_a_stopped_one_what_there_was(
    tmp_path, monkeypatch
):
    from fusewright_models.training import Trainer

    stop = lambda trainer: trainer.step == 2  # noqa: E731
    with monkeypatch.context() as patch:
        train = Trainer.run
        patch.setattr(
            Trainer, "run", lambda trainer, **given: train(trainer, stop=lambda: stop(trainer))
        )
        run(*TINY, "--profile", "2:4", "--out", tmp_path)
    assert [*ranges(tmp_path)] == ["step 2"]
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 2
    assert run("--resume", tmp_path).exit_code == 0
    assert [*ranges(tmp_path)] == ["step 3", "step 4"]


def test_steps_that_were_taken_before_the_run_is_resumed_are_told_to_have_no_trace(tmp_path):
    assert run(*TINY, "--out", tmp_path).exit_code == 0
    result = run("--resume", tmp_path, "--steps", "8", "--profile", "2:4")
    assert result.exit_code == 0, result.output
    told = "no trace of steps 2 to 4 is written: the run goes on from step 6"
    assert result.output.count(told) == 1
    assert not (tmp_path / "trace.json.gz").exists()
    # Nothing is amiss where some are to come.
    result = run("--resume", tmp_path, "--steps", "10", "--profile", "7:9")
    assert "no trace" not in result.output
    assert [*ranges(tmp_path)] == ["step 9"]


def test_trace_that_cannot_be_written_is_told_in_a_sentence(tmp_path, monkeypatch):
    """Where temporary files go there may be less room than in the folder."""

    def full(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    result = run(*TINY, "--profile", "2:4", "--out", tmp_path)
    assert result.exit_code == 1
    told = f"stopped: could not write {tmp_path}/trace.json.gz: No space left on device; no checkp"
    assert told in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "10"], "must be a first step and a last one, such as 10:20; got '10'"),
        (["--profile", "3:2"], "such as 10:20; got '3:2'"),
        (["--profile", "0:2"], "such as 10:20; got '0:2'"),
        (["--profile", "4:6"], "profile must be among the 5 steps of the run; got 4:6"),
        (["--memory-snapshot", "--device", "cpu"], "needs a CUDA device; got --device cpu"),
    ],
    ids=flags_of,
)
def test_what_cannot_be_profiled_is_refused_before_anything_is_written(tmp_path, flags, message):
    result = run(*TINY, *flags, "--out", tmp_path / "run")
    assert_refused(result, re.escape(message), tmp_path)


def test_steps_are_the_first_to_the_last():
    assert steps_of("10:20") == range(10, 21)
    assert steps_of("7:7") == range(7, 8)


def test_memory_is_told_of_whatever_ends_the_training(tmp_path, monkeypatch):
    """By as much of torch as is asked, without a GPU."""
    asked, said = [], []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **how: asked.append(how))
    monkeypatch.setattr(memory, "_snapshot", lambda: {"segments": []})

    def train():
        with memory_history(RunFolder(tmp_path), said.append):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert [[*how] for how in asked] == [["max_entries"], ["enabled"]]
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes()) == {"segments": []}
    assert said == [
        f"the memory is in {tmp_path}/memory.pickle: open it at https://pytorch.org/memory_viz"
    ]


@pytest.mark.gpu
def test_snapshot_of_a_training_opens_in_the_viewer_of_torch(tmp_path):
    from torch.cuda._memory_viz import trace_plot

    flags = ["--device", "cuda", "--memory-snapshot", "--profile", "2:3", "--no-capture"]
    result = run(*TINY, *flags, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    actions = {each["action"] for trace in snapshot["device_traces"] for each in trace}
    assert {"alloc", "free_completed"} <= actions
    assert "<html" in trace_plot(snapshot)
    assert [*ranges(tmp_path)] == ["step 2", "step 3"]
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert any(each.get("cat") == "kernel" for each in events)
