"""What the documentation says of speed, made of the committed result files when it is built.

``docs/index.md`` and ``docs/performance.md`` have marks such as ``<!-- made: glance -->``, each of
which stands for a table. What a row, a peer and a loss are, the testkit's report says.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import workspace

# By its file: the testkit as a package would import torch.
sys.path.append(str(workspace.kit().import_folder))

import report
from tabulated import headed

# What a page says where it is read without its tables.
UNMADE = re.compile(r"^<!-- in the repository -->\n.*?<!-- end of it -->\n", re.M | re.DOTALL)
MARK = re.compile(r"^<!-- made: (\w+) -->$", re.M)
MATRIX = ("case", "provider", "checkpointing", "timing")
UNBROKEN = "\N{NO-BREAK SPACE}"
CLOCKS = {"graph": "replayed", "wall": "eager"}


def speeds(lines: report.Lines) -> list[float]:
    """How many times as fast as the fastest peer ours is, of each row that has one."""
    found = []
    for cells in lines.values():
        if report.OURS in cells and (peer := report.rival(cells)):
            found.append(peer[1].microseconds / cells[report.OURS].microseconds)
    return sorted(found)


def summary(times: list[float]) -> list[str]:
    """Rows ahead, the median, the lowest and the highest of them."""
    if not times:
        return ["", "", ""]
    ahead = f"{sum(each >= 1.0 for each in times)} of {len(times)}"
    span = f"{times[0]:.2f} to {times[-1]:.2f}"
    middle = f"{statistics.median(times):.2f}"
    return [each.replace(" ", UNBROKEN) for each in (ahead, middle, span)]


def measured(packages: list[workspace.Project]) -> list[tuple[workspace.Project, report.Results]]:
    """Every result file of the packages; of one with several environments each of them."""
    return [(p, results) for p in packages for results in report.result_files(p.folder)]


def front(packages: list[workspace.Project], models: Path) -> str:
    """Each package with what it computes and how fast, by its first environment."""
    lines, seen = [], set()
    for package, results in measured(packages):
        if package.name not in seen:
            link = f"[{package.name}](packages/{package.name}/index.md)"
            what, *_ = package.description.partition(" for PyTorch")
            lines.append([link, what, *summary(speeds(results.kernels()))])
            seen.add(package.name)
    return headed("package | computes | rows ahead | median | range", lines, left=2)


def glance(packages: list[workspace.Project], models: Path) -> str:
    """The same of every environment, by the GPU's clock and by the host's, with the peers."""
    lines = []
    for package, results in measured(packages):
        place = f"packages/{package.name}/results/tables.md"
        name = f"[{package.name}]({place}), {results.environment}"
        wall = summary(speeds(results.clocks.get("wall", {})))[:2]
        lines.append([name, *summary(speeds(results.kernels())), *wall])
    header = "package | rows ahead | median | range | eager ahead | eager median"
    return headed(header, lines, left=1)


def lost(packages: list[workspace.Project], models: Path) -> str:
    """Of every package the rows that a peer wins: by the GPU's clock, and by the host's."""
    parts = []
    for package, results in measured(packages):
        behind, count = report.standing(results.kernels())
        parts += [f"### {package.name}, {results.environment}", f"{count}."]
        if behind:
            parts.append(report.short_table(behind))
        eager, count = report.standing(results.clocks.get("wall", {}))
        if eager:
            inside = f"{count}.\n\n{report.short_table(eager)}".replace("\n", "\n    ")
            parts.append(f'??? note "Eager calls, by the host\'s clock"\n    {inside}')
    return "\n\n".join(parts)


def steps(packages: list[workspace.Project], models: Path) -> str:
    """Every training step of ours beside the fastest peer at the same case, by the same clock."""
    parts = []
    for path in sorted(models.glob("results/h200-*.csv")):
        rows = [row for row in read(path, "pass") if row["pass"] == "step"]
        lines = against(rows, ("op", "case"))
        environment = report.environment_of(path)
        header = "model | case | ours | clock | ms | fastest other | ms | times as fast"
        parts += [f"### {environment}", headed(header, lines, left=4)]
    return "\n\n".join(parts)


def matrix(packages: list[workspace.Project], models: Path) -> str:
    """Likewise of every provider of TransformerNP, where nothing is computed twice."""
    parts = []
    for path in sorted(models.glob("results/matrix-*.csv")):
        rows = [row for row in read(path, *MATRIX) if row["ms"] and row["checkpointing"] == "none"]
        header = "case | ours | clock | ms | fastest other | ms | times as fast"
        parts.append(headed(header, against(rows, ("case",)), left=3))
    return "\n\n".join(parts)


def read(path: Path, *columns: str) -> list[dict[str, str]]:
    """The rows of a file; a ValueError where it lacks one of these columns."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := set(columns) - set(reader.fieldnames or ()):
            raise ValueError(f"wanted the columns {', '.join(columns)} in {path}, got no {missing}")
        return list(reader)


def against(rows: list[dict[str, str]], named: tuple[str, ...]) -> list[list[str]]:
    """A line for each row of ours, beside the fastest other at the same case: by the same clock, or
    eager where no other was replayed. Cases are in their first order, whatever run a row is from.
    """
    lines = []
    cases = list(dict.fromkeys(tuple(row[name] for name in named) for row in rows))
    mine = [row for row in rows if row["provider"].startswith(report.OURS)]
    mine.sort(key=lambda row: cases.index(tuple(row[name] for name in named)))
    for row in mine:
        others = [
            other
            for other in rows
            if all(other[name] == row[name] for name in named)
            and not other["provider"].startswith(report.OURS)
        ]
        same = [other for other in others if other["timing"] == row["timing"]]
        ours = float(row["ms"])
        line = [*(row[name] for name in named), row["provider"], CLOCKS[row["timing"]]]
        line.append(f"{ours:,.1f}")
        if not others:
            lines.append([*line, "", "", ""])
            continue
        other = min(same or others, key=lambda each: float(each["ms"]))
        name = f"{other['provider']}{'' if same else ', eager'}"
        theirs = float(other["ms"])
        lines.append([*line, name, f"{theirs:,.1f}", f"{theirs / ours:.2f}"])
    return lines


MADE: dict[str, Callable[[list[workspace.Project], Path], str]] = {
    each.__name__: each for each in (front, glance, lost, steps, matrix)
}


def with_made(text: str, packages: list[workspace.Project], models: Path) -> str:
    """A page with its tables in the place of its marks, and without what it says where it has none.

    Raises:
        ValueError: a mark names none.
    """

    def made(mark: re.Match) -> str:
        if mark[1] not in MADE:
            raise ValueError(f"wanted a mark of {', '.join(MADE)}; got {mark[0]}")
        return MADE[mark[1]](packages, models)

    return MARK.sub(made, UNMADE.sub("", text))
