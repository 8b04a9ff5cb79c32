"""A package's result files as a short table in its README, whole tables and pictures beside them.

    python -m fusewright_testkit.report packages/norm [--check]

Every CSV file in ``results/`` that has a benchmark's ``COLUMNS`` is read. The whole tables go into
``results/tables.md``; the README gets, between two marks, a picture, the largest case of each op
and every row that another provider wins. ``--check`` only says whether they are behind the files.
Nothing here imports torch, so the file also runs as a script where there is no torch; what a
benchmark declares of its picture is read from its source.
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import typer

try:
    from . import figures
    from .tabulated import Cell, Key, Lines, Memory, markdown, memory_table, short, table
except ImportError:
    # As a script; the package itself imports torch.
    import figures  # type: ignore[no-redef]
    from tabulated import (  # type: ignore[no-redef]
        Cell,
        Key,
        Lines,
        Memory,
        markdown,
        memory_table,
        short,
        table,
    )

COLUMNS = ["op", "case", "pass", "provider", "dtype", "timing"]
COLUMNS += ["ms", "ms_p20", "ms_p80", "tflops", "gbps", "mem_mib"]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
CLOCKS = {
    "graph": "Graph time: the GPU's for one call, from a replayed CUDA graph over copies of the "
    "inputs that exceed the L2 cache",
    "event": "Event time: between device events around one call, the L2 cache flushed before it",
    "wall": "Wall time: one eager call's time by the host's clock, in a run of many",
}
UNITS = {
    "TB/s": "TB/s counts each input read once and each output written once",
    "TFLOPS": "TFLOPS counts the operations of the formula",
}
MEMORY = (
    "Memory that a forward and a backward pass take beyond their inputs, or a forward pass where "
    "there is no other, or a first step, its state included, in MiB; least in bold"
)
CHECKED = (
    "every provider that computes the same is checked against the fp64 reference before it is timed"
)
OURS = figures.OURS
# Where both passes in one call take so many times what they take alone, the forward pass of a call
# with gradients does work that neither of them shows.
MORE = 1.1
TABLES = "results/tables.md"
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}


def environment_of(path: Path) -> str:
    """Of a file ``h200-torch2.11-triton3.6.csv``, in words."""
    match = re.fullmatch(r"(.+)-torch([\d.]+)-triton([\d.]+)", path.stem)
    if match is None:
        return path.stem
    return f"{match[1].replace('-', ' ').upper()}, torch {match[2]}, triton {match[3]}"


class Results(NamedTuple):
    """One result file: clock, key and provider in the order of the file."""

    path: Path
    clocks: dict[str, Lines]
    memory: Memory

    @property
    def package(self) -> Path:
        return self.path.parent.parent

    @property
    def environment(self) -> str:
        return environment_of(self.path)

    def kernels(self) -> Lines:
        """From the graph, else from events; the host's clock where there is neither."""
        times = {**self.clocks.get("event", {}), **self.clocks.get("graph", {})}
        return times or self.clocks.get("wall", {})


def read(path: Path) -> Results | None:
    """The results in a CSV file; None where its columns are others."""
    clocks: dict[str, Lines] = {}
    memory: Memory = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            return None
        for row in reader:
            flops = row["tflops"]
            unit, rate = ("TFLOPS", float(flops)) if flops else ("TB/s", float(row["gbps"]) / 1e3)
            key = Key(row["op"], row["dtype"], row["pass"], row["case"], unit)
            cells = clocks.setdefault(row["timing"], {}).setdefault(key, {})
            cells[row["provider"]] = Cell(float(row["ms"]) * 1e3, rate)
            if row["mem_mib"]:
                of_case = memory.setdefault((key.op, key.dtype, key.case), {})
                of_case[row["provider"]] = float(row["mem_mib"])
    return Results(path, clocks, memory)


def result_files(package: Path) -> list[Results]:
    return [found for path in sorted(package.glob("results/*.csv")) if (found := read(path))]


def section(results: Results) -> str:
    """The tables of one result file: environment, picture, times on the GPU, wall times, memory."""
    name = results.path.name
    parts = [
        f"**{results.environment}**: medians of [{name}]({name}), fastest in bold; {CHECKED}.",
        f"![{results.environment}: rates]({results.path.stem}.png)",
    ]
    kernels = results.kernels()
    for clock, unit in itertools.product(("graph", "event"), UNITS):
        timed = results.clocks.get(clock, {})
        chosen = (key for key in timed if key.unit == unit and kernels[key] is timed[key])
        if lines := {key: timed[key] for key in chosen}:
            parts.append(f"{CLOCKS[clock]}, in microseconds · {unit}. {UNITS[unit]}.")
            parts.append(table(lines, rates=True))
    if "wall" in results.clocks:
        parts.append(f"{CLOCKS['wall']}, in microseconds.")
        parts.append(table(results.clocks["wall"], rates=False))
    if results.memory:
        parts.append(f"{MEMORY}.")
        parts.append(memory_table(results.memory))
    return "\n\n".join(parts)


def tables(package: Path) -> str:
    """What belongs into ``results/tables.md``."""
    text = "\n\n".join(map(section, result_files(package)))
    return f"# {package.resolve().name}: measured times\n\n{text}\n"


def largest_cases(lines: Lines) -> Lines:
    """The case of each op and dtype that takes ours longest: forward and backward separately, or
    forward and both where the backward pass alone is no time to compare.
    """
    longest: dict[tuple[str, str], tuple[float, str]] = {}
    for key, cells in lines.items():
        if OURS in cells:
            time = cells[OURS].microseconds, key.case
            longest[key[:2]] = max(time, longest.get(key[:2], time))
    chosen = {
        key: cells
        for key, cells in lines.items()
        if OURS in cells and key.case == longest[key[:2]][1]
    }
    times = {(*key[:2], key.passed): cells[OURS].microseconds for key, cells in chosen.items()}

    def telling(key: Key) -> bool:
        alone = [times[*key[:2], p] for p in ("fwd", "bwd") if (*key[:2], p) in times]
        both = times.get((*key[:2], "fwd+bwd"))
        if not alone or both is None or key.passed == "fwd":
            return True
        return (key.passed == "fwd+bwd") == (both > MORE * sum(alone))

    return {key: cells for key, cells in chosen.items() if telling(key)}


def lost(cells: dict[str, Cell]) -> bool:
    """Whether another provider is faster than ours."""
    other = rival(cells) if OURS in cells else None
    return other is not None and other[1].microseconds < cells[OURS].microseconds


def rival(cells: dict[str, Cell]) -> tuple[str, Cell] | None:
    """The fastest provider that is not ours."""
    others = [(name, cell) for name, cell in cells.items() if not name.startswith(OURS)]
    return min(others, key=lambda pair: pair[1].microseconds, default=None)


def short_table(lines: Lines) -> str:
    """Ours and the fastest other provider, by op, case and pass."""
    rows = [["op", "case", "pass", OURS, "fastest other", "times as fast"]]
    rows.append(["---"] * 3 + ["---:"] * 3)
    for key, cells in lines.items():
        ours, row = cells[OURS].microseconds, [f"`{key.op}` {key.dtype}", key.case, key.passed]
        row.append(short(ours))
        if (other := rival(cells)) is None:
            rows.append([*row, "", ""])
            continue
        times = other[1].microseconds / ours
        rows.append([*row, f"{other[0]} {short(other[1].microseconds)}", f"{times:.2f}"])
    return markdown(rows)


def standing(lines: Lines) -> tuple[Lines, str]:
    """The rows that another provider wins, and how many these are of those that have a peer."""
    behind = {key: cells for key, cells in lines.items() if lost(cells)}
    with_peer = sum(OURS in cells and rival(cells) is not None for cells in lines.values())
    return behind, f"In {len(behind)} of the {with_peer} rows that have a peer the peer is faster"


def made(package: Path) -> str:
    """What belongs between the marks of a package's README: picture and short table of the first
    environment by name, with every row that another provider wins; of others these rows alone.
    """
    found = result_files(package)
    if not found:
        return "Nothing has been measured yet."
    results, *others = found
    kernels = results.kernels()
    behind, count = standing(kernels)
    shown = largest_cases(kernels) | behind
    captured = shown.keys() <= results.clocks.get("graph", {}).keys()
    # Passes of one case beside each other, cases as in the file.
    cases = [(key.op, key.dtype, key.case) for key in kernels]
    order = sorted(shown, key=lambda key: cases.index((key.op, key.dtype, key.case)))
    shows, cases = ({(key.op, key.case) for key in lines} for lines in (pictured(results), kernels))
    part = f"The picture has {len(shows)} of {len(cases)} cases. " if shows != cases else ""
    caption = (
        f"{part}{results.environment}, in microseconds of graph time: the GPU's, from a replayed "
        f"CUDA graph{'' if captured else '; of a step without one, between device events'}. "
        "Wall time is the host's, of an eager call. `fwd` runs without gradients, `bwd` is the "
        f"backward pass alone. {count}: the table has these and the largest case of each "
        f"operation; {CHECKED}. [All rows, wall time included]({TABLES})."
    )
    picture = f"![{results.environment}: rates](results/{results.path.stem}.png)"
    parts = [picture, caption, short_table({key: shown[key] for key in order})]
    for other in others:
        behind, count = standing(other.kernels())
        parts.append(f"{other.environment}: {count[0].lower()}{count[1:]}{':' if behind else '.'}")
        if behind:
            parts.append(short_table(behind))
    return "\n\n".join(parts)


def with_made(text: str, new: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """``text`` with what is between the marks replaced."""
    begin, end = marks
    marked = f"{begin}\n{new}\n{end}"
    text, times = re.subn(f"{begin}.*{end}", lambda _: marked, text, flags=re.DOTALL)
    if times != 1:
        raise ValueError(f"wanted the marks {begin} and {end} once in the README, got {times}")
    return text


def declared(package: Path, name: str) -> dict[str, str]:
    """What a package's benchmark says of its picture, read from its source: ``PICTURED``, from an
    operation that the picture has to what the cases that it has contain, such as ``rows=16384``;
    ``WORDS``, from a name in its cases to what it counts. Nothing of those that it does not say.
    """
    for path in (package / "bench.py", package / "bench/__init__.py"):
        for node in ast.parse(path.read_text()).body if path.is_file() else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return ast.literal_eval(node.value)
    return {}


def pictured(results: Results) -> Lines:
    """The rows of the picture: all kernels' but for those that ``PICTURED`` leaves out."""
    shown, kernels = declared(results.package, "PICTURED"), results.kernels()
    if not shown:
        return kernels
    return {
        key: cells
        for key, cells in kernels.items()
        if key.op in shown and set(shown[key.op].split()) <= set(key.case.split())
    }


def strips(lines: Lines, words: dict[str, str]) -> list[figures.Strip]:
    """A strip for each op with the passes of one dtype beside each other; of one that takes steps,
    its dtypes. Of an op whose forward pass prepares its gradients both passes stand in place of the
    backward pass; of cases that no other panel has they stand too.
    """
    by_op: dict[str, dict[str, dict[str, dict[str, Lines]]]] = {}
    for key, cells in lines.items():
        step = key.passed not in PASSES
        title = key.op if step else f"{key.op}, {key.dtype}"
        panel = key.dtype if step else PASSES[key.passed]
        by_case = by_op.setdefault(title, {}).setdefault(panel, {})
        by_case.setdefault(key.case, {})[key] = cells
    told = largest_cases(lines)
    found = []
    for title, by_panel in by_op.items():
        cases = list(dict.fromkeys(case for by_case in by_panel.values() for case in by_case))
        panels = []
        telling = [n for n, of in by_panel.items() if any(told.keys() & x for x in of.values())]
        elsewhere = {case for name in telling for case in by_panel[name]}
        for name, by_case in by_panel.items():
            rows = {case: next(iter(some.items())) for case, some in by_case.items()}
            if name not in telling and by_case.keys() <= elsewhere:
                continue
            (unit,) = {key.unit for key, _ in rows.values()}
            bars = {
                case: {name: figures.Bar(c.rate, c.microseconds) for name, c in cells.items()}
                for case, (_, cells) in rows.items()
            }
            panels.append(figures.Panel(f"{name}, {unit}", bars))
        labels = {case: figures.case_in_words(case, cases, words) for case in cases}
        note = figures.common_words(cases, words)
        found.append(figures.Strip(title, note, panels, labels))
    return found


def draw(results: Results, copy: tuple[float, str] | None = None) -> Any:
    """Rates by op, pass and case; ``copy`` is a rate and its source."""
    found = strips(pictured(results), declared(results.package, "WORDS"))
    line = copy and ("TB/s", copy[0], f"copy at {copy[0]:g} TB/s, {copy[1]}")
    name = results.package.resolve().name
    return figures.draw_bars(f"{name}: rate of the kernels on {results.environment}", found, line)


def studies(package: Path) -> dict[Path, Path]:
    """From each result file whose name begins with that of a script beside the package's source,
    such as ``crossover-h200.csv`` of ``crossover.py``, to that script, whose ``draw`` takes the
    rows.
    """
    files = sorted(package.glob("results/*.csv"))
    scripts = {path: package / f"{path.stem.partition('-')[0]}.py" for path in files}
    return {path: script for path, script in scripts.items() if script.is_file()}


def draw_study(file: Path, script: Path) -> Any:
    """What the script makes of the rows; it may import torch and the package."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    with file.open(newline="") as stream:
        return module.draw(list(csv.DictReader(stream)))


def problems(package: Path) -> list[str]:
    """What of a package's README and pictures is behind its result files."""
    readme, results = package / "README.md", result_files(package)
    text = readme.read_text()
    if not results and BEGIN not in text:
        return []
    told = [] if text == with_made(text, made(package)) else [f"{readme} is behind its results"]
    whole = package / TABLES
    if results and not (whole.is_file() and whole.read_text() == tables(package)):
        told.append(f"{whole} is behind its results")
    drawn = [*(each.path for each in results), *studies(package)]
    files = [path for path in drawn if figures.behind(path)]
    return told + [f"{path.with_suffix('.png')} is missing or behind its results" for path in files]


def main(
    packages: list[Path] = typer.Argument(help="folders of packages, such as packages/norm"),
    check: bool = typer.Option(False, help="write nothing; fail where something is behind"),
    copy_tbps: float = typer.Option(None, help="rate of a device copy, drawn as a line"),
    copy_source: str = typer.Option(None, help="how that rate was measured"),
) -> None:
    """Write the result tables and pictures of PACKAGES, or check them."""
    if (copy_tbps is None) != (copy_source is None):
        raise typer.BadParameter("--copy-tbps and --copy-source go together")
    if check:
        told = [problem for package in packages for problem in problems(package)]
        for problem in told:
            typer.echo(f"{problem}: python -m fusewright_testkit.report PACKAGE", err=True)
        raise typer.Exit(bool(told))
    for package in packages:
        readme = package / "README.md"
        readme.write_text(with_made(readme.read_text(), made(package)))
        if result_files(package):
            (package / TABLES).write_text(tables(package))
        for results in result_files(package):
            figure = draw(results, (copy_tbps, copy_source) if copy_tbps else None)
            figures.save(figure, results.path)
        for file, script in studies(package).items():
            figures.save(draw_study(file, script), file)


if __name__ == "__main__":
    typer.run(main)
