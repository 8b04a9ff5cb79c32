"""Steps of a result file as bars: tokens a second of every model, case and provider."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.figure import Figure

from .. import figures
from .results import Row

# What the names in cases count.
WORDS = {"M": "{} context points", "N": "{} targets"}
PANEL = "tokens/s, captured: replayed from a CUDA graph, all others eager"
# A step that is replayed from a CUDA graph beside eager ones of the same provider.
CAPTURED = "-captured"


def rate_of(row: Row) -> float:
    """Tokens per second of a step."""
    sizes = {name: int(value) for name, value in (word.split("=") for word in row["case"].split())}
    tokens = sizes["B"] * (sizes["T"] if "T" in sizes else sizes["M"] + sizes["N"])
    return 1e3 * tokens / float(row["ms"])


def draw(rows: Iterable[Row], environment: str) -> Figure:
    """A strip for each model, in it a group of bars for each case."""
    by_model: dict[str, dict[str, figures.Group]] = {}
    for row in rows:
        if row["pass"] == "step":
            name, rate = row["provider"], rate_of(row)
            if row["timing"] == "graph":
                name = name.removesuffix(CAPTURED) + CAPTURED
            groups = by_model.setdefault(row["op"], {})
            groups.setdefault(row["case"], {})[name] = figures.Bar(rate, 1.0 / rate)
    strips = []
    for model, groups in by_model.items():
        cases = list(groups)
        labels = {case: figures.case_in_words(case, cases, WORDS) for case in cases}
        panel = figures.Panel(PANEL, groups)
        strips.append(figures.Strip(model, figures.common_words(cases, WORDS), [panel], labels))
    return figures.draw_bars(f"A training step in bf16 on {environment}", strips)
