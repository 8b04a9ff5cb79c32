"""The models' result files as tables and pictures beside them, and as short tables of their pages.

    python integration/report.py [--check]

wants the sources of the models and of ``ci/testkit`` on the import path. Every CSV file in
``results/`` that has the columns of a benchmark or of a study is read. The whole tables go into
``results/tables.md``; the pages of the models get a short one between two marks. ``--check`` only
says whether they or pictures are behind the files.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import typer
from fusewright_models.bench.depth import COLUMNS as DEPTH_COLUMNS
from fusewright_models.bench.switches import COLUMNS as SWITCHES_COLUMNS
from fusewright_models.studies import results as studies
from fusewright_models.studies.attention_mass import MASSES
from fusewright_models.studies.compare_optimizers import Point as OptimizerPoint
from fusewright_models.studies.selection_points import LAST
from fusewright_models.studies.selection_points import Point as SelectionPoint
from fusewright_testkit.report import COLOURS, COLUMNS, TABLES, Results, with_made

FOLDER = Path(__file__).resolve().parent
# The pages of the models, beside the folder of this script, and whose steps they show.
PAGES = {"transformer-np": "TransformerNP", "titan-mac": "TitanMAC", "hybrid": "HybridLM"}
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
TOLD_OF_SWITCHES = (
    "What each of our ways saves in an eager step of TitanMAC, by itself and all together: "
    "[{name}]({name}). Waiting is the share of the host's time in a step that it reads "
    "numbers of the device, evaluation the share of a run's time that 10 batches every 50 steps "
    "take."
)
DEPTH_HEADER = ("case", "mode", "activations", "choices", "gradients", "peak")
TOLD_OF_DEPTH = (
    "Memory of an eager training step of HybridLM by its number of layers, in MiB, beside weights "
    "and optimizer: [{name}]({name}). Activations are the peak of both passes without "
    "choices, which are the selections that are kept for the backward pass, and without the "
    "gradients of layers that are done."
)
COMPARED = {
    "titan-mac": "TitanMAC, held-out bits per byte",
    "transformer-np": "TransformerNP on digits, minus held-out log-likelihood in nats per target",
}
AGAINST = "adamw"
OPTIMIZER_HEADER = (
    "optimizer",
    "peak rate",
    "ended",
    "score",
    "deviation",
    f"seeds better than {AGAINST}",
    "seconds",
)
TOLD_OF_OPTIMIZERS = (
    "{model} after {steps} steps from each of {seeds} seeds, less is better: "
    "[{name}]({name}). Peak rates are the best of {rates} each, by runs from other seeds, "
    "{grid_seeds} a rate; a rate at an end of its grid is marked *. Scores are of the seeds whose "
    "runs ended with a finite one. Seconds are of all steps of a run."
)
SELECTION_HEADER = ("layer", "keys", *MASSES)
SELECTION_HEADER += ("divergence", "of uniform", "share, start", "share, end")
TOLD_OF_SELECTION = (
    "HybridLM `mini`, what its indexers select after {steps} steps in {seconds:.0f} s, held out: "
    "[{name}]({name}). In the mean over the layers of the stack the selected keys hold "
    "{selected:.3f} of the dense attention's mass, {of_window:.1f} times as much as a window of as "
    "many and {of_random:.1f} times as much as a random choice before that window; behind the "
    "stack, in the layer that predicts the token after next, {last_of_window:.1f} and "
    "{last_of_random:.1f} times. The indexers learn from step {start} on; then their divergence "
    "from the attention is {begin:.3f} nats and at the end {kl:.3f}, {share:.2f} of that of an "
    "indexer that tells no key from another. In between it is at most {highest:.3f}, at step "
    "{worst}, and at least {lowest:.3f}, at step {best}. By layer, with that share when they begin "
    "to learn and at the end:"
)
TOLD_OF_STEPS = (
    "{environment}: tokens/s of training steps in bf16, the loss of ours checked before it is "
    "timed. Eager steps are by the host's clock, replayed ones whole CUDA graphs. "
    "[All rows]({tables})."
)
SHORT_HEADER = ("case", "fusewright, eager", "replayed", "fastest other, eager")


class Step(NamedTuple):
    """One provider at one case: milliseconds by pass, rate of the step, memory."""

    ms: dict[str, float]
    tokens_per_second: float
    tflops: float
    gib: str


Cases = dict[str, dict[str, Step]]
Row = dict[str, str]


def rows_of(path: Path, columns: list[str]) -> list[Row] | None:
    """None where the columns are others."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader) if reader.fieldnames == columns else None


def is_ours(provider: str) -> bool:
    return provider.startswith("fusewright")


def rate_of(row: Row) -> float:
    """Tokens per second of a step."""
    sizes = {name: int(value) for name, value in (word.split("=") for word in row["case"].split())}
    tokens = sizes["B"] * (sizes["T"] if "T" in sizes else sizes["M"] + sizes["N"])
    return 1e3 * tokens / float(row["ms"])


def gib(row: Row) -> str:
    return f"{float(row['mem_mib']) / 1024:.1f}" if row["mem_mib"] else ""


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 2) -> str:
    """A table, all columns but the first few to the right."""
    rule = ("---",) * left + ("---:",) * (len(header) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def read(path: Path) -> Cases | None:
    """Steps of TransformerNP by case and provider, in the order of the file; None where its columns
    are others.
    """
    rows = rows_of(path, COLUMNS)
    if rows is None:
        return None
    passes: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["op"] == "TransformerNP":
            passes.setdefault((row["case"], row["provider"]), {})[row["pass"]] = row
    cases: Cases = {}
    for (case, provider), found in passes.items():
        ms = {name: float(row["ms"]) for name, row in found.items()}
        step = found["step"]
        told = Step(ms, rate_of(step), float(step["tflops"]), gib(step))
        cases.setdefault(case, {})[provider] = told
    return cases


def text_rows(path: Path, op: str) -> list[tuple[str, ...]]:
    """A line for every step of a language model that the file has."""
    found = [row for row in rows_of(path, COLUMNS) or () if row["op"] == op]
    # Providers of a case side by side, ours first, whatever run they are from.
    order = list(dict.fromkeys(row["case"] for row in found))
    found.sort(key=lambda row: (order.index(row["case"]), not is_ours(row["provider"])))
    named = ("case", "provider", "timing")
    return [
        (
            *(row[name] for name in named),
            f"{rate_of(row):,.0f}",
            f"{float(row['ms']):,.1f}",
            gib(row),
        )
        for row in found
    ]


def switch_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for each switch at each case; times before are against the case's first, none."""
    lines, before = [], 0.0
    for row in rows_of(path, SWITCHES_COLUMNS) or ():
        ms = float(row["ms"])
        before = ms if row["ours"] == "none" else before
        shares = (f"{100 * float(row[name]):.1f} %" for name in ("waiting", "evaluation"))
        times = f"{ms:,.1f}", f"{rate_of(row):,.0f}", f"{before / ms:.2f}"
        lines.append((row["case"], row["ours"], *times, gib(row), *shares))
    return lines


def depth_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for each mode at each depth."""
    names = [f"{name}_mib" for name in DEPTH_HEADER[2:]]
    return [
        (row["case"], row["mode"], *(f"{float(row[x]):,.1f}" if row[x] else "" for x in names))
        for row in rows_of(path, DEPTH_COLUMNS) or ()
    ]


def result_files(folder: Path) -> dict[Path, Cases]:
    """Files with a benchmark's columns; one of language models alone has no cases."""
    found = {path: read(path) for path in sorted(folder.glob("results/*.csv"))}
    return {path: cases for path, cases in found.items() if cases is not None}


def table(cases: Cases) -> str:
    """A markdown table, a line for each provider at each case."""
    lines = []
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
                    step.gib,
                )
            )
    return markdown(HEADER, lines)


def gaps(cases: Cases) -> str:
    """What was measured at other cases of the file only; a provider that fails has no row."""
    # "sdpa (cudnn)" at one case may be "sdpa (flash)" at another.
    found = {case: {name.partition(" (")[0] for name in steps} for case, steps in cases.items()}
    every = sorted(set().union(*found.values()))
    missing = {case: [name for name in every if name not in found[case]] for case in cases}
    told = [f"{', '.join(names)} at {case}" for case, names in missing.items() if names]
    return f"Not measured: {'; '.join(told)}." if told else ""


class Runs(NamedTuple):
    """Of one optimizer, with the rate that its grid chose.

    Attributes:
        lr: that rate.
        rates: of the grid.
        grid_seeds: how many runs chose among them, of each.
        seeds: how many runs began.
        scores: at the last step, by seed; without seeds whose run did not come there, or not with a
            finite score.
        seconds: mean of those runs.
    """

    lr: float
    rates: list[float]
    grid_seeds: int
    seeds: int
    scores: dict[int, float]
    seconds: float

    @property
    def at_end(self) -> bool:
        return len(self.rates) > 1 and self.lr in (min(self.rates), max(self.rates))


def runs_of(rows: list[OptimizerPoint]) -> dict[str, Runs]:
    """By optimizer."""
    steps = max(row.step for row in rows)
    found = {}
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        mine = [row for row in rows if row.optimizer == optimizer]
        runs = [row for row in mine if row.phase == "run"]
        ends = [row for row in runs if row.step == steps and isfinite(row.score)]
        grid = [row for row in mine if row.phase == "grid"]
        found[optimizer] = Runs(
            runs[0].lr,
            sorted({row.lr for row in grid}),
            len({row.seed for row in grid}),
            len({row.seed for row in runs}),
            {row.seed: row.score for row in ends},
            mean(row.seconds for row in ends) if ends else 0.0,
        )
    return found


def optimizer_lines(found: dict[str, Runs]) -> list[tuple[str, ...]]:
    """The best mean first; what did not come to its end from any seed last."""
    against = found[AGAINST].scores if AGAINST in found else {}

    def line(name: str, runs: Runs) -> tuple[str, ...]:
        rate = f"{runs.lr:g}{' *' if runs.at_end else ''}"
        scores = list(runs.scores.values())
        ended = f"{len(scores)} of {runs.seeds}"
        if not scores:
            return name, rate, ended, "not finite", "", "", ""
        better = sum(score < against.get(seed, score) for seed, score in runs.scores.items())
        spread = f"{stdev(scores):.4f}" if len(scores) > 1 else ""
        told = "" if name == AGAINST or not against else f"{better} of {len(scores)}"
        return name, rate, ended, f"{mean(scores):.4f}", spread, told, f"{runs.seconds:.1f}"

    def place(name: str) -> float:
        scores = found[name].scores.values()
        return mean(scores) if scores else float("inf")

    return [line(name, found[name]) for name in sorted(found, key=place)]


def optimizer_parts(path: Path, rows: list[OptimizerPoint]) -> list[str]:
    """Paragraph, picture and table of a comparison."""
    found, name = runs_of(rows), COMPARED[rows[0].model]
    told = TOLD_OF_OPTIMIZERS.format(
        model=name,
        name=path.name,
        steps=max(row.step for row in rows),
        seeds=max(runs.seeds for runs in found.values()),
        rates=max(len(runs.rates) for runs in found.values()),
        grid_seeds=max(runs.grid_seeds for runs in found.values()),
    )
    table = markdown(OPTIMIZER_HEADER, optimizer_lines(found), left=1)
    return [told, f"![{name}, by optimizer]({path.stem}.png)", table]


def selection_parts(path: Path, rows: list[SelectionPoint]) -> list[str]:
    """Sentence, picture and table of what indexers select."""
    stack = [row for row in rows if row.layer != LAST]
    steps = sorted({row.step for row in rows})
    # From there on the indexers learn.
    start = max((row.step for row in rows if row.phase == "alone"), default=0)

    def of_stack(name: str, step: int = steps[-1]) -> float:
        return mean(getattr(row, name) for row in stack if row.step == step)

    divergence = {step: of_stack("kl", step) for step in steps}
    # A run may have been over before they began.
    later = [step for step in steps if step > start] or steps[-1:]
    last, first = ([row for row in rows if row.step == step] for step in (steps[-1], start))
    (behind,) = (row for row in last if row.layer == LAST)
    worst, best = max(later, key=divergence.__getitem__), min(later, key=divergence.__getitem__)
    told = TOLD_OF_SELECTION.format(
        name=path.name,
        steps=steps[-1],
        seconds=of_stack("seconds"),
        selected=of_stack("selected"),
        of_window=of_stack("selected") / of_stack("window"),
        of_random=of_stack("selected") / of_stack("random"),
        last_of_window=behind.selected / behind.window,
        last_of_random=behind.selected / behind.random,
        kl=of_stack("kl"),
        share=of_stack("kl") / of_stack("kl_uniform"),
        start=start,
        begin=divergence[start],
        worst=worst,
        highest=divergence[worst],
        best=best,
        lowest=divergence[best],
    )
    lines = []
    for row, before in zip(last, first, strict=True):
        numbers = (f"{getattr(row, name):.3f}" for name in (*MASSES, "kl", "kl_uniform"))
        shares = (f"{each.kl / each.kl_uniform:.2f}" for each in (before, row))
        lines.append((row.layer, f"{row.keys:.0f}", *numbers, *shares))
    picture = f"![What HybridLM's indexers select]({path.stem}.png)"
    return [told, picture, markdown(SELECTION_HEADER, lines, left=1)]


STUDIES = (
    ("optimizers-*.csv", OptimizerPoint, optimizer_parts),
    ("selection-*.csv", SelectionPoint, selection_parts),
)


def study_parts(folder: Path) -> dict[Path, list[str]]:
    """Paragraph, picture and table of each study's result file."""
    found = {}
    for pattern, kind, parts in STUDIES:
        for path in sorted(folder.glob(f"results/{pattern}")):
            if rows := studies.read(kind, path):
                found[path] = parts(path, rows)  # type: ignore[arg-type]
    return found


def made(folder: Path) -> str:
    """What belongs into ``results/tables.md``."""
    parts = []
    for path, cases in result_files(folder).items():
        environment = Results(path, {}).environment
        told = f"**{environment}**, bf16: [{path.name}]({path.name})."
        parts.append(f"{told} {TOLD}" if cases else told)
        if cases:
            parts.append(f"![{environment}: tokens per second]({path.stem}.png)")
            parts.append(table(cases))
        if missing := gaps(cases):
            parts.append(missing)
        for op in LANGUAGE_MODELS:
            if lines := text_rows(path, op):
                parts.append(TOLD_OF_TEXT.format(op=op))
                parts.append(markdown(TEXT_HEADER, lines, left=3))
        for name, about, header, lines_of in (
            ("switches", TOLD_OF_SWITCHES, SWITCHES_HEADER, switch_rows),
            ("depth", TOLD_OF_DEPTH, DEPTH_HEADER, depth_rows),
        ):
            beside = path.with_name(f"{name}-{path.name}")
            if beside.is_file():
                parts.append(about.format(name=beside.name))
                parts.append(markdown(header, lines_of(beside)))
    parts += itertools.chain.from_iterable(study_parts(folder).values())
    return "\n\n".join(["# The models: measured times and studies", *parts]) + "\n"


def short(folder: Path, op: str) -> str:
    """What belongs between the marks of a model's page: of each case of the last environment that
    has some the most tokens/s of ours, eager and replayed, and of the fastest other provider.
    """
    for path in reversed(result_files(folder)):
        cases: dict[str, list[Row]] = {}
        for row in rows_of(path, COLUMNS) or ():
            if row["op"] == op and row["pass"] == "step":
                cases.setdefault(row["case"], []).append(row)
        lines = [(case, *fastest(rows)) for case, rows in cases.items()]
        if lines:
            tables = f"../../{folder.name}/{TABLES}"
            about = TOLD_OF_STEPS.format(environment=Results(path, {}).environment, tables=tables)
            return f"{about}\n\n{markdown(SHORT_HEADER, lines, left=1)}"
    return "Nothing has been measured yet."


def fastest(rows: list[Row]) -> tuple[str, str, str]:
    """Tokens/s of ours, eager and replayed, and of another provider, with its name."""
    ours, graph, others = (
        max(
            (
                (rate_of(row), row["provider"])
                for row in rows
                if is_ours(row["provider"]) == mine and row["timing"] == timing
            ),
            default=None,
        )
        for mine, timing in ((True, "wall"), (True, "graph"), (False, "wall"))
    )
    told = [f"{found[0]:,.0f}" if found else "" for found in (ours, graph)]
    return told[0], told[1], f"{others[1]} {others[0]:,.0f}" if others else ""


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


def written(folder: Path) -> dict[Path, str]:
    """Every file of words that follows from the results, and what it is to say."""
    files = {folder / TABLES: made(folder)}
    for page, op in PAGES.items():
        path = folder.parent / f"docs/models/{page}.md"
        if path.is_file():
            files[path] = with_made(path.read_text(), short(folder, op))
    return files


def problems(folder: Path) -> list[str]:
    """What of tables, pages and pictures is behind the result files."""
    told = [
        f"{path} is behind its results"
        for path, text in written(folder).items()
        if not (path.is_file() and path.read_text() == text)
    ]
    # Those of trainings are drawn where they are trained.
    drawn = [path for path, cases in result_files(folder).items() if cases]
    pictures = [path.with_suffix(".png") for path in [*drawn, *study_parts(folder)]]
    return told + [f"{path} is missing" for path in pictures if not path.is_file()]


def main(
    folder: Path = typer.Argument(FOLDER, help="the folder of results/"),
    check: bool = typer.Option(False, help="write nothing; fail where something is behind"),
) -> None:
    """Write the models' result tables and pictures, or check them."""
    if check:
        told = problems(folder)
        for problem in told:
            typer.echo(f"{problem}: python integration/report.py", err=True)
        raise typer.Exit(bool(told))
    for path, text in written(folder).items():
        path.write_text(text)
    for path, cases in result_files(folder).items():
        if cases:
            # Without the library's version, the same results give the same bytes.
            picture = path.with_suffix(".png")
            draw(path, cases).savefig(picture, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    typer.run(main)
