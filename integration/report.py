"""The models' result files as the tables of their README and as pictures beside them.

    python integration/report.py [--check]

wants the sources of ``ci/testkit`` on the import path. Every CSV file in ``results/`` that has a
benchmark's columns is read; ``--check`` only says whether README or pictures are behind them.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import report_optimizers
import report_selection
import typer
from fusewright_testkit.report import BEGIN, COLOURS, COLUMNS, Results, with_made

FOLDER = Path(__file__).resolve().parent
STAGES = ("data", "fwd", "bwd", "optimizer")
HEADER = ("case", "provider", "tokens/s", "step", *STAGES, "TFLOPS", "GiB")
TOLD = (
    "Medians, the most tokens/s in bold. A step is data, forward pass, backward pass and "
    "optimizer; its time is the host's, in ms, the device waited for before and after, and "
    "tokens/s are B (M + N) over it. Stages, in ms, are between events on the device. TFLOPS "
    "counts the operations that the pruned model needs, for every provider; GiB is the peak of a "
    "step."
)
TEXT_HEADER = ("case", "provider", "timing", "tokens/s", "step", "GiB")
TOLD_OF_TEXT = (
    "{op}: a step is forward pass, loss, backward pass and AdamW on B T tokens that lie on the "
    "device, in ms; wall by the host's clock, graph where the whole step is replayed from a CUDA "
    "graph. GiB is the peak of a step."
)
LANGUAGE_MODELS = ("TitanMAC", "HybridLM")
SWITCHES_HEADER = (
    "case",
    "ours",
    "step",
    "tokens/s",
    "times before",
    "GiB",
    "waiting",
    "evaluation",
)
SWITCHES_COLUMNS = ["case", "ours", "ms", "mem_mib", "waiting", "evaluation"]
TOLD_OF_SWITCHES = (
    "What each of our ways saves in an eager step of TitanMAC, by itself and all together: "
    "[{name}](results/{name}). Waiting is the share of the host's time in a step that it reads "
    "numbers of the device, evaluation the share of a run's time that 10 batches every 50 steps "
    "take."
)
DEPTH_HEADER = ("case", "mode", "activations", "choices", "gradients", "peak")
DEPTH_COLUMNS = ["case", "mode", "peak_mib", "gradients_mib", "choices_mib", "activations_mib"]
TOLD_OF_DEPTH = (
    "Memory of an eager training step of HybridLM by its number of layers, in MiB, beside weights "
    "and optimizer: [{name}](results/{name}). Activations are the peak of both passes without "
    "choices, which are the selections that are kept for the backward pass, and without the "
    "gradients of layers that are done."
)


class Step(NamedTuple):
    """One provider at one case: milliseconds by pass, rate of the step, memory."""

    ms: dict[str, float]
    tokens_per_second: float
    tflops: float
    gib: float | None


Cases = dict[str, dict[str, Step]]


def read(path: Path) -> Cases | None:
    """Steps by case and provider, in the order of the file; None where its columns are others."""
    rows: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            return None
        for row in reader:
            if row["op"] == "TransformerNP":
                rows.setdefault((row["case"], row["provider"]), {})[row["pass"]] = row
    cases: Cases = {}
    for (case, provider), passes in rows.items():
        sizes = {name: int(value) for name, value in (word.split("=") for word in case.split())}
        ms = {name: float(row["ms"]) for name, row in passes.items()}
        step = passes["step"]
        cases.setdefault(case, {})[provider] = Step(
            ms,
            1e3 * sizes["B"] * (sizes["M"] + sizes["N"]) / ms["step"],
            float(step["tflops"]),
            float(step["mem_mib"]) / 1024 if step["mem_mib"] else None,
        )
    return cases


def text_rows(path: Path, op: str) -> list[tuple[str, ...]]:
    """A line for every step of a language model that the file has."""
    lines = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["op"] != op:
                continue
            sizes = dict(word.split("=") for word in row["case"].split())
            tokens, ms = int(sizes["B"]) * int(sizes["T"]), float(row["ms"])
            gib = f"{float(row['mem_mib']) / 1024:.1f}" if row["mem_mib"] else ""
            found = (row["timing"], f"{1e3 * tokens / ms:,.0f}", f"{ms:,.1f}", gib)
            lines.append((row["case"], row["provider"], *found))
    # Providers of a case side by side, ours first, whatever run they are from.
    order = list(dict.fromkeys(line[0] for line in lines))
    return sorted(lines, key=lambda line: (order.index(line[0]), not is_ours(line[1])))


def is_ours(provider: str) -> bool:
    return provider.startswith("fusewright")


def switch_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for each switch at each case; times before are against the case's first, none."""
    lines = []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        before = 0.0
        for row in reader if reader.fieldnames == SWITCHES_COLUMNS else ():
            ms = float(row["ms"])
            before = ms if row["ours"] == "none" else before
            sizes = dict(word.split("=") for word in row["case"].split())
            tokens = int(sizes["B"]) * int(sizes["T"])
            shares = (f"{100 * float(row[name]):.1f} %" for name in ("waiting", "evaluation"))
            gib = f"{float(row['mem_mib']) / 1024:.1f}" if row["mem_mib"] else ""
            found = f"{ms:,.1f}", f"{1e3 * tokens / ms:,.0f}", f"{before / ms:.2f}", gib
            lines.append((row["case"], row["ours"], *found, *shares))
    return lines


def depth_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for each mode at each depth."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader) if reader.fieldnames == DEPTH_COLUMNS else []
    names = [f"{name}_mib" for name in DEPTH_HEADER[2:]]
    mib = [[f"{float(row[name]):,.1f}" if row[name] else "" for name in names] for row in rows]
    return [(row["case"], row["mode"], *found) for row, found in zip(rows, mib, strict=True)]


def result_files(folder: Path) -> dict[Path, Cases]:
    """Files with a benchmark's columns; one of language models alone has no cases."""
    found = {path: read(path) for path in sorted(folder.glob("results/*.csv"))}
    return {path: cases for path, cases in found.items() if cases is not None}


def table(cases: Cases) -> str:
    """A markdown table, a line for each provider at each case."""
    lines = [HEADER, ("---", "---", *["---:"] * (len(HEADER) - 2))]
    for case, steps in cases.items():
        most = max(step.tokens_per_second for step in steps.values())
        for provider, step in steps.items():
            rate = f"{step.tokens_per_second:,.0f}"
            lines.append(
                (
                    case,
                    provider,
                    f"**{rate}**" if step.tokens_per_second == most else rate,
                    *(f"{step.ms[name]:,.1f}" for name in ("step", *STAGES)),
                    f"{step.tflops:.0f}",
                    "" if step.gib is None else f"{step.gib:.1f}",
                )
            )
    return markdown(lines)


def markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gaps(cases: Cases) -> str:
    """What was measured at other cases of the file only; a provider that fails has no row."""
    # "sdpa (cudnn)" at one case may be "sdpa (flash)" at another.
    found = {case: {name.partition(" (")[0] for name in steps} for case, steps in cases.items()}
    every = sorted(set().union(*found.values()))
    missing = {case: [name for name in every if name not in found[case]] for case in cases}
    told = [f"{', '.join(names)} at {case}" for case, names in missing.items() if names]
    return f"Not measured: {'; '.join(told)}." if told else ""


def made(folder: Path) -> str:
    """What belongs between the marks of the README."""
    parts = []
    for path, cases in result_files(folder).items():
        environment = Results(path, {}).environment
        told = f"**{environment}**, bf16: [{path.name}](results/{path.name})."
        parts.append(f"{told} {TOLD}" if cases else told)
        if cases:
            parts.append(f"![{environment}: tokens per second](results/{path.stem}.png)")
            parts.append(table(cases))
        if missing := gaps(cases):
            parts.append(missing)
        for op in LANGUAGE_MODELS:
            if lines := text_rows(path, op):
                parts.append(TOLD_OF_TEXT.format(op=op))
                parts.append(markdown([TEXT_HEADER, ("---",) * 3 + ("---:",) * 3, *lines]))
        for name, about, header, lines_of in (
            ("switches", TOLD_OF_SWITCHES, SWITCHES_HEADER, switch_rows),
            ("depth", TOLD_OF_DEPTH, DEPTH_HEADER, depth_rows),
        ):
            beside = path.with_name(f"{name}-{path.name}")
            if beside.is_file():
                parts.append(about.format(name=beside.name))
                rule = ("---",) * 2 + ("---:",) * (len(header) - 2)
                parts.append(markdown([header, rule, *lines_of(beside)]))
    parts += report_optimizers.parts(folder) + report_selection.parts(folder)
    return "\n\n".join(parts) or "Nothing has been measured yet."


def draw(path: Path, cases: Cases) -> Any:
    """A panel for each case, a bar for each provider."""
    from matplotlib.figure import Figure

    providers = dict.fromkeys(itertools.chain.from_iterable(cases.values()))
    # Ours has the colour that it has in the packages' pictures.
    order = sorted(providers, key=lambda name: not is_ours(name))
    colours = dict(zip(order, itertools.cycle(COLOURS), strict=False))
    figure = Figure(figsize=(3.6 * len(cases) + 0.6, 3.8), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for panel, (case, steps) in zip(panels, cases.items(), strict=True):
        for place, (provider, step) in enumerate(steps.items()):
            bar = panel.bar(place, step.tokens_per_second, color=colours[provider])
            handles.setdefault(provider, bar)
        panel.set(title=case, xticks=[])
        panel.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", linewidth=0.5, alpha=0.5)
        panel.set_axisbelow(True)
    panels[0].set_ylabel("tokens/s")
    figure.suptitle(f"{Results(path, {}).environment}: TransformerNP, one training step in bf16")
    names = [name for name in providers if name in handles]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(6, len(names)),
        frameon=False,
    )
    return figure


def problems(folder: Path) -> list[str]:
    """What of README and pictures is behind the result files."""
    readme = folder / "README.md"
    text, files = readme.read_text(), result_files(folder)
    compared = report_optimizers.files(folder) + report_selection.files(folder)
    if not (files or compared or BEGIN in text):
        return []
    told = [] if text == with_made(text, made(folder)) else [f"{readme} is behind its results"]
    # Those of trainings are drawn where they are trained.
    drawn = [path for path, cases in files.items() if cases]
    pictures = [path.with_suffix(".png") for path in [*drawn, *compared]]
    return told + [f"{path} is missing" for path in pictures if not path.is_file()]


def main(
    folder: Path = typer.Argument(FOLDER, help="the folder of README.md and results/"),
    check: bool = typer.Option(False, help="write nothing; fail where something is behind"),
) -> None:
    """Write the models' result table and pictures, or check them."""
    if check:
        told = problems(folder)
        for problem in told:
            typer.echo(f"{problem}: python integration/report.py", err=True)
        raise typer.Exit(bool(told))
    readme = folder / "README.md"
    readme.write_text(with_made(readme.read_text(), made(folder)))
    for path, cases in result_files(folder).items():
        if cases:
            # Without the library's version, the same results give the same bytes.
            picture = path.with_suffix(".png")
            draw(path, cases).savefig(picture, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    typer.run(main)
