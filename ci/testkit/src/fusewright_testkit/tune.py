"""Time every candidate for the lines of a package's launch tables on this machine's GPU.

    python -m fusewright_testkit.tune norm --op backward

A package's ``tune.py`` beside its source declares ``tunings()``: for each launch and size a
:class:`Tuning`, whose fastest lines go into the launch modules by hand. The kernels of all
candidates are compiled first, on all cores: a candidate that spills, asks for more shared memory
than there is, or reads a register that nothing has written is left out. Every other one is held
against the yardstick, and its launches alone are timed, in a graph, on the operands that the pass
gave them. ``--dry`` compiles and launches nothing, and needs no GPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import functools
import multiprocessing
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import typer

from .bench import environment_name, load, precision_of
from .cases import Case, Tensors, described
from .compiled import SHARED_KIB, compile_launch, recorded_launches
from .timing import copies_needed, graph_time
from .yardstick import Yardstick, as_leaf, as_tuple

Tables = Mapping[str, Any]
COMMITTED = "committed"
DIGITS = {"tflops": 1, "tbps": 3}
# Of a Launch: a call of either launches.
METHODS = "__call__", "dispatch"


@dataclass(frozen=True)
class Tuning:
    """One launch at one size, and the lines that may stand in its table.

    Args:
        names: the first columns of its rows in the result file.
        case: what is launched; candidates are checked on its ``sample`` where it has one.
        op: the public function, on ``case``'s inputs, with ``backend="triton"``.
        module: where the tables are.
        candidates: from a line, as the result file writes it, to tables by name.
        backward: whether the launch is of the backward pass.
        kernels: names of the kernels that are timed; empty for all of the pass.
        rate: "tflops" or "tbps" of the case's operations or bytes, "" for none.
        cold: whether the operands come from memory, and not from the cache.
        file: of the results, before the name of the environment.
        column: that of the line.
    """

    names: Mapping[str, object]
    case: Case
    op: Callable
    module: ModuleType
    candidates: Mapping[str, Tables]
    backward: bool = False
    kernels: tuple[str, ...] = ()
    rate: str = ""
    cold: bool = True
    file: str = "tuning"
    column: str = "config"

    def __str__(self) -> str:
        return described(self.names)

    @property
    def passed(self) -> str:
        return "bwd" if self.backward else "fwd"

    @property
    def committed(self) -> Tables:
        """The tables as they are, of all names that candidates replace."""
        names = {name for tables in self.candidates.values() for name in tables}
        return {name: getattr(self.module, name) for name in names}

    def row(self, line: str, ms: float) -> dict[str, object]:
        """Of the result file."""
        row = {**self.names, "ms": f"{ms:.5f}"}
        if self.rate:
            work = self.case.bytes_moved if self.rate == "tbps" else self.case.flops
            row[self.rate] = f"{work[self.passed] / ms / 1e9:.{DIGITS[self.rate]}f}"
        return {**row, self.column: line}


def lines(configs: Iterable[object], *tables: str, table: bool = False) -> dict[str, Tables]:
    """Candidates that are each a line of ``tables``; with ``table`` these are tuples of lines."""
    return {str(one): dict.fromkeys(tables, (one,) if table else one) for one in configs}


def modules() -> Iterator[ModuleType]:
    """Of the packages."""
    return (module for name, module in list(sys.modules.items()) if name.startswith("fusewright."))


def forget_plans() -> None:
    """Let the next call read the launch tables again."""
    for module in modules():
        for name, plan in vars(module).items():
            if name.endswith("plan") and hasattr(plan, "cache_clear"):
                plan.cache_clear()


@contextlib.contextmanager
def configured(*lines: tuple[Tuning, Tables]) -> Iterator[None]:
    """The launchers with candidates in place of their tables, and no plan made before."""
    with contextlib.ExitStack() as stack:
        for tuning, tables in lines:
            stack.enter_context(mock.patch.multiple(tuning.module, **tables))
        forget_plans()
        yield
    forget_plans()


@contextlib.contextmanager
def kept_calls(kernels: tuple[str, ...]) -> Iterator[list[Callable[[], object]]]:
    """Launches of these kernels, each to be repeated on the same tensors; what only compiles one is
    none.
    """
    calls: list[Callable[[], object]] = []
    nested = False

    def keeping(method: Callable, compiling: Any) -> Callable:
        def call(launch: Any, *args: Any) -> object:
            nonlocal nested
            # A launch may go through Triton's dispatch in turn.
            wanted = not kernels or launch.kernel.fn.__name__ in kernels
            if wanted and not nested and compiling.wanted is None:
                calls.append(functools.partial(method, launch, *args))
            before, nested = nested, True
            try:
                return method(launch, *args)
            finally:
                nested = before

        return call

    with contextlib.ExitStack() as stack:
        for module in modules():
            if module.__name__.endswith("._core.launches"):
                methods = vars(module.Launch)
                wrapped = {name: keeping(methods[name], module.compiling) for name in METHODS}
                stack.enter_context(mock.patch.multiple(module.Launch, **wrapped))
        yield calls


class Call:
    """One call of a tuning's op on its own tensors, drawn with the outputs' gradients."""

    def __init__(self, tuning: Tuning, inputs: Tensors) -> None:
        self.op, self.kernels, self.backward = tuning.op, tuning.kernels, tuning.backward
        self.leaves = [as_leaf(x, None) for x in inputs]
        self.wanted = [x for x in self.leaves if x is not None and x.requires_grad]

    def launches(self) -> list[Callable[[], object]]:
        """Those that are timed, as the tables are now."""
        with kept_calls(self.kernels) as forward:
            outputs = as_tuple(self.op(*self.leaves))
        if not self.backward:
            return forward
        with kept_calls(self.kernels) as backward:
            torch.autograd.grad(outputs, self.wanted, [drawn_like(y) for y in outputs])
        return backward

    def both(self) -> object:
        """All of both passes."""
        outputs = as_tuple(self.op(*self.leaves))
        return torch.autograd.grad(outputs, self.wanted, [torch.ones_like(y) for y in outputs])


def drawn_like(x: torch.Tensor) -> torch.Tensor:
    """From a normal distribution; what is only compiled for is not read."""
    return torch.randn_like(x) if x.is_cuda else torch.empty_like(x)


class Target(NamedTuple):
    """The GPU that candidates are compiled for."""

    multiprocessors: int
    shared_bytes: int
    capability: int


def target() -> Target:
    """This machine's GPU; an H200 where there is none."""
    count, (major, minor) = 132, (9, 0)
    if torch.cuda.is_available():
        count = torch.cuda.get_device_properties().multi_processor_count
        major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    return Target(count, SHARED_KIB[capability] << 10, capability)


@functools.cache
def tunings_for(folder: pathlib.Path, gpu: Target) -> list[Tuning]:
    """A package's tunings in a process that compiles alone: CPU tensors are launched, as on a
    GPU.
    """
    tunings = load(folder, "tune").tunings()
    for module in modules():
        if hasattr(module, "device_properties"):
            module.device_properties = lambda device: gpu
        if hasattr(module, "known_obstacle"):
            module.known_obstacle = lambda device, dtype: None
        for op in [x for x in vars(module).values() if type(x).__name__ == "Op"]:
            op.on_cpu = op.on_cuda
            op.inference = dict.fromkeys(op.inference, op.inference[True])
    return tunings


def compiled(folder: pathlib.Path, gpu: Target, job: tuple[int, str]) -> str | None:
    """Compile what a candidate launches and describe it. None where it does not compile, does not
    fit, spills, or reads a register that nothing has written: an address of one would end the
    process, and all candidates after it.
    """
    number, line = job
    tuning = tunings_for(folder, gpu)[number]
    inputs = tuning.case.inputs("meta")
    unread = [None if x is None else torch.empty_like(x, device="cpu") for x in inputs]
    with (
        precision_of(tuning.case),
        configured((tuning, tuning.candidates[line])),
        recorded_launches() as recorded,
    ):
        launches = Call(tuning, unread).launches()
        recorded.clear()
        for launch in launches:
            launch()
    try:
        found = [compile_launch(launch, gpu.capability) for launch in recorded]
    except Exception as error:
        # More shared memory or registers than there are.
        print(tuning, line, said(error))
        return None
    if any(x.spilled or x.undefined or x.shared > gpu.shared_bytes for x in found):
        return None
    return "".join(map(repeated, launches))


def repeated(call: Any) -> str:
    """All that a launch depends on but its numbers."""
    launch, tensors, *_ = call.args
    kinds = [type(x).__name__ for x in tensors]
    return f"{launch.grid} {launch.integers} {launch.constants} {launch.options} {kinds}"


def sound_lines(folder: pathlib.Path, chosen: Mapping[int, Tuning]) -> dict[int, list[str]]:
    """The lines of each tuning that may be launched, one of those that launch the same; compiled on
    all cores, into triton's cache.
    """
    jobs = [(number, line) for number, tuning in chosen.items() for line in tuning.candidates]
    compiles = functools.partial(compiled, folder, target())
    spawn = multiprocessing.get_context("spawn")
    kept: dict[int, dict[str, str]] = {number: {} for number in chosen}
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as pool:
        for (number, line), launched in zip(
            jobs, pool.map(compiles, jobs, chunksize=4), strict=True
        ):
            if launched is not None:
                kept[number].setdefault(launched, line)
    return {number: list(lines.values()) for number, lines in kept.items()}


def timed(tuning: Tuning, lines: Iterable[str], device: str = "cuda") -> dict[str, float]:
    """Milliseconds by line, the fastest first, and of the tables as they are."""
    case = tuning.case
    copies = copies_needed(case.bytes_moved[tuning.passed]) if tuning.cold else 1
    calls = [Call(tuning, case.inputs(device)) for _ in range(copies)]
    times = {}
    with precision_of(case):
        yardstick = Yardstick(case.reference, (case.sample or case.inputs)(device))
        for line, tables in {COMMITTED: tuning.committed, **tuning.candidates}.items():
            if line != COMMITTED and line not in lines:
                continue
            with configured((tuning, tables)):
                try:
                    yardstick.check(tuning.op)
                    launches = [call.launches() for call in calls]
                    each = [functools.partial(run_all, some) for some in launches]
                    times[line] = graph_time(each, replays=7, warm_seconds=0.01).ms
                except Exception as error:
                    print("failed:", tuning, line, said(error), flush=True)
    return dict(sorted(times.items(), key=lambda pair: pair[1]))


def run_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def said(error: Exception) -> str:
    return f"{type(error).__name__} {error}"[:200]


def named(case: Case) -> str:
    return f"{case.op} {case.described} {case.dtype_name}"


def print_together(fastest: list[tuple[Tuning, Tables]], device: str = "cuda") -> None:
    """Both passes of a case, with its fastest lines and with the tables as they are."""
    tuning = fastest[0][0]
    call = Call(tuning, tuning.case.inputs(device))
    lines: tuple
    for name, lines in ((COMMITTED, ()), ("the fastest lines together", tuple(fastest))):
        with precision_of(tuning.case), configured(*lines):
            ms = graph_time([call.both], replays=15, warm_seconds=0.02).ms
        print(f"{named(tuning.case)}: {ms * 1e3:.2f} us fwd+bwd, {name}", flush=True)


def write(path: pathlib.Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(
    package: str = typer.Argument(help="folder name of the package, such as norm; run at the root"),
    out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV files"),
    op: str = typer.Option("", help="only rows whose names match this, such as 'kind=dq .*D=64'"),
    best: int = typer.Option(4, help="candidates to print of each"),
    dry: bool = typer.Option(False, help="compile the candidates, and time none"),
) -> None:
    """Time the candidates of PACKAGE, and print the best."""
    folder = pathlib.Path("packages") / package
    tunings = load(folder, "tune").tunings()
    chosen = {n: tuning for n, tuning in enumerate(tunings) if re.search(op, str(tuning))}
    if not chosen:
        raise typer.BadParameter(f"no rows of {package} match {op!r}")
    sound = sound_lines(folder, chosen)
    rows: dict[str, list[dict[str, object]]] = {}
    fastest: dict[str, list[tuple[Tuning, Tables]]] = {}
    for number, tuning in chosen.items():
        print(f"{tuning}: {len(sound[number])} of {len(tuning.candidates)} compile", flush=True)
        if dry:
            continue
        times = timed(tuning, sound[number])
        for rank, (line, ms) in enumerate(times.items()):
            rows.setdefault(tuning.file, []).append(tuning.row(line, ms))
            if rank < best or line == COMMITTED:
                print(f"  {ms * 1e3:8.2f} us {line}", flush=True)
        if times:
            tables = {COMMITTED: tuning.committed, **tuning.candidates}
            of_case = fastest.setdefault(named(tuning.case), [])
            of_case.append((tuning, tables[next(iter(times))]))
        torch.cuda.empty_cache()
        # After each: a run that is cut off leaves what it has.
        for file, some in rows.items():
            write(out / f"{file}-{environment_name()}.csv", some)
    for some in fastest.values():
        print_together(some)


if __name__ == "__main__":
    typer.run(main)
