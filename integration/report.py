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
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import typer
from fusewright_models import figures
from fusewright_models.bench.depth import COLUMNS as DEPTH_COLUMNS
from fusewright_models.bench.generation import COLUMNS as GENERATE_COLUMNS
from fusewright_models.bench.matrix import AGAINST as MATRIX_AGAINST
from fusewright_models.bench.matrix import COLUMNS as MATRIX_COLUMNS
from fusewright_models.bench.matrix import NAMED as MATRIX_NAMED
from fusewright_models.bench.pictures import draw, rate_of
from fusewright_models.bench.switches import COLUMNS as SWITCHES_COLUMNS
from fusewright_models.studies import results as studies
from fusewright_models.studies.attention_mass import MASSES
from fusewright_models.studies.compare_optimizers import Point as OptimizerPoint
from fusewright_models.studies.pictures import drawn_from, redraw
from fusewright_models.studies.selection import LAST
from fusewright_models.studies.selection import Point as SelectionPoint
from fusewright_testkit.report import COLUMNS, TABLES, environment_of, with_made
from fusewright_testkit.tabulated import headed

FOLDER = Path(__file__).resolve().parent
# The pages of the models, beside the folder of this script, and whose steps they show.
PAGES = {"transformer-np": "TransformerNP", "titan-mac": "TitanMAC", "hybrid": "HybridLM"}
STAGES = ("data", "fwd", "bwd", "optimizer")
# Headers are those of the markdown tables; columns from the third on are numbers, if no other.
HEADER = f"case | provider | tokens/s | step | {' | '.join(STAGES)} | TFLOPS | GiB"
TOLD = (
    "Medians, the most tokens/s in bold. A step is data, forward pass, backward pass and "
    "optimizer; its time is the host's, in ms, the device waited for before and after, and "
    "tokens/s are B (M + N) over it. Stages, in ms, are between events on the device. Of "
    "fusewright-captured a step is one replay of a CUDA graph, between events; the data is drawn "
    "in it, and gradients are clipped. TFLOPS counts the operations that the pruned model needs, "
    "for every provider; GiB is the peak of a step."
)
TEXT_HEADER = "case | provider | timing | tokens/s | step | GiB"
TOLD_OF_TEXT = (
    "{op}: a step is forward pass, loss, backward pass and AdamW on B T tokens that lie on the "
    "device, in ms; wall by the host's clock, graph where the whole step is replayed from a CUDA "
    "graph. GiB is the peak of a step."
)
LANGUAGE_MODELS = ("TitanMAC", "HybridLM", "Llama")
SWITCHES_HEADER = "case | ours | step | tokens/s | times before | GiB | waiting | evaluation"
TOLD_OF_SWITCHES = (
    "What each of our ways saves in an eager step of TitanMAC, by itself and all together: "
    "[{name}]({name}). Waiting is the share of the host's time in a step that it reads "
    "numbers of the device, evaluation the share of a run's time that 10 batches every 50 steps "
    "take."
)
MATRIX_HEADER = (
    f"{' | '.join(MATRIX_NAMED)} | tokens/s | step | TFLOPS | MFU | GiB | times {MATRIX_AGAINST[0]}"
)
TOLD_OF_MATRIX = (
    "A step of TransformerNP by every provider, with and without checkpointing and CUDA graphs: "
    "[{name}]({name}). Steps are in ms, wall by the host's clock, graph of one replay. TFLOPS "
    "counts what the pruned model needs, once; MFU is its share of the dense peak in bf16 of the "
    f"GPU's data sheet; GiB is the peak of a step; times are against eager {MATRIX_AGAINST[0]} "
    "that keeps everything."
)
DEPTHS = ("activations", "choices", "gradients", "peak")
DEPTH_HEADER = f"case | mode | {' | '.join(DEPTHS)}"
TOLD_OF_DEPTH = (
    "Memory of an eager training step of HybridLM by its number of layers, in MiB, beside weights "
    "and optimizer: [{name}]({name}). Activations are the peak of both passes without "
    "choices, which are the selections that are kept for the backward pass, and without the "
    "gradients of layers that are done."
)
GENERATE_HEADER = "model | case | provider | reading | drawing | accepted | GiB"
TOLD_OF_GENERATE = (
    "Texts that are continued, with drawn weights, in tokens/s of all B prompts together: "
    "[{name}]({name}). Reading is of their T tokens at once, drawing of what follows them, "
    "speculative by drafts, one prompt after the other; accepted is the share of these."
)
COMPARED = {
    "titan-mac": "TitanMAC, held-out bits per byte",
    "transformer-np": "TransformerNP on digits, minus held-out log-likelihood in nats per target",
}
AGAINST = "adamw"
OPTIMIZER_HEADER = (
    f"optimizer | peak rate | ended | score | deviation | seeds better than {AGAINST} | seconds"
)
SELECTION_HEADER = f"layer | keys | {' | '.join(MASSES)} | divergence | of uniform"
SELECTION_HEADER += " | share, start | share, end"
TOLD_OF_STEPS = (
    "{environment}: tokens/s of training steps in bf16, the loss of ours checked before it is "
    "timed. Eager steps are by the host's clock, replayed ones whole CUDA graphs. "
    "[All rows]({tables})."
)
SHORT_HEADER = "case | fusewright, eager | replayed | fastest other, eager"

Row = dict[str, str]
# By case, provider and pass.
Cases = dict[str, dict[str, dict[str, Row]]]


def rows_of(path: Path, columns: list[str]) -> list[Row] | None:
    """None where the columns are others."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader) if reader.fieldnames == columns else None


def ms_of(row: Row) -> str:
    return f"{float(row['ms']):,.1f}"


def gib(row: Row) -> str:
    return f"{float(row['mem_mib']) / 1024:.1f}" if row["mem_mib"] else ""


def read(path: Path) -> Cases | None:
    """Rows of TransformerNP, in the order of the file; None where its columns are others."""
    rows, cases = rows_of(path, COLUMNS), Cases()
    for row in rows or ():
        if row["op"] == "TransformerNP":
            steps = cases.setdefault(row["case"], {})
            steps.setdefault(row["provider"], {})[row["pass"]] = row
    return None if rows is None else cases


def text_rows(path: Path, op: str) -> list[tuple[str, ...]]:
    """A line for every step of a language model that the file has."""
    found = [row for row in rows_of(path, COLUMNS) or () if row["op"] == op]
    # Providers of a case side by side, ours first, whatever run they are from.
    order = list(dict.fromkeys(row["case"] for row in found))
    found.sort(key=lambda row: (order.index(row["case"]), not figures.is_ours(row["provider"])))
    named = ("case", "provider", "timing")
    return [
        (*(row[name] for name in named), f"{rate_of(row):,.0f}", ms_of(row), gib(row))
        for row in found
    ]


def switch_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for each switch at each case; times before are against the case's first, none."""
    lines, before = [], 0.0
    for row in rows_of(path, SWITCHES_COLUMNS) or ():
        ms = float(row["ms"])
        before = ms if row["ours"] == "none" else before
        shares = (f"{100 * float(row[name]):.1f} %" for name in ("waiting", "evaluation"))
        times = ms_of(row), f"{rate_of(row):,.0f}", f"{before / ms:.2f}"
        lines.append((row["case"], row["ours"], *times, gib(row), *shares))
    return lines


def matrix_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for every cell of the matrix, by case; of what was not measured the reason."""
    rows = rows_of(path, MATRIX_COLUMNS) or []
    cases = list(dict.fromkeys(row["case"] for row in rows))
    kinds = list(dict.fromkeys(row["provider"] for row in rows))
    rows.sort(key=lambda row: (cases.index(row["case"]), kinds.index(row["provider"])))
    named = {tuple(row[name] for name in MATRIX_NAMED): row for row in rows}
    lines = []
    for (case, provider, *way), row in named.items():
        if row["note"]:
            lines.append((case, provider, *way, row["note"], "", "", "", "", ""))
            continue
        before = named.get((case, *MATRIX_AGAINST))
        times = f"{float(before['ms']) / float(row['ms']):.2f}" if before and before["ms"] else ""
        name = provider if figures.is_ours(provider) else f"{provider} ({row['attention']})"
        numbers = f"{rate_of(row):,.0f}", ms_of(row), f"{float(row['tflops']):.0f}", row["mfu"]
        lines.append((case, name, *way, *numbers, gib(row), times))
    return lines


def depth_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for each mode at each depth."""
    names = [f"{name}_mib" for name in DEPTHS]
    return [
        (row["case"], row["mode"], *(f"{float(row[x]):,.1f}" if row[x] else "" for x in names))
        for row in rows_of(path, DEPTH_COLUMNS) or ()
    ]


def generate_rows(path: Path) -> list[tuple[str, ...]]:
    """A line for each way of continuing texts at each case."""
    return [
        (
            *(row[name] for name in ("op", "case", "provider")),
            *(f"{float(row[name]):,.0f}" for name in ("reading", "drawing")),
            f"{float(row['acceptance']):.1%}" if row["acceptance"] else "",
            gib(row),
        )
        for row in rows_of(path, GENERATE_COLUMNS) or ()
    ]


def result_files(folder: Path) -> dict[Path, Cases]:
    """Files with a benchmark's columns; one of language models alone has no cases."""
    found = {path: read(path) for path in sorted(folder.glob("results/*.csv"))}
    return {path: cases for path, cases in found.items() if cases is not None}


def table(cases: Cases) -> str:
    """A markdown table, a line for each provider at each case."""
    lines = []
    for case, steps in cases.items():
        most = max(rate_of(passes["step"]) for passes in steps.values())
        for provider, passes in steps.items():
            step = passes["step"]
            rate = f"{rate_of(step):,.0f}"
            rate = f"**{rate}**" if rate_of(step) == most else rate
            times = (ms_of(passes[x]) if x in passes else "" for x in ("step", *STAGES))
            lines.append((case, provider, rate, *times, f"{float(step['tflops']):.0f}", gib(step)))
    return headed(HEADER, lines, left=2)


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


def optimizer_parts(path: Path, rows: list[OptimizerPoint], folder: str = "") -> list[str]:
    """Paragraph, picture and table of a comparison, for a page from which ``folder`` leads to the
    results.
    """
    found, name = runs_of(rows), COMPARED[rows[0].model]
    told = (
        f"{name} after {max(row.step for row in rows)} steps from each of "
        f"{max(runs.seeds for runs in found.values())} seeds, less is better: "
        f"[{path.name}]({folder}{path.name}). Peak rates are the best of "
        f"{max(len(runs.rates) for runs in found.values())} each, by runs from other seeds, "
        f"{max(runs.grid_seeds for runs in found.values())} a rate; a rate at an end of its grid "
        "is marked *. Scores are of the seeds whose runs ended with a finite one. Seconds are of "
        "all steps of a run."
    )
    table = headed(OPTIMIZER_HEADER, optimizer_lines(found), left=1)
    return [told, f"![{name}, by optimizer]({folder}{path.stem}.png)", table]


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
    selected, kl = of_stack("selected"), of_stack("kl")
    told = (
        f"HybridLM `mini`, what its indexers select after {steps[-1]} steps in "
        f"{of_stack('seconds'):.0f} s, held out: [{path.name}]({path.name}). In the mean over the "
        f"layers of the stack the selected keys hold {selected:.3f} of the dense attention's mass, "
        f"{selected / of_stack('window'):.1f} times as much as a window of as many and "
        f"{selected / of_stack('random'):.1f} times as much as a random choice before that window; "
        "behind the stack, in the layer that predicts the token after next, "
        f"{behind.selected / behind.window:.1f} and {behind.selected / behind.random:.1f} times. "
        f"The indexers learn from step {start} on; then their divergence from the attention is "
        f"{divergence[start]:.3f} nats and at the end {kl:.3f}, {kl / of_stack('kl_uniform'):.2f} "
        "of that of an indexer that tells no key from another. In between it is at most "
        f"{divergence[worst]:.3f}, at step {worst}, and at least {divergence[best]:.3f}, at step "
        f"{best}. By layer, with that share when they begin to learn and at the end:"
    )
    lines = []
    for row, before in zip(last, first, strict=True):
        numbers = (f"{getattr(row, name):.3f}" for name in (*MASSES, "kl", "kl_uniform"))
        shares = (f"{each.kl / each.kl_uniform:.2f}" for each in (before, row))
        lines.append((row.layer, f"{row.keys:.0f}", *numbers, *shares))
    picture = f"![What HybridLM's indexers select]({path.stem}.png)"
    return [told, picture, headed(SELECTION_HEADER, lines, left=1)]


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


def compared(folder: Path) -> str:
    """What belongs between the marks of the page about choosing an optimizer."""
    parts: list[str] = []
    for path in sorted(folder.glob("results/optimizers-*.csv")):
        if rows := studies.read(OptimizerPoint, path):
            parts += optimizer_parts(path, rows, f"../../{folder.name}/results/")
    return "\n\n".join(parts) or "Nothing has been measured yet."


def made(folder: Path) -> str:
    """What belongs into ``results/tables.md``."""
    parts, drawn = [], bench_files(folder)
    for path, cases in result_files(folder).items():
        environment = environment_of(path)
        told = f"**{environment}**, bf16: [{path.name}]({path.name})."
        parts.append(f"{told} {TOLD}" if cases else told)
        if path in drawn:
            parts.append(f"![{environment}: tokens per second]({path.stem}.png)")
        if cases:
            parts.append(table(cases))
        if missing := gaps(cases):
            parts.append(missing)
        for op in LANGUAGE_MODELS:
            if lines := text_rows(path, op):
                parts += [TOLD_OF_TEXT.format(op=op), headed(TEXT_HEADER, lines, left=3)]
        for name, about, header, lines_of, left in (
            ("matrix", TOLD_OF_MATRIX, MATRIX_HEADER, matrix_rows, len(MATRIX_NAMED)),
            ("switches", TOLD_OF_SWITCHES, SWITCHES_HEADER, switch_rows, 2),
            ("depth", TOLD_OF_DEPTH, DEPTH_HEADER, depth_rows, 2),
            ("generate", TOLD_OF_GENERATE, GENERATE_HEADER, generate_rows, 3),
        ):
            beside = path.with_name(f"{name}-{path.name}")
            if beside.is_file():
                parts += [about.format(name=beside.name), headed(header, lines_of(beside), left)]
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
            about = TOLD_OF_STEPS.format(environment=environment_of(path), tables=tables)
            return f"{about}\n\n{headed(SHORT_HEADER, lines, left=1)}"
    return "Nothing has been measured yet."


def fastest(rows: list[Row]) -> list[str]:
    """Tokens/s of ours, eager and replayed, and of another provider, with its name."""
    told = []
    for mine, timing in ((True, "wall"), (True, "graph"), (False, "wall")):
        some = (
            row
            for row in rows
            if row["timing"] == timing and figures.is_ours(row["provider"]) == mine
        )
        rate, name = max(((rate_of(row), row["provider"]) for row in some), default=(0.0, ""))
        told.append(f"{'' if mine else name + ' '}{rate:,.0f}" if name else "")
    return told


def bench_files(folder: Path) -> dict[Path, list[Row]]:
    """The steps of each file that has some."""
    found = {path: rows_of(path, COLUMNS) for path in sorted(folder.glob("results/*.csv"))}
    steps = {path: [r for r in rows or () if r["pass"] == "step"] for path, rows in found.items()}
    return {path: rows for path, rows in steps.items() if rows}


def written(folder: Path) -> dict[Path, str]:
    """Every file of words that follows from the results, and what it is to say."""
    files = {folder / TABLES: made(folder)}
    pages = {f"models/{page}.md": partial(short, folder, op) for page, op in PAGES.items()}
    for page, text in (pages | {"tutorials/optimizers.md": partial(compared, folder)}).items():
        path = docs_of(folder) / page
        if path.is_file():
            files[path] = with_made(path.read_text(), text())
    return files


def problems(folder: Path) -> list[str]:
    """What of tables, pages and pictures is behind the result files."""
    told = [
        f"{path} is behind its results"
        for path, text in written(folder).items()
        if not (path.is_file() and path.read_text() == text)
    ]
    drawn = [*bench_files(folder), *drawn_from(folder / "results"), *drawn_from(docs_of(folder))]
    behind = [path.with_suffix(".png") for path in drawn if figures.behind(path)]
    return told + [f"{path} is missing or behind its results" for path in behind]


def docs_of(folder: Path) -> Path:
    """Where the pages are, and what they alone show."""
    return folder.parent / "docs"


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
    for path, rows in bench_files(folder).items():
        figures.save(draw(rows, environment_of(path)), path)
    for each in (folder / "results", docs_of(folder)):
        redraw(each)


if __name__ == "__main__":
    typer.run(main)
