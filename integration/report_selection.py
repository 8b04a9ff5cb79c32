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
HEADER = ("layer", "keys", "selected", "window", "random", "sinks")
HEADER += ("divergence", "of uniform", "share, start", "share, end")
TOLD = (
    "HybridLM `mini`, what its indexers select after {steps} steps in {seconds:.0f} s, held out: "
    "[{name}](results/{name}). In the mean over the layers of the stack the selected keys hold "
    "{selected:.3f} of the dense attention's mass, {of_window:.1f} times as much as a window of as "
    "many and {of_random:.1f} times as much as a random choice before that window; behind the "
    "stack, in the layer that predicts the token after next, {last_of_window:.1f} and "
    "{last_of_random:.1f} times. The indexers learn from step {start} on; then their divergence "
    "from the attention is {begin:.3f} nats and at the end {kl:.3f}, {share:.2f} of that of an "
    "indexer that tells no key from another. In between it is at most {highest:.3f}, at step "
    "{worst}, and at least {lowest:.3f}, at step {best}. By layer, with that share when they begin "
    "to learn and at the end:"
)


class Result(NamedTuple):
    """A result file: rows of the last evaluation by layer and of that when the indexers begin to
    learn, means over the stack by step, and the step from which on they learn.
    """

    last: list[dict[str, Any]]
    first: list[dict[str, Any]]
    means: dict[int, dict[str, float]]
    start: int


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
    start = max((row["step"] for row in rows if row["phase"] == "alone"), default=0)
    last, first = ([row for row in rows if row["step"] == step] for step in (steps[-1], start))
    return Result(last, first, means, start)


def parts(folder: Path) -> list[str]:
    """Sentence, picture and table of every result file in ``results/``."""
    told = []
    for path in files(folder):
        result = read(path)
        assert result is not None
        last_step = max(result.means)
        final = result.means[last_step]
        divergence = {step: found["kl"] for step, found in result.means.items()}
        # A run may have been over before they began.
        later = [step for step in divergence if step > result.start] or [last_step]
        (behind,) = (row for row in result.last if row["layer"] == "last")
        worst, best = max(later, key=divergence.__getitem__), min(later, key=divergence.__getitem__)
        numbers = dict(
            steps=last_step,
            seconds=final["seconds"],
            selected=final["selected"],
            of_window=final["selected"] / final["window"],
            of_random=final["selected"] / final["random"],
            last_of_window=behind["selected"] / behind["window"],
            last_of_random=behind["selected"] / behind["random"],
            kl=final["kl"],
            share=final["kl"] / final["kl_uniform"],
            start=result.start,
            begin=divergence[result.start],
            worst=worst,
            highest=divergence[worst],
            best=best,
            lowest=divergence[best],
        )
        told.append(TOLD.format(name=path.name, **numbers))
        told.append(f"![What HybridLM's indexers select](results/{path.stem}.png)")
        lines = [HEADER, ("---", *("---:",) * (len(HEADER) - 1))]
        for row, before in zip(result.last, result.first, strict=True):
            masses = (f"{row[name]:.3f}" for name in ("selected", "window", "random", "sinks"))
            kls = (f"{row[name]:.3f}" for name in ("kl", "kl_uniform"))
            shares = (f"{each['kl'] / each['kl_uniform']:.2f}" for each in (before, row))
            lines.append((row["layer"], f"{row['keys']:.0f}", *masses, *kls, *shares))
        told.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return told


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("results/selection-*.csv")) if read(path)]
