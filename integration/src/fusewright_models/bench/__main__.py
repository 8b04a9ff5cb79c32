"""The harness: ``python -m fusewright_models.bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..devices import checked_device
from ..presets import TRANSFORMER_NP, PresetName
from ..transformer_np_layers import TransformerNPConfig
from .harness import Harness
from .providers import PROVIDER_NAMES, SDPA_CHOICES, chosen_providers
from .results import environment_name
from .shapes import SHAPES, Shape


def main(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="M,N,B: context rows, target rows, tasks; repeatable. Default: three."),
    ] = None,
    provider: Annotated[
        str, typer.Option(help=f"By comma, of {', '.join(PROVIDER_NAMES)}.")
    ] = "all",
    sdpa: Annotated[
        str, typer.Option(help=f"Torch's attention, by comma, of {', '.join(SDPA_CHOICES)}.")
    ] = "auto",
    preset: Annotated[PresetName, typer.Option(help="Size of the model.")] = "base",
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")] = "cuda",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="About how long one provider is timed at one shape.")
    ] = 6.0,
    check: Annotated[
        bool, typer.Option(help="Hold first losses against fp32, at a slow forward pass a shape.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result file; rows that it has are replaced.")
    ] = None,
) -> None:
    """Time training steps of TransformerNP: ours and plain torch, on the same weights and data.

    Every row says whose attention ran. What runs out of memory or fails is a line of the table and
    no row of the result file; the exit code is 1 where that is ours.
    """
    try:
        shapes = [Shape.parse(text) for text in shape] if shape else list(SHAPES)
        providers = chosen_providers(provider, sdpa)
        where = checked_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(width=160)
    name = environment_name(where)
    console.print(f"{name}: bf16 autocast over fp32 weights, AdamW", highlight=False)
    harness = Harness(
        config=TransformerNPConfig(**TRANSFORMER_NP[preset].architecture),
        device=where,
        seconds=seconds,
        check=check,
        file=out / f"{name}.csv" if out else None,
        console=console,
    )
    good = [harness.bench(each, providers) for each in shapes]
    raise typer.Exit(not all(good))


if __name__ == "__main__":
    typer.run(main)
