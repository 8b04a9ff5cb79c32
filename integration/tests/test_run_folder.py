"""What a run leaves on the disk, whatever stops the program or the machine."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch
from filelock import FileLock
from fusewright_models.training import NotWritten, RunFolder, StopSignals, TrainingConfig
from fusewright_models.training import trainer as trainer_module
from fusewright_models.training.config import interval

from .commands import metrics
from .test_training import CONFIG, linear_trainer
from .trainers import assert_same_bits, assert_same_state

pytestmark = pytest.mark.usefixtures("without_pictures")
LINE = {"step": 1, "loss": 0.5}


class Killed(BaseException):
    """What no program survives."""


@contextmanager
def full_disk(room: int):
    """No file grows past so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_config(folder: RunFolder) -> None:
    folder.write_config({"model": "other"})


def drop_metrics(folder: RunFolder) -> None:
    folder.forget_metrics(after=0)


def save_checkpoint(folder: RunFolder) -> None:
    folder.save_checkpoint({"step": 2, "x": torch.ones(3)})


def state_of(folder: RunFolder) -> tuple:
    """Config, metrics and the step of the newest checkpoint, read as a resumed run reads them."""
    return folder.read_config(), folder.read_metrics(), folder.load_checkpoint()["step"]


def filled(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.write_config({"model": "linear"})
    folder.append_metrics({"step": 0})
    folder.append_metrics(LINE)
    folder.save_checkpoint({"step": 1, "x": torch.zeros(3)})
    return folder


@pytest.mark.parametrize("change", [write_config, drop_metrics, save_checkpoint])
def test_killed_write_leaves_what_was_there_or_what_was_to_be(tmp_path, monkeypatch, change):
    """Before each call that reaches the disk or a name, in turn."""
    calls, names = 0, ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir")
    folder = filled(tmp_path / "whole")
    before = state_of(folder)
    change(folder)
    after = state_of(folder)
    assert before != after

    def killing(call, at):
        def killed(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            return call(*arguments, **options)

        return killed

    seen = set()
    for at in range(1, 100):
        folder, calls = filled(tmp_path / str(at)), 0
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, killing(getattr(os, name), at))
            try:
                change(folder)
            except Killed:
                pass
            else:
                break
        found = state_of(folder)
        assert found in (before, after)
        seen.add(found == after)
        # Neither is the next write in the way of what was left.
        change(folder)
        assert state_of(folder) == after
        assert not [*(tmp_path / str(at)).rglob("*.partial")]
    assert seen == {False, True}


@pytest.mark.parametrize("change", [write_config, drop_metrics, save_checkpoint])
def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path, monkeypatch, change
):
    folder, order = filled(tmp_path), []

    def noted(name, what):
        call = getattr(os, name)

        def noting(*arguments):
            order.append((name, what(arguments)))
            return call(*arguments)

        monkeypatch.setattr(os, name, noting)

    noted("fsync", lambda given: Path(os.readlink(f"/proc/self/fd/{given[0]}")))
    for name in ("replace", "rename"):
        noted(name, lambda given: tuple(map(Path, given)))
    change(folder)
    synced = [place for place, (name, _) in enumerate(order) if name == "fsync"]
    renamed = [(place, *what) for place, (name, what) in enumerate(order) if name != "fsync"]
    # Those of what is dropped or replaced are of no content.
    renamed = [each for each in renamed if each[1].name.endswith(".partial")]
    assert renamed
    for place, partial, file in renamed:
        before = {order[each][1] for each in synced if each < place}
        within = [partial / each.name for each in file.iterdir()] if file.is_dir() else []
        # Files of a folder may have had names of their own until they were renamed in it.
        assert {partial, *within} <= before | {new for _, old, new in renamed if old in before}
        assert any(order[each][1] == file.parent for each in synced if each > place)
    if change is save_checkpoint:
        # Metrics that the checkpoint is of.
        assert folder.metrics_file in before


@pytest.mark.parametrize("change", [write_config, drop_metrics, save_checkpoint])
def test_full_disk_is_told_by_the_file_that_was_not_written(tmp_path, change):
    folder = filled(tmp_path)
    before = state_of(folder)
    with full_disk(8), pytest.raises(NotWritten, match=r"could not write .*/[a-z0-9.-]+: File too"):
        change(folder)
    assert state_of(folder) == before
    # Nothing is left that would keep it full.
    assert not [*tmp_path.rglob("*.partial")]


def test_line_that_a_full_disk_tore_is_dropped(tmp_path):
    folder = filled(tmp_path)
    with full_disk(folder.metrics_file.stat().st_size + 5), pytest.raises(NotWritten):
        folder.append_metrics({"step": 2, "loss": 0.25})
    told = []
    assert folder.forget_metrics(after=2, say=told.append) == [{"step": 0}, LINE]
    assert told == [f"dropped the last line of {folder.metrics_file}, torn: b'{{\"ste'"]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 2, "lo',
        b"{",
        b"\0",
        b"\0" * 4096,
        b'{"step": 2, "loss"\0\0\0\n\0\0',
        b"\0\0\n",
        b"\xff\xfe\xfa",
        '{"step": 2, "a": "é"}'.encode()[:-3],
        b"2",
    ],
)
def test_torn_end_of_the_metrics_is_dropped_and_told_once(tmp_path, torn):
    folder = filled(tmp_path)
    folder.metrics_file.write_bytes(folder.metrics_file.read_bytes() + torn)
    assert folder.read_metrics() == [{"step": 0}, LINE]
    told = []
    for _ in range(2):
        assert folder.forget_metrics(after=9, say=told.append) == [{"step": 0}, LINE]
    (told,) = told
    assert told.startswith(f"dropped the last line of {folder.metrics_file}, torn: b")
    assert len(told) < len(str(folder.metrics_file)) + 400
    assert metrics(tmp_path) == [{"step": 0}, LINE]


def test_whole_line_without_its_end_is_kept_and_what_follows_is_a_line_of_its_own(tmp_path):
    folder = filled(tmp_path)
    folder.metrics_file.write_bytes(folder.metrics_file.read_bytes().rstrip())
    assert folder.forget_metrics(after=9) == [{"step": 0}, LINE]
    folder.append_metrics({"step": 2})
    assert metrics(tmp_path) == [{"step": 0}, LINE, {"step": 2}]


def step_of(file: Path) -> str:
    return file.parent.name


def stop_after(trainer, step: int) -> Callable[[], bool]:
    return lambda: trainer.step >= step


@pytest.mark.parametrize("step", range(12))
def test_run_that_is_stopped_after_any_step_resumes_to_the_bits_and_lines_of_one(tmp_path, step):
    def make(name):
        return linear_trainer(
            tmp_path / name, replace(CONFIG, log_every=5), evaluate=lambda: {"score": 1.0}
        )

    whole, parts = make("whole"), make("parts")
    whole.run()
    parts.run(stop=stop_after(parts, step))
    assert parts.step == step
    assert RunFolder(tmp_path / "parts").load_checkpoint()["step"] == step
    # Of a run that is stopped before it begins nothing is evaluated.
    assert parts.folder.metrics_file.exists() == (step > 0)
    rest = make("parts")
    rest.resume()
    rest.run()
    assert_same_bits(whole, rest)
    assert_same_state(whole, rest)


def test_run_that_is_stopped_where_it_is_not_finite_keeps_the_checkpoint_of_before(tmp_path):
    trainer = linear_trainer(tmp_path, replace(CONFIG, log_every=5))
    trainer.run(until=6)
    plain = trainer.stepper.loss_function
    trainer.stepper.loss_function = lambda model, batch: plain(model, batch) * float("nan")
    with pytest.raises(FloatingPointError, match="gradient norm over steps 7 to 7: not finite"):
        trainer.run(stop=stop_after(trainer, 7))
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 6


def test_resumed_run_that_is_not_finite_names_the_steps_since_the_last_log_point(tmp_path):
    config = replace(CONFIG, log_every=5)
    parts = linear_trainer(tmp_path, config)
    parts.run(stop=stop_after(parts, 8))
    rest = linear_trainer(tmp_path, config)
    rest.resume()
    plain = rest.stepper.loss_function
    rest.stepper.loss_function = lambda model, batch: plain(model, batch) * float("nan")
    with pytest.raises(FloatingPointError, match="on average over steps 7 to 10: not finite"):
        rest.run()


@pytest.mark.parametrize(
    ("every", "keep", "steps"),
    [(None, 9, [12, 6]), (5, 9, [12, 10, 5]), (5, 2, [12, 10]), (1, 3, [12, 11, 10])],
)
def test_checkpoints_are_apart_from_evaluations(tmp_path, every, keep, steps):
    config = replace(CONFIG, checkpoint_every=every, keep=keep)
    whole, parts = linear_trainer(tmp_path / "whole"), linear_trainer(tmp_path / "parts", config)
    for trainer in (whole, parts):
        trainer.run()
    files = parts.folder.checkpoints.files()
    assert [step_of(file) for file in files] == [f"step-{step:06d}" for step in steps]
    assert_same_bits(whole, parts)


def test_checkpoints_are_saved_by_the_clock(tmp_path, monkeypatch):
    """Of which each step takes a minute."""
    config = replace(CONFIG, checkpoint_every=timedelta(minutes=5), keep=9)
    trainer = linear_trainer(tmp_path, config)
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: 60.0 * trainer.step)
    trainer.run()
    files = trainer.folder.checkpoints.files()
    assert [step_of(file) for file in files] == ["step-000012", "step-000010", "step-000005"]


@pytest.mark.parametrize(
    ("text", "wanted"), [("500", 500), ("10m", timedelta(minutes=10)), ("1", 1)]
)
def test_intervals_are_steps_or_minutes(text, wanted):
    assert interval(text) == wanted
    assert replace(CONFIG, checkpoint_every=wanted).checkpoint_every == wanted


@pytest.mark.parametrize("text", ["0", "0m", "", "m", "-5", "1.5m", "10 m", "10s"])
def test_other_intervals_are_refused(text):
    with pytest.raises(ValueError, match="checkpoint_every must be a number of steps such as 500"):
        interval(text)


@pytest.mark.parametrize(("field", "value"), [("keep", 0), ("checkpoint_every", 0)])
def test_impossible_checkpoints_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be at least 1; got 0"):
        TrainingConfig(steps=1, batch_size=1, **{field: value})


def test_checkpoint_is_of_the_step_that_it_was_asked_at(tmp_path, monkeypatch):
    """It is written while training goes on."""
    trainer = linear_trainer(tmp_path, replace(CONFIG, checkpoint_every=5, keep=9))
    other = linear_trainer(tmp_path / "other")
    other.run(until=5)
    save = RunFolder.save_checkpoint

    def late(self, state, **options):
        while state["step"] == 5 and trainer.step < 8:
            time.sleep(0.001)
        save(self, state, **options)

    monkeypatch.setattr(RunFolder, "save_checkpoint", late)
    trainer.run()
    state = torch.load(tmp_path / "checkpoints/step-000005/state.pt", weights_only=True)
    assert torch.equal(state["model"]["weight"], other.model.weight)


def test_checkpoints_are_no_part_of_the_seconds_of_a_line(tmp_path, monkeypatch):
    trainer = linear_trainer(tmp_path, replace(CONFIG, checkpoint_every=5))
    save = trainer.save
    monkeypatch.setattr(trainer, "save", lambda: (time.sleep(0.5), save()))
    trainer.run(until=6)
    assert all(line["seconds"] < 0.5 for line in metrics(tmp_path))


def test_checkpoint_that_cannot_be_written_ends_the_run(tmp_path):
    """At the latest with its end, and those of before stand."""
    trainer = linear_trainer(tmp_path, replace(CONFIG, checkpoint_every=5))
    trainer.run(until=5)
    with full_disk(2000), pytest.raises(NotWritten, match=r"state\.pt: File too large"):
        trainer.run()
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 5


def test_second_program_is_refused_by_the_lock(tmp_path):
    with RunFolder(tmp_path).locked():
        locked = RunFolder(tmp_path).locked()
        with pytest.raises(RuntimeError, match=r"no other program trains into; one holds .*\.lock"):
            locked.__enter__()
    with RunFolder(tmp_path).locked():
        pass


def test_folder_that_cannot_be_locked_is_trained_into_and_told(tmp_path, monkeypatch):
    """As on file systems of clusters."""

    def acquire(self, timeout):
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", acquire)
    told = rf"{tmp_path}/run\.lock cannot be locked, and another program not kept out"
    with pytest.warns(UserWarning, match=told), RunFolder(tmp_path).locked():
        RunFolder(tmp_path).write_config({})


def test_config_that_cannot_be_read_says_what_to_do(tmp_path):
    folder = filled(tmp_path)
    for content in (b"", b'{"model": "li', b"\0\0\0"):
        folder.config_file.write_bytes(content)
        with pytest.raises(ValueError, match="; restore it from a copy, or begin the run again in"):
            folder.read_config()


def test_signals_outside_the_main_thread_are_left_alone():
    entered = []
    thread = Thread(target=lambda: entered.append(StopSignals().__enter__().before))
    thread.start()
    thread.join()
    assert entered == [{}]


def test_saving_by_hand_waits_for_the_disk(tmp_path):
    trainer = linear_trainer(tmp_path)
    trainer.run(until=1)
    trainer.save()
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 1
