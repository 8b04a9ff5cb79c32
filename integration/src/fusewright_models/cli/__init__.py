"""The program ``fusewright-train``: one subcommand per model.

Its help imports no torch: a command imports what it does when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import LARGEST_SEED, of_folder, takes
from .settings import (
    SAMPLE_TOKENS,
    TEMPERATURE,
    HybridSettings,
    TitanMACSettings,
    TransformerNPSettings,
)

__all__ = ["app"]

Out = Annotated[
    Path,
    of_folder(help="Results folder. Default: runs/, model, what tells runs of it apart, time."),
]
Resume = Annotated[
    Path,
    of_folder(
        help="Continue the run of this folder; takes with it what changes nothing that is trained, "
        "and another number of steps."
    ),
]
Config = Annotated[
    Path,
    of_folder(
        help="A TOML file of settings, by the names of flags with _ for -, or the config.json of a "
        "run; flags win."
    ),
]
DryRun = Annotated[
    bool,
    of_folder(
        "--dry-run",
        help="Check all settings and print parameters, operations, memory and time; nothing is "
        "trained or written.",
    ),
]
Margin = Annotated[
    float,
    of_folder(help="Fail unless the result is so many bits per byte below order 2."),
]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """Train a fusewright model. Training runs without any flag, on data of its own."""


@app.command("transformer-np")
@takes(TransformerNPSettings, config=Config, out=Out, resume=Resume, dry_run=DryRun)
def transformer_np_command(**flags: Any) -> None:
    """Train a TransformerNP: predict targets from a context set, with their uncertainty.

    Without flags: completion of handwritten digits, some two minutes on two CPU cores. Prints the
    held-out log-likelihood per target before and after, beside the reference that belongs to the
    data, and leaves a folder with config.json, metrics.jsonl, loss.png, predictions.png,
    report.html and checkpoints.
    """
    from .transformer_np import train_transformer_np

    train_transformer_np(flags)


@app.command("titan-mac")
@takes(TitanMACSettings, config=Config, out=Out, resume=Resume, dry_run=DryRun, margin=Margin)
def titan_mac_command(**flags: Any) -> None:
    """Train a TitanMAC: a language model with a neural memory that learns while it reads.

    Without flags: bytes of the running Python's standard library, some three minutes on two CPU
    cores. Prints the held-out bits per byte before and after, beside those of an order-2 byte model
    fitted to the same training text, and a continuation of a held-out text; leaves a folder with
    config.json, metrics.jsonl, loss.png, sample.txt, report.html and checkpoints.
    """
    from .titan_mac import train_titan_mac

    train_titan_mac(flags)


@app.command("hybrid")
@takes(HybridSettings, config=Config, out=Out, resume=Resume, dry_run=DryRun, margin=Margin)
def hybrid_command(**flags: Any) -> None:
    """Train a HybridLM: gated delta rule and learned sparse attention in a reversible stack.

    Without flags: bytes of the running Python's standard library, some minutes on two CPU cores.
    Prints the held-out bits per byte of the next token before and after, beside those of an order-2
    byte model fitted to the same training text, and a continuation of a held-out text; leaves a
    folder with config.json, metrics.jsonl, loss.png, sample.txt, report.html and checkpoints.
    """
    from .hybrid import train_hybrid

    train_hybrid(flags)


@app.command("sweep", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sweep_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="transformer-np, titan-mac or hybrid.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs' folders and of sweep.csv.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs at one time.")] = 1,
) -> None:
    """Train a model once for each combination of values of its flags, such as --seed 0,1,2 --lr
    1e-3,3e-3, and show the means of their scores over seeds.

    What is trained already is not trained again, and what was stopped is continued.
    """
    from .sweep import sweep_runs

    program: Any = context.parent
    sweep_runs(program.command.commands, model, context.args, out, jobs)


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="Results folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder that is made, or is empty.")],
    push: Annotated[
        str | None,
        typer.Option(help="Upload it to this repository of the Hugging Face hub, too."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the weights: float64, float32, bfloat16 or float16.")
    ] = "float32",
) -> None:
    """Write the model of a run's last checkpoint as safetensors and config.json, which
    from_pretrained and --init-from read; with the run's settings and its tokenizer's file.
    """
    from .export import export_run

    export_run(run, out, push=push, dtype=dtype)


@app.command("evaluate")
def evaluate_command(
    run: Annotated[Path, typer.Argument(help="Results folder of a titan-mac or hybrid run.")],
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a window. Default: the run's.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows at a time. Default: the run's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None,
    cache: Annotated[
        str | None, typer.Option(help="Folder of the data's tokens. Default: the run's.")
    ] = None,
) -> None:
    """Score a trained language model on its run's held-out text, in windows of any length.

    The processes of torchrun share the tokens of each window, so that one may be longer than a GPU
    has memory for: each reads a part, and its layers' states go on to the next one.
    """
    from .evaluate import evaluate_run

    asked = {"seq_len": seq_len, "batch_size": batch_size, "device": device, "cache": cache}
    evaluate_run(run, {name: x for name, x in asked.items() if x is not None})


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="Results folder of a run.")],
) -> None:
    """Write report.html into the folder of a run, as its end does: scores, curves, speed, what went
    wrong, predictions or a text, and settings, in one page that needs nothing beside it.
    """
    from .report import report_run

    report_run(run)


@app.command("predict")
def predict_command(
    run: Annotated[
        str,
        typer.Argument(
            help="Results folder of a transformer-np run, an exported one, or a repository of the "
            "Hugging Face hub."
        ),
    ],
    context: Annotated[Path, typer.Option(help="CSV or parquet file of the rows that are known.")],
    target: Annotated[Path, typer.Option(help="Likewise of the rows to predict.")],
    out: Annotated[Path, typer.Option(help="CSV file that is written, or replaced.")] = Path(
        "predictions.csv"
    ),
    quantiles: Annotated[str, typer.Option(help="Their levels.")] = "0.05,0.5,0.95",
    inputs: Annotated[
        str | None,
        typer.Option(help="Columns that are inputs, of a model that was trained without names."),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Likewise the column to predict.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one.")] = None,
) -> None:
    """Predict rows of a file from those of another with a trained TransformerNP: mean, standard
    deviation and quantiles of each, and the log-probability of what the file says.
    """
    from .predict import predict_rows

    files: dict[str, Any] = {"context": context, "target": target, "out": out}
    asked: dict[str, Any] = {"quantiles": quantiles, "inputs": inputs, "output": output}
    predict_rows(run, **files, **asked, device=device)


@app.command("generate")
def generate_command(
    run: Annotated[Path, typer.Argument(help="Results folder of a titan-mac or hybrid run.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A text to continue; repeatable. Default: def and a blank."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of such texts, one on each line.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many follow each.")] = SAMPLE_TOKENS,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most likely token.")
    ] = TEMPERATURE,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Draw from the fewest tokens whose probabilities together reach it.",
        ),
    ] = 1.0,
    speculate: Annotated[
        bool,
        typer.Option(
            "--speculate",
            help="Draft each second token by what HybridLM predicts of it: the same text in "
            "distribution, in fewer steps, one prompt after the other.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of all draws.")] = 0,
    device: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None,
) -> None:
    """Continue texts with a trained language model, token by token: its state stands for what it
    has read. Tells how many tokens a second it read and wrote.
    """
    from .generate import generate_text

    of_prompts: dict[str, Any] = {"prompt": prompt or [], "prompts": prompts, "drafts": speculate}
    options: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "top_p": top_p}
    generate_text(run, **of_prompts, **options, seed=seed, device=device)
