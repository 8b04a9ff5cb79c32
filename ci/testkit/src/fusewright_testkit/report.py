"""A package's result files as a short table in its README, whole tables and pictures beside them.

    python -m fusewright_testkit.report packages/norm [--check]

Every CSV file in ``results/`` that has a benchmark's ``COLUMNS`` is read. The whole tables go into
``results/tables.md``; the README gets, between two marks, a picture, the largest case of each op
and every row that another provider wins. ``--check`` only says whether they are behind the files.
Nothing here imports torch or anything of ours, so the file also runs as a script where there is no
torch.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import typer

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
CHECKED = (
    "every provider that computes the same is checked against the fp64 reference before it is timed"
)
OURS = "fusewright"
# Where both passes in one call take so many times what they take alone, the forward pass of a call
# with gradients does work that neither of them shows.
MORE = 1.1
TABLES = "results/tables.md"
# Okabe and Ito's colours, which colour-blind readers distinguish too; the first provider is ours.
COLOURS = ("#D55E00", "#999999", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#E69F00", "#000000")
# Characters that a panel's title has room for.
TITLE_WIDTH = 48


class Key(NamedTuple):
    """What the numbers in one line of a table have in common."""

    op: str
    dtype: str
    passed: str
    case: str
    unit: str


class Cell(NamedTuple):
    """One provider's median in microseconds, and its rate in the unit of the key."""

    microseconds: float
    rate: float


Lines = dict[Key, dict[str, Cell]]


class Results(NamedTuple):
    """One result file: clock, key and provider in the order of the file."""

    path: Path
    clocks: dict[str, Lines]

    @property
    def providers(self) -> list[str]:
        cells = (cells for lines in self.clocks.values() for cells in lines.values())
        return list(dict.fromkeys(itertools.chain.from_iterable(cells)))

    @property
    def environment(self) -> str:
        """``h200-torch2.11-triton3.6`` in words."""
        match = re.fullmatch(r"(.+)-torch([\d.]+)-triton([\d.]+)", self.path.stem)
        if match is None:
            return self.path.stem
        return f"{match[1].replace('-', ' ').upper()}, torch {match[2]}, triton {match[3]}"

    def kernels(self) -> Lines:
        """From the graph, else from events; the host's clock where there is neither."""
        times = {**self.clocks.get("event", {}), **self.clocks.get("graph", {})}
        return times or self.clocks.get("wall", {})


def read(path: Path) -> Results | None:
    """The results in a CSV file; None where its columns are others."""
    clocks: dict[str, Lines] = {}
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
    return Results(path, clocks)


def result_files(package: Path) -> list[Results]:
    return [found for path in sorted(package.glob("results/*.csv")) if (found := read(path))]


def short(x: float) -> str:
    """``x`` to three significant digits, but at most two after the point."""
    return f"{x:.{min(2, max(0, 2 - math.floor(math.log10(x))))}f}"


def table(lines: Lines, rates: bool) -> str:
    """A markdown table, a column for each provider, the fastest of each line in bold."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(lines.values())))
    rows = [["op", "case", "pass", *names], ["---"] * 3 + ["---:"] * len(names)]
    for key, cells in lines.items():
        row = [f"`{key.op}` {key.dtype}", key.case, key.passed]
        fastest = min(cell.microseconds for cell in cells.values())
        for name in names:
            cell = cells.get(name)
            text = short(cell.microseconds) if cell else ""
            text += f" · {short(cell.rate)}" if cell and rates else ""
            row.append(f"**{text}**" if cell and cell.microseconds == fastest else text)
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def section(results: Results) -> str:
    """The tables of one result file: environment, picture, times on the GPU, wall times."""
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
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


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
    caption = (
        f"{results.environment}, in microseconds of graph time: the GPU's, from a replayed CUDA "
        f"graph{'' if captured else '; of a step without one, between device events'}. "
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


def case_labels(cases: list[str]) -> tuple[list[str], str, str]:
    """Short labels of an op's cases, what the labels count, and what is the same in all cases."""
    pairs = [dict(word.split("=") for word in case.split()) for case in cases]
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    moving = [name for name in names if len({p.get(name) for p in pairs}) > 1] or names
    same = " ".join(f"{name}={pairs[0][name]}" for name in names if name not in moving)
    labels = ["×".join(pair[name] for name in moving if name in pair) or "–" for pair in pairs]
    return labels, " × ".join(moving), same


def draw(results: Results, copy: tuple[float, str] | None = None) -> Any:
    """A row of panels for each op, one for each pass that it has, those of one unit to one scale;
    ``copy`` is a rate and its source.
    """
    from matplotlib.figure import Figure

    lines = results.kernels()
    handles: dict[str, Any] = {}
    rows: dict[tuple[str, str], dict[str, dict[Any, dict[str, Cell]]]] = {}
    for key, cells in lines.items():
        rows.setdefault(key[:2], {}).setdefault(key.passed, {})[key] = cells
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(5.2 * columns, 2.8 * len(rows) + 0.9), layout="constrained")
    for panels, (op, passes) in zip(
        figure.subplots(len(rows), columns, squeeze=False), rows.items(), strict=True
    ):
        first: dict[str, Any] = {}
        for panel in panels[len(passes) :]:
            panel.set_axis_off()
        for panel, (passed, groups) in zip(panels, passes.items(), strict=False):
            unit = next(iter(groups)).unit
            if unit in first:
                panel.sharey(first[unit])
            else:
                first[unit] = panel
            bars(panel, list(groups.values()), results.providers, handles)
            if copy and unit == "TB/s":
                line = panel.axhline(copy[0], color="black", linestyle="--", linewidth=1)
                handles[f"copy at {copy[0]:g} TB/s, {copy[1]}"] = line
            labels, counted, same = case_labels([key.case for key in groups])
            title = textwrap.fill(" ".join((*op, passed, same)), TITLE_WIDTH)
            panel.set(title=title, xlabel=counted, ylabel=unit)
            panel.set_xticks(range(len(labels)), labels)
            panel.tick_params(labelsize=9, labelleft=True)
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", linewidth=0.5, alpha=0.5)
            panel.set_axisbelow(True)
    figure.suptitle(f"{results.environment}: rate of the kernels (higher is better)")
    # The line of the copy comes last.
    names = sorted(handles, key=[*results.providers, *handles].index)
    drawn = [handles[name] for name in names]
    figure.legend(drawn, names, loc="outside lower center", ncols=min(6, len(names)), frameon=False)
    return figure


def bars(panel: Any, cases: list[dict[str, Cell]], providers: list[str], handles: dict) -> None:
    """Draw a group of bars for each case, closed up where a provider is missing."""
    colours = dict(zip(providers, itertools.cycle(COLOURS), strict=False))
    width = 0.84 / max(map(len, cases))
    for place, cells in enumerate(cases):
        names = [name for name in providers if name in cells]
        for number, name in enumerate(names):
            x = place + (number - (len(names) - 1) / 2) * width
            handles[name] = panel.bar(x, cells[name].rate, 0.92 * width, color=colours[name])


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
    pictures = [each.path.with_suffix(".png") for each in results]
    return told + [f"{path} is missing" for path in pictures if not path.is_file()]


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
            picture = results.path.with_suffix(".png")
            # Without the library's version, the same results give the same bytes.
            figure.savefig(picture, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    typer.run(main)
