"""What a checkpoint on the disk is held to as it is read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from fusewright_models.training import RunFolder
from fusewright_models.training.checkpoints import on_host

from .commands import state_file
from .test_run_folder import filled, step_of
from .test_training import linear_trainer
from .trainers import assert_same_bits, assert_same_state

pytestmark = pytest.mark.usefixtures("without_pictures")


def flipped(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_flipped_bit_is_found(tmp_path, name):
    """Each of the manifest, and a few hundred of the state."""
    folder = filled(tmp_path)
    file = state_file(tmp_path).with_name(name)
    bits = 8 * file.stat().st_size
    found = 0
    for bit in range(0, bits, 1 + bits // 600):
        flipped(file, bit)
        try:
            state = folder.load_checkpoint()
        except ValueError as error:
            found += "got a damaged file: " in str(error)
        else:
            # White space of JSON.
            assert name == "manifest.json"
            assert state["step"] == 1
            assert torch.equal(state["x"], torch.zeros(3))
        flipped(file, bit)
    tried = len(range(0, bits, 1 + bits // 600))
    assert found == tried if name == "state.pt" else found > 0.9 * tried
    assert folder.load_checkpoint()["step"] == 1


class Calling:
    """What a pickle calls as it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_loading_a_checkpoint_executes_nothing(tmp_path):
    folder = filled(tmp_path)
    folder.save_checkpoint({"step": 3, "x": Calling(tmp_path / "called")}, keep=1)
    with pytest.raises(ValueError, match="got a damaged file"):
        folder.load_checkpoint()
    assert not (tmp_path / "called").exists()


def test_last_checkpoints_stay_and_that_of_before_counts_as_the_oldest(tmp_path):
    folder = RunFolder(tmp_path)
    torch.save({"step": 7}, tmp_path / "checkpoint.pt")
    assert folder.load_checkpoint() == {"step": 7}
    for step in (8, 999_999, 1_000_000):
        folder.save_checkpoint({"step": step}, keep=2)
        assert folder.load_checkpoint() == {"step": step}
    steps = [step_of(file) for file in folder.checkpoints.files()]
    assert steps == ["step-1000000", "step-999999"]
    assert not (tmp_path / "checkpoint.pt").exists()


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = RunFolder(tmp_path)
    for number in range(2):
        folder.save_checkpoint({"step": 4, "number": number}, keep=1)
    assert folder.load_checkpoint()["number"] == 1
    assert len(folder.checkpoints.files()) == 1


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda file: flipped(file, 4000), "its SHA-256 is "),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "its size is "),
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.with_name("manifest.json").unlink(), "No such file"),
        (lambda file: file.with_name("manifest.json").write_text("[]"), "has no digest of it"),
        (lambda file: file.parent.rename(file.parents[1] / "step-000013"), "its step is 13, "),
    ],
    ids=["bit", "cut", "gone", "no-manifest", "list", "renamed"],
)
def test_one_before_a_damaged_checkpoint_is_taken_and_told(tmp_path, damage, what):
    whole = linear_trainer(tmp_path / "whole")
    whole.run()
    linear_trainer(tmp_path / "parts").run()
    damage(state_file(tmp_path / "parts"))
    rest = linear_trainer(tmp_path / "parts")
    rest.resume()
    assert rest.step == 6
    (told,) = rest.console.file.getvalue().splitlines()
    assert what in told
    assert told.endswith(f"; {state_file(tmp_path / 'parts')} is taken instead")
    # The damaged one is in no one's way.
    assert [*(tmp_path / "parts/checkpoints").glob("*.damaged")]
    rest.run()
    assert_same_bits(whole, rest)
    assert_same_state(whole, rest)


def test_checkpoints_of_damage_alone_are_refused(tmp_path):
    linear_trainer(tmp_path).run()
    for file in RunFolder(tmp_path).checkpoints.files():
        flipped(file, 4000)
    with pytest.raises(ValueError, match=r"step-000012/state\.pt; got a damaged file: its SHA-256"):
        linear_trainer(tmp_path).resume()


def test_copy_on_the_host_shares_what_the_state_shares_and_nothing_with_it():
    layer = torch.nn.Linear(2, 3)
    state = {"a": layer.state_dict(), "b": [layer.weight.detach()[1:], 4], "c": (None, "text")}
    copied = on_host(state)
    assert copied["a"]._metadata == state["a"]._metadata
    assert copied["c"] == state["c"]
    copied["a"]["weight"].zero_()
    assert torch.equal(copied["b"][0], torch.zeros(2, 2))
    assert layer.weight.count_nonzero() == 6


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_what_cannot_be_read_is_damage_only_where_the_disk_says_so(tmp_path, monkeypatch, number):
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save_checkpoint({"step": step}, keep=2)

    newest, opened = state_file(tmp_path), Path.open

    def open_or_fail(path, *arguments, **options):
        if path == newest:
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_or_fail)
    told = []
    if number == errno.EIO:
        assert folder.checkpoints.load(told.append)[0] == {"step": 1}
        assert len(told) == 1
    else:
        with pytest.raises(PermissionError):
            folder.checkpoints.load(told.append)
        assert told == []


def test_manifest_has_size_and_digest(tmp_path):
    filled(tmp_path)
    content = state_file(tmp_path).read_bytes()
    manifest = json.loads(state_file(tmp_path).with_name("manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    assert manifest == {"step": 1, "bytes": len(content), "sha256": digest}


def test_checkpoint_whose_replacement_was_killed_has_its_name_again(tmp_path, monkeypatch):
    """Of the same step, and the only one that is kept."""
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"step": 1, "which": "first"}, keep=1)
    rename = os.rename

    def killed(source, target):
        if str(target).endswith("step-000001"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.save_checkpoint({"step": 1, "which": "second"}, keep=1)
    monkeypatch.undo()
    assert not folder.holds_a_checkpoint
    folder.checkpoints.restore()
    assert folder.load_checkpoint()["which"] == "first"


def test_checkpoint_that_memory_does_not_hold_is_not_passed_over(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save_checkpoint({"step": step}, keep=2)

    def load(*given, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] not enough memory")

    monkeypatch.setattr(torch, "load", load)
    wanted = r"step-000002/state\.pt; got one that cannot be loaded: \[enforce fail"
    with pytest.raises(ValueError, match=wanted):
        folder.load_checkpoint()
