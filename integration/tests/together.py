"""Commands in several processes, each told what torchrun would tell it, beside those of one.

All are in fp64: what differs is the order of sums, and nothing grows out of it in a few steps.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from fusewright_models.cli import text, transformer_np
from fusewright_models.training import Trainer, checkpoints
from fusewright_testkit.fresh import run_python
from torch.distributed import TCPStore

# What one process runs.
PROGRAM = """
import json, os, sys
import pytest, torch
sys.path.insert(0, {tests!r})
from commands import invoke, leave_out_pictures, train_at
from fusewright_models.cli import app
from fusewright_models.training import RunFolder, checkpoints, trainer
from fusewright_models.training.checkpoints import Checkpoints
from stood import stand_for_captures
from together import compute_in_fp64, lose, signal_in, stop_at

def refused(*given):
    raise AssertionError("a second process wrote")

torch.set_num_threads(1)
patch = pytest.MonkeyPatch()
leave_out_pictures(patch)
compute_in_fp64(patch)
told = dict(RANK={rank}, WORLD_SIZE={count}, MASTER_ADDR="127.0.0.1")
told |= dict(LOCAL_RANK={rank} % {of_host}, LOCAL_WORLD_SIZE={of_host})
os.environ |= dict((name, str(value)) for name, value in told.items())
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
if {rank}:
    for name in ("write", "append_metrics", "forget_metrics", "save_checkpoint", "draw"):
        setattr(RunFolder, name, refused)
    Checkpoints.set_aside = refused
    trainer.plot_loss = refused
results = []
for arguments, until, signalled, lost, replayed, rate, port in {commands}:
    os.environ["MASTER_PORT"] = str(port)
    with patch.context() as stopping:
        stop_at(until, stopping)
        if replayed:
            stand_for_captures(stopping)
        if rate is not None:
            train_at(stopping, rate)
        if {rank} == {count} - 1:
            signal_in(signalled, stopping)
            lose(lost, stopping)
        result = invoke(app, *arguments)
    results.append((result.exit_code, result.output + str(result.exception or "")))
    # A run that has failed leaves it to the end of its program.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
print(json.dumps(results))
"""


class Command(NamedTuple):
    """Arguments of fusewright-train.

    Attributes:
        until: the step that the run is left at; None goes to its end.
        signalled: the step in which the last process receives SIGTERM.
        lost: a checkpoint, by a part of its path, that the last process cannot read.
        replayed: whether steps are taken as those of CUDA graphs are, in the same memory.
        rate: what all train with, whatever the arguments say.
    """

    arguments: Sequence[object]
    until: int | None = None
    signalled: int | None = None
    lost: str | None = None
    replayed: bool = False
    rate: float | None = None


def run_together(
    commands: Sequence[Command], *, hosts: int = 1, of_host: int = 2
) -> list[list[tuple[int, str]]]:
    """Of each of several processes, which run the commands one after another, the exit codes and
    outputs; all are on this host, whatever they are told.
    """
    count = hosts * of_host
    # Where they meet: a group of processes for each command.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in commands]
    told = [
        ([*map(str, command.arguments)], *command[1:], store.port)
        for command, store in zip(commands, stores, strict=True)
    ]
    tests = str(Path(__file__).parent)
    programs = [
        PROGRAM.format(tests=tests, rank=rank, count=count, of_host=of_host, commands=told)
        for rank in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        return [json.loads(out.splitlines()[-1]) for out in pool.map(run_python, programs)]


def compute_in_fp64(patch: pytest.MonkeyPatch) -> None:
    for kind in (transformer_np.TransformerNPRun, text.TextRun):
        patch.setattr(
            kind,
            "model",
            lambda run, *given, make=kind.model, **of: make(run, *given, **of).double(),
        )
    # A HybridLM in fp64 continues no text.
    patch.setattr(text, "continued", lambda *given, **options: b"")


def stop_at(until: int | None, patch: pytest.MonkeyPatch) -> None:
    """Runs are left at that step."""
    run = Trainer.run
    patch.setattr(Trainer, "run", lambda trainer, **stop: run(trainer, until, **stop))


def lose(part: str | None, patch: pytest.MonkeyPatch) -> None:
    """Checkpoints with that in their paths are damaged for this process."""
    read = checkpoints._read

    def unread(path):
        if part is not None and part in str(path):
            raise checkpoints.Damaged(f"wanted a checkpoint in {path}; got a damaged file")
        return read(path)

    patch.setattr(checkpoints, "_read", unread)


def signal_in(step: int | None, patch: pytest.MonkeyPatch) -> None:
    """This process receives SIGTERM in that step."""
    take = Trainer._take_step

    def take_step(trainer):
        take(trainer)
        if trainer.step == step:
            signal.raise_signal(signal.SIGTERM)

    patch.setattr(Trainer, "_take_step", take_step)
