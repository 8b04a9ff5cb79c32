"""One page of a run, which needs nothing beside it: report.html."""

from __future__ import annotations

import base64
import io
import re
import statistics
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import matplotlib
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from ..run_folder import RunFolder, is_of_training
from .incidents import Incidents
from .plots import draw_curves, draw_speed
from .record import Spent, readable

REPORT, SAMPLE, PREDICTIONS = "report.html", "sample.txt", "predictions.png"
# What a picture would say of itself.
METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def write_report(folder: RunFolder) -> None:
    """From what the folder holds, also of a run that has not come to its end.

    Raises:
        FileNotFoundError: it holds no run.
        ValueError: a file of it is damaged.
        NotWritten: the disk is full, for instance.
    """
    # Names of files may be in no encoding.
    folder.write(REPORT, page(folder).encode(errors="replace"))


def page(folder: RunFolder) -> str:
    """The text of it; likewise."""
    config, lines = folder.read_config(), folder.read_metrics()
    training = [line for line in lines if is_of_training(line)]
    evaluations = [line for line in lines if not is_of_training(line)]
    step = training[-1]["step"] if training else 0
    looked = Incidents(config.get("clip_norm", 1.0))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath(REPORT).read_text())
    sample, predictions = folder.path / SAMPLE, folder.path / PREDICTIONS
    return template.render(
        title=f"{config.get('model', 'run')}: {folder.path.resolve().name}",
        state=f"Step {step:,} of {config.get('steps', step):,}, torch {config.get('torch', '')}.",
        scores=scores_of(evaluations),
        curves=svg(draw_curves(lines), "curves"),
        speed=svg(draw_speed(training), "speed"),
        speeds=list(speeds_of(training, evaluations)),
        incidents=[text for line in lines for text in looked.look(line)],
        predictions=encoded(predictions.read_bytes()) if predictions.exists() else "",
        sample=sample.read_bytes().decode(errors="replace") if sample.exists() else None,
        settings=[(name, "" if x is None else x) for name, x in config.items()],
    )


def scores_of(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A row for each number of the first evaluation and the last."""
    if not evaluations:
        return None
    shown = [evaluations[0], *evaluations[1:][-1:]]
    names = [name for name in shown[-1] if name != "step"]
    rows = [(readable(name), [_number(line.get(name)) for line in shown]) for name in names]
    return {"steps": [line["step"] for line in shown], "rows": rows}


def speeds_of(
    training: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """What is told of all lines together, by name."""
    for name, text in (("tokens_per_second", "tokens a second"), ("mfu", "MFU")):
        values = [line[name] for line in training if name in line]
        if values:
            middle = statistics.median(values)
            yield f"{text}, median", f"{middle:.1%}" if name == "mfu" else f"{middle:,.0f}"
    peaks = [line["peak_memory_mib"] for line in training if "peak_memory_mib" in line]
    if peaks:
        yield "peak memory, GiB", f"{max(peaks) / 2**10:.2f}"
    spent = Spent()
    for line in (*training, *evaluations):
        spent.look(line)
    yield "training, s", f"{spent.training:,.1f}"
    if spent.training + spent.evaluating:
        yield "evaluations, s", f"{spent.evaluating:,.1f} ({spent.share:.1%})"


def svg(figure: Figure, name: str) -> str:
    """A figure as part of a page, whose other parts have none of its names."""
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", metadata=METADATA)
    text = drawn.getvalue()
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text[text.index("<svg") :])


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
