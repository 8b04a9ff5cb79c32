"""What the subcommand does that trains a model once for each combination of its flags' values."""

from __future__ import annotations

import csv
import io
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.table import Table

from ..training import RunFolder, StopSignals
from ..training.files import make_folder, write
from .commands import (
    plain_console,
    read_run,
    results_in,
    said_by,
    usage_errors,
)
from .generate import KINDS
from .options import flag
from .run import NOT_TRAINED, Run
from .settings_file import by_new_names
from .transformer_np import TransformerNPRun

MODELS: dict[str, type[Run]] = {TransformerNPRun.model_name: TransformerNPRun, **KINDS}
TABLE, SEED = "sweep.csv", "seed"
# Of an evaluation, what the table shows.
SCORES = ("held_out_bits_per_byte", "held_out_log_likelihood")
# What is no setting of one run in one process.
LEFT_OUT = ("out", "resume", "dry_run", "margin", "parallel")
# What a run's folder has more exactly than its command: the commit that a revision was at when it
# began.
PINNED = {"dataset_revision"}
# Seconds between two looks at the runs.
PAUSE = 0.2


class Combination(NamedTuple):
    """One value of each flag.

    Attributes:
        values: of the flags that have several, as they were given, by setting.
        arguments: of the model's command.
    """

    values: dict[str, str]
    arguments: list[str]


@dataclass(frozen=True)
class Member:
    """A run of a sweep.

    Attributes:
        values: that tell it from the others.
        arguments: of the command that begins it, but for its folder.
        anyhow: settings that are asked for and change nothing that is trained.
        run: its settings.
        folder: of its files; its output is in a file of the same name and .log beside it.
    """

    values: Mapping[str, str]
    arguments: list[str]
    anyhow: Mapping[str, Any]
    run: Run
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def log(self) -> Path:
        return self.folder.path.with_name(f"{self.name}.log")

    @property
    def command(self) -> list[str]:
        """That begins it, or takes it up where it was left."""
        program = [sys.executable, "-m", "fusewright_models", self.run.model_name]
        if self.folder.holds_a_run:
            there = read_run(type(self.run), self.folder)
            others = {
                name: x
                for name, x in self.anyhow.items()
                if name not in PINNED and getattr(there, name) != x
            }
            return [*program, "--resume", str(self.folder.path), *arguments_of(others)]
        return [*program, *self.arguments, "--out", str(self.folder.path)]

    def scores(self) -> dict[str, Any] | None:
        """Its last evaluation, once it has come to its end."""
        lines = self.folder.read_metrics() if self.folder.holds_a_checkpoint else []
        found = [line for line in lines if shown(line)]
        return found[-1] if found and found[-1]["step"] == self.run.steps else None


def sweep_runs(
    commands: Mapping[str, Any], model: str, arguments: list[str], out: Path, jobs: int
) -> None:
    """Train every combination that is not trained yet, so many at a time, and show the scores.

    Args:
        commands: of the program, by name, as click has them.
        model: whose command it is.
        arguments: its flags, values of some with commas between them.
        out: folder of the runs' folders.
        jobs: runs at one time.

    Raises:
        typer.BadParameter: a flag cannot be served; nothing was trained.
        typer.Exit: it was stopped, or a run failed.
    """
    with usage_errors():
        members = members_of(commands, model, arguments, out)
        make_folder(out)
        report(members, out)
    console = plain_console()
    waiting = [member for member in members if member.scores() is None]
    done = len(members) - len(waiting)
    console.print(f"{len(members)} runs of {model}, {done} at their end already", highlight=False)
    failed: list[Member] = []

    def ended(member: Member, code: int) -> None:
        scores = None if code else member.scores()
        if scores is None:
            failed.append(member)
            said = f"ended with exit code {code}: {member.log}"
        else:
            said = ", ".join(f"{name} {x:.4f}" for name, x in shown(scores).items())
        console.print(f"{member.name}: {said}", highlight=False, soft_wrap=True)
        report(members, out)

    goes_on = "the same command goes on with what is not trained"
    try:
        with StopSignals() as stop:
            train_all(waiting, jobs, gpus(arguments), stop, ended)
    except KeyboardInterrupt:
        console.print(f"stopped; {goes_on}")
        raise typer.Exit(130) from None
    if stop.received is not None:
        console.print(f"stopped by {stop.received.name}; {goes_on}")
        raise typer.Exit(128 + stop.received)
    console.print(means(members, model))
    results_in(console, RunFolder(out))
    if failed:
        console.print(f"{len(failed)} runs failed: {', '.join(m.name for m in failed)}")
        raise typer.Exit(1)


def members_of(
    commands: Mapping[str, Any], model: str, arguments: list[str], out: Path
) -> list[Member]:
    """The runs of a sweep, in the order of the flags' values, the first flag's slowest.

    Raises:
        ValueError: a flag or a folder cannot be served.
    """
    if model not in MODELS:
        raise ValueError(f"wanted one of {', '.join(MODELS)}; got {model}")
    members = []
    for values, given in combinations(arguments):
        kind = MODELS[model]
        said = said_by(kind, settings_of(commands[model], model, given))
        anyhow = {each: x for each, x in said.items() if each in NOT_TRAINED}
        name = ",".join(f"{each}={value}" for each, value in values.items()).replace(os.sep, "_")
        folder = RunFolder(out / name)
        members.append(Member(values, given, anyhow, kind.from_flags(said), folder))
    # By names, which are those of folders, and by what is trained: 0.001 is 1e-3.
    if min(len({m.name for m in members}), len({m.run for m in members})) < len(members):
        raise ValueError("wanted different values of a flag; got one twice")
    for member in members:
        check_same(member)
    return members


def combinations(arguments: list[str]) -> list[Combination]:
    """One of each value of flags whose values have commas between them.

    Raises:
        ValueError: there are none, or what is given is no flags.
    """
    choices: list[list[tuple[str, list[str]]]] = []
    swept: list[str] = []
    rest = iter([*arguments, "--"])
    given = next(rest)
    while given != "--":
        if not given.startswith("--"):
            raise ValueError(f"wanted flags, each with one value or none; got {given}")
        name, equals, value = given.partition("=")
        following = next(rest)
        if not equals and not following.startswith("--"):
            value, following = following, next(rest)
        setting = name.removeprefix("--").replace("-", "_")
        if setting in swept:
            raise ValueError(f"wanted all values of {name} with commas between them; got it twice")
        if "," in value:
            swept.append(setting)
            choices.append([(each, [name, each]) for each in value.split(",")])
        else:
            choices.append([("", [name, value] if value or equals else [name])])
        given = following
    if not swept:
        raise ValueError("wanted a flag of several values, such as --seed 0,1,2; got none")
    found = []
    for chosen in itertools.product(*choices):
        values = [value for (value, _), each in zip(chosen, choices, strict=True) if len(each) > 1]
        given_each = [argument for _, each in chosen for argument in each]
        found.append(Combination(dict(zip(swept, values, strict=True)), given_each))
    return found


def settings_of(command: Any, model: str, arguments: list[str]) -> dict[str, Any]:
    """What the model's command makes of its flags.

    Raises:
        click.UsageError: it has no such flag, or not such a value of it.
        ValueError: a flag is none of a sweep's runs.
    """
    context = command.make_context(f"fusewright-train {model}", list(arguments))
    flags = {name: value for name, value in context.params.items() if value is not None}
    if refused := [name for name in LEFT_OUT if name in flags]:
        raise ValueError(f"a sweep has no {flag(refused[0])} of its runs")
    return by_new_names(flags)


def arguments_of(settings: Mapping[str, Any]) -> list[str]:
    """Flags that say them."""
    found: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            found.append(flag(name if value else f"no_{name}"))
        else:
            found += [flag(name), str(value)]
    return found


def check_same(member: Member) -> None:
    """
    Raises:
        ValueError: its folder holds another run.
    """
    if not member.folder.holds_a_run:
        return
    there = read_run(type(member.run), member.folder).choices
    wanted = member.run.choices
    differ = sorted(name for name in there | wanted if there.get(name) != wanted.get(name))
    if differ:
        raise ValueError(
            f"wanted runs of the same settings in {member.folder.path}; "
            f"{', '.join(map(flag, differ))} differ: give another --out"
        )


def train_all(
    members: Iterable[Member],
    jobs: int,
    devices: list[str],
    stop: StopSignals,
    ended: Callable[[Member, int], None],
) -> None:
    """Run their commands, so many at a time; at a signal all that run get it, and none is begun."""
    waiting = list(members)
    running: dict[int, tuple[Member, subprocess.Popen]] = {}

    def pass_on(number: int) -> None:
        for _, process in running.values():
            process.send_signal(number)

    passed_on = False
    try:
        while running or (waiting and not stop()):
            if stop() and not passed_on and stop.received is not None:
                pass_on(stop.received)
                passed_on = True
            while waiting and len(running) < jobs and not stop():
                slot = min(set(range(jobs)) - running.keys())
                device = devices[slot % len(devices)] if devices else None
                member = waiting.pop(0)
                running[slot] = member, start(member, device)
            for slot, (member, process) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[slot]
                    ended(member, code)
            if running:
                time.sleep(PAUSE)
    except BaseException as error:
        # A second SIGINT is one to the runs, too.
        pass_on(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        for _, process in running.values():
            process.wait()
        raise


def start(member: Member, device: str | None) -> subprocess.Popen:
    """Its command, in a process that a terminal's signals do not reach."""
    environment = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    with member.log.open("ab") as log:
        return subprocess.Popen(
            member.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def gpus(arguments: list[str]) -> list[str]:
    """What runs at one time are spread over: GPUs that torch sees, unless --device says which."""
    if any(each.partition("=")[0] == "--device" for each in arguments):
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = torch.cuda.device_count()
    return names[:count] if len(names) >= count > 0 and names[0] else [*map(str, range(count))]


def shown(scores: Mapping[str, Any]) -> dict[str, float]:
    return {name: scores[name] for name in SCORES if name in scores}


def report(members: list[Member], out: Path) -> None:
    """Write a row for each run: its values, folder, and last evaluation if it is at its end.

    Raises:
        NotWritten: the disk is full, for instance.
    """
    rows = []
    for member in members:
        scores = member.scores()
        state = {"folder": member.name, "finished": scores is not None}
        rows.append({**member.values, **state, **(scores or {})})
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(out / TABLE, text.getvalue().encode())


def means(members: list[Member], title: str) -> Table:
    """Of each combination of values but for seeds the mean of each score over those seeds whose
    runs are at their end, and its standard error where there are two or more.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any] | None]] = {}
    others = [name for name in members[0].values if name != SEED]
    for member in members:
        key = tuple(member.values[name] for name in others)
        groups.setdefault(key, []).append(member.scores())
    found = [scores for group in groups.values() for scores in group if scores is not None]
    names = list(dict.fromkeys(name for scores in found for name in shown(scores)))
    table = Table(*others, "runs", *names, title=title)
    for key, group in groups.items():
        done = [scores for scores in group if scores is not None]
        columns = [[scores[name] for scores in done if name in scores] for name in names]
        runs = f"{len(done)}" if len(done) == len(group) else f"{len(done)} of {len(group)}"
        table.add_row(*key, runs, *map(mean_of, columns))
    return table


def mean_of(values: list[float]) -> str:
    """Mean and standard error."""
    if not values or not all(map(isfinite, values)):
        return "-"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"
