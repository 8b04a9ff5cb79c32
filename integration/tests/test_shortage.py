"""Memory that runs out ends a run in a sentence, and leaves what there was before."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import typer
from fusewright_models.cli import app, commands
from fusewright_models.cli.titan_mac import TitanMACRun
from fusewright_models.data import Digits
from fusewright_models.training import OutOfMemory, Processes, RunFolder, adamw
from fusewright_models.training import trainer as training_loop
from fusewright_models.training.checkpoints import Checkpoints
from fusewright_models.training.shortage import asked_for
from rich.console import Console

from .commands import assert_same_metrics, invoke, leave_out_pictures, metrics
from .test_training import CONFIG, Normal, linear_trainer, regression_loss
from .trainers import assert_same_bits, quiet_trainer

pytestmark = pytest.mark.usefixtures("without_pictures")
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.20 GiB is free."
)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(CUDA), "tried to allocate 2.50 GiB"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4398046511104 bytes. Error code 12"),
            "tried to allocate 4398046511104 bytes",
        ),
        (MemoryError(), "no more fits"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (KeyboardInterrupt(), None),
    ],
    ids=["cuda", "cpu", "python", "other", "interrupt"],
)  # fmt: skip
def test_memory_that_ran_out_is_told_from_other_errors(error, asked):
    assert asked_for(error) == asked


def test_torch_tells_of_memory_on_a_cpu_as_is_expected():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert asked_for(raised.value) == f"tried to allocate {2**52} bytes"


class Counting(torch.nn.Linear):
    """A layer that counts its passes, in what a checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__(2, 1, bias=False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes.add_(1.0)
        return super().forward(x)


def counting_trainer(path, fails=None, **changes):
    """Whose memory runs out in the last batch of a step."""
    torch.manual_seed(0)
    model = Counting()

    def loss(model, batch):
        found = regression_loss(model, batch)
        if trainer.step + 1 == fails and model.passes == 2 * fails:
            raise torch.OutOfMemoryError(CUDA)
        return found

    config = replace(CONFIG, accumulation_steps=2, **changes)
    optimizer = adamw(model, lr=0.1, weight_decay=0.01)
    trainer = quiet_trainer(path, model, Normal(), loss, optimizer, config)
    return trainer


@pytest.mark.parametrize("step", [1, 4, 7])
def test_memory_that_runs_out_in_a_step_leaves_the_state_before_it(tmp_path, step):
    whole = counting_trainer(tmp_path / "whole")
    whole.run()
    stopped = counting_trainer(tmp_path / "parts", fails=step)
    told = f"out of memory in step {step}, with batches of 4 in fp32: tried to allocate 2.50 GiB"
    with pytest.raises(OutOfMemory, match=re.escape(told)) as raised:
        stopped.run()
    assert raised.value.saved
    assert RunFolder(tmp_path / "parts").load_checkpoint()["step"] == step - 1
    rest = counting_trainer(tmp_path / "parts")
    rest.resume()
    rest.run()
    assert_same_bits(whole, rest)
    assert torch.equal(whole.model.passes, rest.model.passes)


def test_memory_that_runs_out_as_the_optimizer_moves_leaves_the_last_checkpoint(tmp_path):
    trainer = counting_trainer(tmp_path, checkpoint_every=3)
    step = trainer.optimizer.step

    def short(*given):
        if trainer.step == 4:
            raise torch.OutOfMemoryError(CUDA)
        return step(*given)

    trainer.optimizer.step = short
    with pytest.raises(OutOfMemory, match="in step 5") as raised:
        trainer.run()
    assert not raised.value.saved
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 3


def test_memory_that_runs_out_in_an_evaluation_leaves_the_step_before_it(tmp_path):
    def trained(path, *, short):
        def evaluation():
            if short and trainer.step == 6:
                raise torch.OutOfMemoryError(CUDA)
            return {"score": 1.0}

        trainer = linear_trainer(path, evaluate=evaluation)
        return trainer

    with pytest.raises(OutOfMemory, match="in the evaluation after step 6") as raised:
        trained(tmp_path / "parts", short=True).run()
    assert raised.value.saved
    rest = trained(tmp_path / "parts", short=False)
    rest.resume()
    rest.run()
    trained(tmp_path / "whole", short=False).run()
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("where", ["copy", "write"])
def test_memory_that_runs_out_for_the_checkpoint_too_leaves_the_last_one(
    tmp_path, monkeypatch, where
):
    trainer = counting_trainer(tmp_path, fails=5, checkpoint_every=3)

    def short(*given, **asked):
        raise MemoryError

    save = trainer._save

    def saving(**other):
        if other:
            owner = (training_loop, "on_host") if where == "copy" else (Checkpoints, "save")
            monkeypatch.setattr(*owner, short)
        save(**other)

    trainer._save = saving
    with pytest.raises(OutOfMemory, match="in step 5, with batches of 4 in fp32") as raised:
        trainer.run()
    assert not raised.value.saved
    assert RunFolder(tmp_path).load_checkpoint()["step"] == 3


def test_process_that_is_not_the_first_tells_of_its_memory(tmp_path, capsys):
    """The first one waits for it, and has nothing to tell."""
    processes = Processes()
    processes.rank, processes.count = 1, 2

    def short(**given):
        raise OutOfMemory("out of memory in step 3", saved=False)

    console = Console(quiet=not processes.is_main)
    trainer = SimpleNamespace(console=console, processes=processes, step=2, run=short)
    run = TitanMACRun.from_flags({"device": "cpu"})
    with pytest.raises(typer.Exit) as raised:
        commands.train(trainer, run, RunFolder(tmp_path), resumed=False)
    assert raised.value.exit_code == 1
    told = "process 1 stopped: out of memory in step 3; no checkpoint yet; --checkpointing block"
    assert told in capsys.readouterr().out


def test_program_says_what_did_not_fit_and_what_needs_less(tmp_path, monkeypatch):
    sample, seen = Digits.sample, []

    def short(self, batch):
        seen.append(batch)
        # One is of the evaluation.
        if len(seen) == 4:
            raise torch.OutOfMemoryError(CUDA)
        return sample(self, batch)

    flags = ["--preset", "tiny", "--steps", "5", "--log-every", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(Digits, "sample", short)
        result = invoke(app, "transformer-np", *flags, "--out", tmp_path)
    assert result.exit_code == 1
    told = (
        "stopped: out of memory in step 3, with batches of 8 in fp32: tried to allocate 2.50 GiB; "
        "step 2 is saved; --checkpointing block needs less, and another run with a smaller "
        "--batch-size and more --gradient-accumulation-steps does; continue with: fusewright-train"
    )
    assert told in result.output
    assert "Traceback" not in result.output
    assert invoke(app, "transformer-np", "--resume", tmp_path).exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        out = tmp_path / "whole"
        assert invoke(app, "transformer-np", *flags, "--out", out).exit_code == 0
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1, 2, 3, 4, 5, 5]
    assert_same_metrics(tmp_path / "whole", tmp_path)
