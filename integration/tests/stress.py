"""Stops runs at random moments, resumes them, and compares them with one that nothing stopped.

    python -m tests.stress --trials 20 --processes 1 --out FILE.csv

in the folder of this distribution, with the sources on the import path. A run is a process of its
own, or several, forked from this one for its imports. It is stopped, resumed and mostly stopped
again, then resumed to its end: by a signal at a random moment, or by SIGKILL at a random one of the
calls by which files reach the disk or get their names, those of checkpoints, of the config and of
the metrics that a resumed run rewrites. Of several processes Ctrl-C reaches all, another signal a
random one, and the calls are those of the first; when one has failed the others are sent SIGTERM,
as by torchrun.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.cli import text as cli_text
from fusewright_models.training import RunFolder
from torch.utils import _pytree as pytree

from .commands import leave_out_pictures, untimed_metrics, written_text

EVERY = ["--log-every", "2", "--eval-every", "8", "--checkpoint-every", "3"]
FLAGS = {
    "transformer-np": ["--steps", "20"],
    "titan-mac": ["--steps", "20"],
    "hybrid": ["--steps", "20", "--backend", "reference"],
}
# For how long torchrun waits for a process that it has sent SIGTERM.
PATIENCE = 30.0
# By which files reach the disk or get their names.
CALLS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")
STOPS = ("kill", "kill-in-write", "interrupt", "terminate", "interrupt-twice")
SIGNALS = {
    "kill": [signal.SIGKILL],
    "interrupt": [signal.SIGINT],
    "terminate": [signal.SIGTERM],
    "interrupt-twice": [signal.SIGINT, signal.SIGINT],
}


class Whole(NamedTuple):
    """A run that nothing stopped.

    Attributes:
        seconds: that it took.
        calls: how many of ``CALLS`` it made, or its first process.
        processes: how many ran it.
    """

    folder: Path
    seconds: float
    calls: int
    processes: int


def forked(
    arguments: list[str], processes: int, prepare: Callable[[], None] = lambda: None
) -> list[int]:
    """The numbers of the processes that run the program, quietly; the first one prepares."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            # What a shell starts in the background ignores it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            if processes > 1:
                told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                told |= {"RANK": rank, "LOCAL_RANK": rank}
                told |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                os.environ.update({name: str(value) for name, value in told.items()})
            if rank == 0:
                prepare()
            app(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        finally:
            os._exit(code)
    return children


def code_of(children: list[int]) -> int:
    """How the processes ended: 0, or what the first to fail ended with, a signal as minus its
    number.
    """
    left, failed, deadline = set(children), 0, 0.0
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            if failed and time.monotonic() > deadline:
                send(left, signal.SIGKILL)
            time.sleep(0.005)
            continue
        left.discard(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed, deadline = code, time.monotonic() + PATIENCE
            send(left, signal.SIGTERM)
    return failed


def send(children: Collection[int], number: int) -> None:
    """Not waited for yet, they are there even where they have ended."""
    for child in children:
        os.kill(child, number)


def at_call(number: int, what: Callable[[], None]) -> None:
    """Do something before one of ``CALLS``."""
    made = 0

    def counting(call):
        def counted(*arguments, **options):
            nonlocal made
            made += 1
            if made == number:
                what()
            return call(*arguments, **options)

        return counted

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def begun(model: str, folder: Path, flags: list[str]) -> list[str]:
    """The command line that begins a run or takes it up."""
    if (folder / "config.json").exists():
        return [model, "--resume", str(folder)]
    return [model, "--preset", "tiny", *FLAGS[model], *EVERY, *flags, "--out", str(folder)]


def uninterrupted(model: str, folder: Path, flags: list[str], processes: int) -> Whole:
    """Raises:
    RuntimeError: it does not reach its end.
    """
    before = time.perf_counter()
    counter = folder.with_suffix(".calls")

    def count() -> None:
        descriptor = os.open(counter, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for name in CALLS:
            call = getattr(os, name)

            def counted(*arguments, call=call, **options):
                os.write(descriptor, b".")
                return call(*arguments, **options)

            setattr(os, name, counted)

    code = code_of(forked(begun(model, folder, flags), processes, count))
    if code:
        raise RuntimeError(f"wanted a run of {model} that reaches its end; got exit code {code}")
    return Whole(folder, time.perf_counter() - before, counter.stat().st_size, processes)


def stopped(arguments: list[str], stop: str, whole: Whole, draw: random.Random) -> bool:
    """Whether the run was stopped before its end."""
    if stop == "kill-in-write":
        number = draw.randint(1, whole.calls)
        return code_of(forked(arguments, whole.processes, lambda: at_call(number, die))) != 0
    children = forked(arguments, whole.processes)
    told = children if stop.startswith("interrupt") else [draw.choice(children)]
    for number in SIGNALS[stop]:
        time.sleep(draw.uniform(0.0, whole.seconds / len(SIGNALS[stop])))
        send(told, number)
    return code_of(children) != 0


def state(folder: Path) -> list:
    """Of the last checkpoint, tensors as their bytes."""
    leaves = pytree.tree_leaves(RunFolder(folder).load_checkpoint())
    return [x.numpy().tobytes() if isinstance(x, torch.Tensor) else x for x in leaves]


def trial(model: str, stop: str, whole: Whole, flags: list[str], draw: random.Random) -> dict:
    """One run that is stopped once or twice, and how it ended."""
    folder, stops = whole.folder.with_name("stopped"), 0
    # One that ended before its stop shows nothing.
    while not stops:
        shutil.rmtree(folder, ignore_errors=True)
        stops = sum(stopped(begun(model, folder, flags), stop, whole, draw) for _ in range(2))
    code = code_of(forked(begun(model, folder, flags), whole.processes))
    found = {"stops": stops, "resumed": code == 0, "same_bits": False, "same_metrics": False}
    if code == 0:
        found["same_bits"] = state(folder) == state(whole.folder)
        found["same_metrics"] = untimed_metrics(folder) == untimed_metrics(whole.folder)
    return found


def trials(
    models: list[str], stops: list[str], count: int, seed: int, processes: int
) -> list[dict]:
    """A row for each model and way of stopping it."""
    rows, draw = [], random.Random(seed)
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        patch.setattr(cli_text, "PROMPT_TOKENS", 8)
        patch.setattr(cli_text, "SAMPLE_TOKENS", 8)
        text = written_text(Path(made))
        for model in models:
            flags = [] if model == "transformer-np" else ["--dataset", str(text)]
            flags += ["--parallel", "ddp"] if processes > 1 else []
            whole = uninterrupted(model, Path(made, model), flags, processes)
            for stop in stops:
                found = [trial(model, stop, whole, flags, draw) for _ in range(count)]
                sums = {name: sum(each[name] for each in found) for name in found[0]}
                row = {"model": model, "processes": processes, "stop": stop, "runs": count}
                rows.append(row | sums)
                print(*rows[-1].values(), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=FLAGS, default=[*FLAGS])
    parser.add_argument("--stops", nargs="+", choices=STOPS, default=[*STOPS])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = trials(asked.models, asked.stops, asked.trials, asked.seed, asked.processes)
    if asked.out is not None:
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    equal = all(
        row[name] == row["runs"]
        for row in rows
        for name in ("resumed", "same_bits", "same_metrics")
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
