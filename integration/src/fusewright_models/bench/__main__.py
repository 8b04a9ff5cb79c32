"""The harness: ``python -m fusewright_models.bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import torch
import typer
from rich.console import Console

from ..choices import CHECKPOINTINGS, PresetName
from ..cli.commands import usage_errors
from ..cli.presets import TRANSFORMER_NP
from ..devices import checked_device
from ..models.hybrid import HYBRID
from ..models.titan_mac import TITAN_MAC, Variant
from ..models.transformer_np import TransformerNPConfig
from ..training.processes import join, leaving
from .depth import DepthHarness
from .generation import GenerationHarness
from .harness import Harness
from .hybrid import PROVIDER_NAMES as HYBRID_PROVIDERS
from .hybrid import SHAPES as HYBRID_SHAPES
from .hybrid import HybridHarness
from .llama import LLAMA, LlamaHarness
from .llama import PROVIDER_NAMES as LLAMA_PROVIDERS
from .llama import SHAPES as LLAMA_SHAPES
from .matrix import MatrixHarness
from .providers import PROVIDER_NAMES, SDPA_CHOICES, by_comma, chosen_providers
from .results import environment_name
from .scaling import MODEL_NAMES, WAYS, bench_scaling, check_launched, subject_of, ways_of
from .shapes import SHAPES, Shape, parsed
from .switches import SwitchesHarness
from .text import TextHarness, TextShape
from .titan_mac import PROVIDER_NAMES as TITAN_MAC_PROVIDERS
from .titan_mac import SHAPES as TITAN_MAC_SHAPES
from .titan_mac import TitanMACHarness
from .transformer_np import TransformerNPHarness

# Models that continue texts: how they are measured, their presets and the usual one.
GENERATING: dict[str, tuple[type[TextHarness], Mapping[str, Any], str]] = {
    "titan-mac": (TitanMACHarness, TITAN_MAC, "l4"),
    "hybrid": (HybridHarness, HYBRID, "mini"),
}
Device = Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")]
Seconds = Annotated[
    float, typer.Option(min=0.0, help="About how long one provider is timed at one shape.")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the result file; rows that it has are replaced.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="M,N,B: context rows, target rows, tasks; repeatable. Default: five."
    ),
]
Providers = Annotated[
    str, typer.Option("--provider", help=f"By comma, of {', '.join(PROVIDER_NAMES)}.")
]
Preset = Annotated[PresetName, typer.Option(help="Size of the model.")]
Check = Annotated[
    bool, typer.Option(help="Hold first losses against fp32, at a slow forward pass a shape.")
]
TextShapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="B,T: rows and their tokens; repeatable. Default: the preset's."),
]
TextCheck = Annotated[
    bool, typer.Option(help="Hold our first loss against fp32, at a slow forward pass a shape.")
]


def main(
    context: typer.Context,
    shape: Shapes = None,
    provider: Providers = "all",
    sdpa: Annotated[
        str, typer.Option(help=f"Torch's attention, by comma, of {', '.join(SDPA_CHOICES)}.")
    ] = "auto",
    preset: Preset = "base",
    device: Device = "cuda",
    seconds: Seconds = 6.0,
    check: Check = True,
    out: Out = None,
) -> None:
    """Time training steps of TransformerNP: ours and plain torch, on the same weights and data.

    Every row says whose attention ran. What runs out of memory or fails is a line of the table and
    no row of the result file; the exit code is 1 where that is ours.
    """
    if context.invoked_subcommand:
        return
    with usage_errors():
        shapes = [Shape.parse(text) for text in shape] if shape else list(SHAPES)
        providers = chosen_providers(provider, sdpa)
        where = checked_device(device)
    config = TransformerNPConfig(**TRANSFORMER_NP[preset].architecture)
    harness = made(TransformerNPHarness, config, where, seconds, check, out)
    bench_all(shapes, harness.bench, providers)


def matrix(
    shape: Shapes = None,
    provider: Providers = "all",
    checkpointing: Annotated[
        str, typer.Option(help=f"By comma, of {', '.join(CHECKPOINTINGS)}.")
    ] = "all",
    graphs: Annotated[
        bool, typer.Option(help="Replay steps from CUDA graphs too, up to 100,000 context rows.")
    ] = True,
    preset: Preset = "base",
    device: Device = "cuda",
    seconds: Seconds = 2.0,
    check: Check = True,
    out: Out = None,
) -> None:
    """Time training steps of TransformerNP by every provider, with and without checkpointing and
    CUDA graphs: tokens/s, share of the GPU's peak, memory, and how much faster than on torch's
    attention.

    What runs out of memory, or needs what is not here, is a row that says so; the exit code is 1
    where ours fails.
    """
    with usage_errors():
        shapes = [Shape.parse(text) for text in shape] if shape else list(SHAPES)
        providers = chosen_providers(provider, "auto")
        chosen = by_comma("checkpointing", checkpointing, CHECKPOINTINGS)
        where = checked_device(device)
    config = TransformerNPConfig(**TRANSFORMER_NP[preset].architecture)
    harness = made(TransformerNPHarness, config, where, seconds, check, out)
    bench_all(shapes, MatrixHarness(harness, chosen, graphs).bench, providers)


def titan_mac(
    preset: Annotated[str, typer.Option(help=f"Of {', '.join(TITAN_MAC)}.")] = "l4",
    shape: TextShapes = None,
    variant: Annotated[Variant, typer.Option(help="Of the model.")] = "mac",
    memory: Annotated[bool, typer.Option(help="With the memory, or the model without.")] = True,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute blocks again in the backward pass.")
    ] = False,
    provider: Annotated[
        str, typer.Option(help=f"By comma, of {', '.join(TITAN_MAC_PROVIDERS)}.")
    ] = "all",
    switches: Annotated[
        bool, typer.Option("--switches", help="What each of our ways saves, in place of providers.")
    ] = False,
    evaluate_every: Annotated[
        int, typer.Option(min=1, help="Steps between evaluations, for their share of a run.")
    ] = 50,
    evaluation_batches: Annotated[int, typer.Option(min=1, help="Of an evaluation.")] = 10,
    device: Device = "cuda",
    seconds: Seconds = 6.0,
    check: TextCheck = True,
    out: Out = None,
) -> None:
    """Time training steps of TitanMAC: ours, eager and compiled, each also replayed from a CUDA
    graph, and titans-pytorch where it is installed.

    The exit code is 1 where ours fails.
    """
    with usage_errors():
        config, shapes = config_and_shapes(preset, TITAN_MAC, shape, TITAN_MAC_SHAPES)
        config = replace(config, variant=variant, memory=memory, checkpointing=checkpointing)
        providers = by_comma("provider", provider, TITAN_MAC_PROVIDERS)
        where = checked_device(device)
    harness = made(TitanMACHarness, config, where, seconds, check, out)
    if switches:
        bench_all(shapes, SwitchesHarness(harness, evaluate_every, evaluation_batches).bench)
    bench_all(shapes, harness.bench, providers)


def hybrid(
    preset: Annotated[str, typer.Option(help=f"Of {', '.join(HYBRID)}.")] = "mini",
    shape: TextShapes = None,
    provider: Annotated[
        str, typer.Option(help=f"By comma, of {', '.join(HYBRID_PROVIDERS)}.")
    ] = "all",
    depths: Annotated[
        str | None,
        typer.Option(help="By comma: the memory of a step of so many layers, in place of times."),
    ] = None,
    device: Device = "cuda",
    seconds: Seconds = 6.0,
    check: TextCheck = True,
    out: Out = None,
) -> None:
    """Time training steps of HybridLM: ours, eager and replayed from a CUDA graph; the same model
    in plain torch, eager and compiled; and fla's Gated DeltaNet of equal size where it is
    installed. Or the peaks of memory at several depths, where states are recomputed, stored and
    kept with all that autograd keeps.

    The exit code is 1 where ours fails.
    """
    with usage_errors():
        config, shapes = config_and_shapes(preset, HYBRID, shape, HYBRID_SHAPES)
        short = [each for each in shapes if each.length < 2]
        if short:
            raise ValueError(f"T must be at least 2, for a token after next; got {short[0].length}")
        providers = by_comma("provider", provider, HYBRID_PROVIDERS)
        layers: tuple[int, ...] = ()
        if depths is not None:
            wanted = "depths are numbers of layers such as 8,16,32"
            layers = parsed(lambda *numbers: numbers, depths, wanted, "depths")
        where = checked_device(device)
    harness = made(HybridHarness, config, where, seconds, check, out)
    if layers:
        bench_all(shapes, DepthHarness(harness, layers).bench)
    bench_all(shapes, harness.bench, providers)


def llama(
    preset: Annotated[str, typer.Option(help=f"Of {', '.join(LLAMA)}.")] = "1b",
    shape: TextShapes = None,
    provider: Annotated[
        str, typer.Option(help=f"By comma, of {', '.join(LLAMA_PROVIDERS)}.")
    ] = "all",
    device: Device = "cuda",
    seconds: Seconds = 6.0,
    check: Annotated[
        bool, typer.Option(help="Hold the first loss and all gradients against fp32.")
    ] = True,
    out: Out = None,
) -> None:
    """Time training steps of a Llama of transformers with drawn weights: as it is, compiled, with
    Liger's kernels where they are installed, and patched with ours.

    The exit code is 1 where ours fails.
    """
    with usage_errors():
        config, shapes = config_and_shapes(preset, LLAMA, shape, LLAMA_SHAPES)
        providers = by_comma("provider", provider, LLAMA_PROVIDERS)
        where = checked_device(device)
    harness = made(LlamaHarness, config, where, seconds, check, out, "weights in bf16")
    bench_all(shapes, harness.bench, providers)


def generate(
    model: Annotated[str, typer.Argument(help=f"Of {', '.join(GENERATING)}.")],
    preset: Annotated[str | None, typer.Option(help="Default: l4 or mini.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", help="B,T: prompts and their tokens; repeatable. Default: 1,512 and 16,512."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="That follow each prompt.")] = 32,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most likely token.")
    ] = 1.0,
    device: Device = "cuda",
    seconds: Seconds = 2.0,
    check: Annotated[
        bool, typer.Option(help="Hold losses of tokens read one by one against fp32.")
    ] = True,
    out: Out = None,
) -> None:
    """Time texts that TitanMAC or HybridLM continue, with drawn weights: tokens/s of reading
    prompts and of drawing what follows, token by token and, of HybridLM, by drafts.

    The exit code is 1 where ours fails.
    """
    with usage_errors():
        if model not in GENERATING:
            raise ValueError(f"model must be of {', '.join(GENERATING)}; got {model!r}")
        kind, configs, usual = GENERATING[model]
        given = shape or ["1,512", "16,512"]
        config, shapes = config_and_shapes(preset or usual, configs, given, {})
        where = checked_device(device)
    harness = made(kind, config, where, seconds, check, out)
    bench_all(shapes, GenerationHarness(harness, tokens, temperature).bench)


@leaving()
def scaling(
    model: Annotated[str, typer.Argument(help=f"Of {', '.join(MODEL_NAMES)}.")],
    preset: Annotated[str | None, typer.Option(help="Default: the largest of the bench.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of each process: M,N,B or B,T. Default: the preset's.")
    ] = None,
    way: Annotated[
        str, typer.Option(help=f"By semicolon, of {'; '.join(each.name for each in WAYS)}.")
    ] = "all",
    steps: Annotated[int, typer.Option(min=1, help="Of each of the rounds that are timed.")] = 10,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="Batches of a step.")] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Out = None,
) -> None:
    """Time training steps of the processes of torchrun, beside those of the first one alone."""
    with usage_errors():
        check_launched()
        subject = subject_of(model, preset, shape)
        ways = ways_of(model, way)
        processes = join(None, device)
    bench_scaling(model, subject, processes, ways, steps, gradient_accumulation_steps, out)


ConfigT = TypeVar("ConfigT")
HarnessT = TypeVar("HarnessT", bound=Harness)


def config_and_shapes(
    preset: str,
    configs: Mapping[str, ConfigT],
    given: list[str] | None,
    shapes: Mapping[str, tuple[TextShape, ...]],
) -> tuple[ConfigT, list[TextShape]]:
    """Of a language model's preset, its own shapes where none are given."""
    if preset not in configs:
        raise ValueError(f"preset must be of {', '.join(configs)}; got {preset!r}")
    return configs[preset], [TextShape.parse(text) for text in given or ()] or list(shapes[preset])


def made(
    kind: type[HarnessT],
    config: Any,
    device: torch.device,
    seconds: float,
    check: bool,
    out: Path | None,
    precision: str = "bf16 autocast over fp32 weights",
) -> HarnessT:
    """The harness of a model, once its environment has been printed."""
    console = Console(width=160)
    name = environment_name(device)
    console.print(f"{name}: {precision}, AdamW", highlight=False)
    file = out / f"{name}.csv" if out else None
    return kind(config, device, seconds, check, file, console)


def bench_all(shapes: Iterable[Any], bench: Callable[..., bool], *arguments: Any) -> NoReturn:
    """Measure all shapes; the exit code is 1 where one is not good."""
    good = [bench(each, *arguments) for each in shapes]
    raise typer.Exit(not all(good))


app = typer.Typer()
app.callback(invoke_without_command=True)(main)
app.command("matrix")(matrix)
app.command("titan-mac")(titan_mac)
app.command("hybrid")(hybrid)
app.command("llama")(llama)
app.command("generate")(generate)
app.command("scaling")(scaling)

if __name__ == "__main__":
    app()
