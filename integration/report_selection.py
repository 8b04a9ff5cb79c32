"""What HybridLM's indexers select, as a sentence, a picture and a table: of what
``fusewright_models.selection`` wrote.

``report.py`` puts it between the marks of the README.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

COLUMNS = ["step", "seconds", "phase", "layer", "bits_per_byte", "kl", "kl_uniform", "keys"]
COLUMNS += ["selected", "window", "random", "sinks"]
HEADER = ("layer", "keys", "selected", "window", "random", "sinks", "divergence", "of uniform")
TOLD = (
    "HybridLM `mini`, what its indexers select after {steps} steps in {seconds:.0f} s, held out: "
    "[{name}](results/{name}). In the mean over the layers of the stack the selected keys hold "
    "{selected:.3f} of the dense attention's mass, {of_window:.1f} times as much as a window of as "
    "many and {of_random:.1f} times as much as a random choice before that window. The indexers' "
    "divergence from the attention is {kl:.3f} nats, {share:.2f} of that of an indexer that tells "
    "no key from another; at its highest, at step {worst}, it is {highest:.3f}."
)


class Result(NamedTuple):
    """A result file: rows of the last evaluation by layer, means over the stack by step."""

    last: list[dict[str, Any]]
    means: dict[int, dict[str, float]]


def read(path: Path) -> Result | None:
    """None where the columns are others."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows: list[dict[str, Any]] = list(reader)
        if reader.fieldnames != COLUMNS or not rows:
            return None
    numbers = [name for name in COLUMNS if name not in ("step", "phase", "layer")]
    for row in rows:
        row |= {name: float(row[name]) for name in numbers} | {"step": int(row["step"])}
    steps = sorted({row["step"] for row in rows})
    stack = [row for row in rows if row["layer"] != "last"]
    means = {
        step: {name: mean(row[name] for row in stack if row["step"] == step) for name in numbers}
        for step in steps
    }
    return Result([row for row in rows if row["step"] == steps[-1]], means)


def parts(folder: Path) -> list[str]:
    """Sentence, picture and table of every result file in ``results/``."""
    told = []
    for path in files(folder):
        result = read(path)
        assert result is not None
        last_step = max(result.means)
        final = result.means[last_step]
        worst = max(result.means, key=lambda step: result.means[step]["kl"])
        numbers = dict(
            steps=last_step,
            seconds=final["seconds"],
            selected=final["selected"],
            of_window=final["selected"] / final["window"],
            of_random=final["selected"] / final["random"],
            kl=final["kl"],
            share=final["kl"] / final["kl_uniform"],
            worst=worst,
            highest=result.means[worst]["kl"],
        )
        told.append(TOLD.format(name=path.name, **numbers))
        told.append(f"![What HybridLM's indexers select](results/{path.stem}.png)")
        lines = [HEADER, ("---", *("---:",) * (len(HEADER) - 1))]
        for row in result.last:
            masses = (f"{row[name]:.3f}" for name in ("selected", "window", "random", "sinks"))
            kls = (f"{row[name]:.3f}" for name in ("kl", "kl_uniform"))
            lines.append((row["layer"], f"{row['keys']:.0f}", *masses, *kls))
        told.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return told


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("results/selection-*.csv")) if read(path)]
