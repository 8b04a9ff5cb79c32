"""What is left of one GPU's speed where several train together, each on as many rows as one alone;
by ``context`` they share the rows of the tasks of one.

    torchrun --nproc-per-node 2 -m fusewright_models.bench scaling hybrid --preset 350m

Steps are those of the training program, data and clipping included: of the first process alone,
while the others wait, and then of all of them in each of several ways.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from rich.console import Console
from torch import Tensor, nn

from ..cli.presets import TRANSFORMER_NP
from ..cli.transformer_np import negative_log_likelihood
from ..data import make_sampler
from ..data.sizes import Size
from ..devices import peak_memory, wait_for
from ..models.hybrid import HYBRID, HybridLM
from ..models.titan_mac import TITAN_MAC, TitanMAC
from ..models.transformer_np import TransformerNP, TransformerNPConfig
from ..text import TextBatch, Windows
from ..training import TrainingConfig, make_optimizer
from ..training.captured import CapturedStepper, make_stepper
from ..training.gradients import HeldGradients
from ..training.processes import Parallel, Processes, launched
from ..training.source import Source
from .harness import SEED
from .hybrid import SHAPES as HYBRID_SHAPES
from .results import Row, environment_name, merge_by, mib, table_of
from .shapes import SHAPES, Shape
from .step import Time
from .text import TextShape
from .titan_mac import SHAPES as TITAN_MAC_SHAPES

ModelName = Literal["transformer-np", "titan-mac", "hybrid"]
MODEL_NAMES = get_args(ModelName)
# Tokens that windows are drawn from.
STREAM = 2**20
# Steps that compile, tune, allocate and capture, and then rounds that are timed.
WARM_UP, ROUNDS = 6, 5
NAMED = ["model", "case", "way", "processes"]
NUMBERS = ["ms", "ms_p20", "ms_p80", "tokens_per_second", "efficiency", "communication_ms"]
COLUMNS = [*NAMED, *NUMBERS, "mem_mib"]


class Way(NamedTuple):
    """How steps are taken.

    Attributes:
        name: of its rows.
        parallel: how processes take part; None of the first one alone.
        captured: whether they are replayed from CUDA graphs.
    """

    name: str
    parallel: Parallel | None
    captured: bool

    @property
    def shares(self) -> bool:
        """Whether processes share the batch of one."""
        return self.parallel == "context"


WAYS = (
    Way("alone, captured", None, True),
    Way("alone, eager", None, False),
    Way("ddp, captured", "ddp", True),
    Way("ddp, eager", "ddp", False),
    Way("fsdp, eager", "fsdp", False),
    Way("context, eager", "context", False),
)


class Subject(NamedTuple):
    """What is trained.

    Attributes:
        case: its size and that of a batch, in words.
        rows: of a process.
        tokens: that these are.
        make: the model, on the CPU.
        source: of its batches, given a seed and a device.
        loss: of model and batch.
        blocks: of the model, for shards.
    """

    case: str
    rows: int
    tokens: int
    make: Callable[[], nn.Module]
    source: Callable[[int, torch.device], Source]
    loss: Callable[[Any, Any], Tensor]
    blocks: Callable[[Any], Iterable[nn.Module]]


def text_subject(model: ModelName, preset: str, shape: TextShape) -> Subject:
    def windows(seed: int, device: torch.device) -> Source:
        generator = torch.Generator().manual_seed(SEED)
        stream = torch.randint(config.vocab_size, (STREAM,), generator=generator)
        return Windows(stream.to(device), length=shape.length, seed=seed)

    sizes = shape.batch, shape.tokens
    if model == "titan-mac":
        config: Any = TITAN_MAC[preset]

        def following(model: TitanMAC, batch: TextBatch) -> Tensor:
            return model(batch.windows[:, :-1], targets=batch.windows[:, 1:])

        case = f"{preset} {shape.case(config)}"
        return Subject(
            case, *sizes, lambda: TitanMAC(config), windows, following, lambda model: model.blocks
        )
    config = HYBRID[preset]

    def total(model: HybridLM, batch: TextBatch) -> Tensor:
        return model(batch.windows[:, :-1], batch.windows[:, 1:]).total

    def layers(model: HybridLM) -> Iterable[nn.Module]:
        # A reversible stack wants its parameters whole.
        return model.stack.layers if config.mode == "plain" else ()

    case = f"{preset} {shape.case(config)}"
    return Subject(case, *sizes, lambda: HybridLM(config), windows, total, layers)


def task_subject(preset: str, shape: Shape) -> Subject:
    context, target = (Size.parse(str(size)) for size in (shape.context, shape.targets))

    def sampler(seed: int, device: torch.device | str) -> Any:
        return make_sampler(
            "blr", context_size=context, target_size=target, device=device, seed=seed
        )

    def make() -> TransformerNP:
        x_width = sampler(SEED, "cpu").x_width
        return TransformerNP(
            TransformerNPConfig(**TRANSFORMER_NP[preset].architecture | {"x_width": x_width})
        )

    case, sizes = f"{preset} {shape.case}", (shape.batch, shape.tokens)
    return Subject(case, *sizes, make, sampler, negative_log_likelihood, lambda model: model.blocks)


PRESETS: dict[ModelName, Mapping[str, Any]] = {
    "transformer-np": TRANSFORMER_NP,
    "titan-mac": TITAN_MAC,
    "hybrid": HYBRID,
}
LARGEST: dict[ModelName, str] = {"transformer-np": "base", "titan-mac": "170m", "hybrid": "350m"}


def ways_of(model: str, names: str) -> list[Way]:
    """The ways of these names, parted by semicolons, or all that the model can take.

    Raises:
        ValueError: one is unknown, or the model cannot take it.
    """
    can = [way for way in WAYS if model == "transformer-np" or not way.shares]
    if names == "all":
        return can
    asked = [name.strip() for name in names.split(";")]
    if unknown := [name for name in asked if name not in {way.name for way in can}]:
        raise ValueError(f"--way of {model} must be of {[way.name for way in can]}; got {unknown}")
    return [way for way in can if way.name in asked]


def subject_of(name: str, preset: str | None, shape: str | None) -> Subject:
    """
    Raises:
        ValueError: model or preset is unknown, or the shape none of the model.
    """
    if name not in MODEL_NAMES:
        raise ValueError(f"model must be of {', '.join(MODEL_NAMES)}; got {name!r}")
    model = cast(ModelName, name)
    preset = preset or LARGEST[model]
    if preset not in PRESETS[model]:
        raise ValueError(f"preset must be of {', '.join(PRESETS[model])}; got {preset!r}")
    if model == "transformer-np":
        return task_subject(preset, Shape.parse(shape) if shape else SHAPES[0])
    if shape is not None:
        return text_subject(model, preset, TextShape.parse(shape))
    shapes = TITAN_MAC_SHAPES if model == "titan-mac" else HYBRID_SHAPES
    return text_subject(model, preset, shapes[preset][0])


class Taken(NamedTuple):
    """Milliseconds of a step, and of averaging its gradients alone; the peak of memory."""

    step: Time
    communication: float | None
    memory_mib: float | None


def measure(
    subject: Subject, way: Way, all_of_them: Processes, steps: int, accumulated: int, say: Any
) -> Taken:
    """Steps of one way, of so many batches each, by all processes that take part in it."""
    processes = Processes(way.parallel, all_of_them.device)
    device = processes.device
    on_gpu = device.type == "cuda"
    torch.manual_seed(SEED)
    model = subject.make().to(device)
    processes.shard(model, subject.blocks(model))
    count = WARM_UP + ROUNDS * steps
    config = TrainingConfig(
        steps=count,
        batch_size=subject.rows if way.shares else subject.rows * processes.count,
        accumulation_steps=accumulated,
        precision="bf16" if on_gpu else "fp32",
        capture=way.captured,
    )
    optimizer = make_optimizer(
        "adamw", model, lr=1e-5, weight_decay=0.1, clip_norm=config.clip_norm
    )
    stepper = make_stepper(model, subject.loss, optimizer, config, say, processes)
    # Those who share a batch draw the same one.
    source = subject.source(SEED if way.shares else SEED + all_of_them.rank, device)

    def sample() -> Any:
        batch = source.sample(subject.rows)
        return processes.rows(batch, subject.rows) if way.shares else batch

    def take(number: int) -> None:
        for _ in range(number):
            stepper.take(1.0, sample)

    def timed(work: Callable[[], object]) -> float:
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        return 1e3 * (time.perf_counter() - start)

    communication = None
    if on_gpu:
        # Before the warm-up: what a replay needs was allocated when its graph was captured.
        torch.cuda.reset_peak_memory_stats(device)
    with stepper.running():
        take(WARM_UP)
        samples = [timed(lambda: take(steps)) / steps for _ in range(ROUNDS)]
        if isinstance(stepper, CapturedStepper) and processes.several:
            held = stepper.held
            for _ in range(3):
                communication = timed(lambda: averaged(held, 10)) / 10
    peak = peak_memory(device) if on_gpu else None
    return Taken(Time.of(samples), communication, None if peak is None else peak / 2**20)


def averaged(held: HeldGradients, times: int) -> None:
    for _ in range(times):
        held.average_()


def bench_scaling(
    name: str,
    subject: Subject,
    processes: Processes,
    ways: Iterable[Way],
    steps: int,
    accumulated: int,
    out: Path | None,
) -> None:
    """Measure every way, print a table and put rows into ``scaling-ENVIRONMENT.csv``.

    Args:
        name: of the model.
        steps: of each round that is timed.
        accumulated: batches of a step.
    """
    console = Console(width=160, quiet=not processes.is_main)
    case = subject.case if accumulated == 1 else f"{subject.case}, {accumulated} batches a step"
    table = table_of(f"{name} {case}", "efficiency: of the fastest alone", NAMED, COLUMNS[4:])
    fastest = inf
    environment = environment_name(processes.device)
    on_gpu = processes.device.type == "cuda"
    for way in ways:
        if way.captured and not on_gpu:
            continue
        processes.wait()
        taken = None
        if way.parallel is not None or processes.is_main:
            taken = measure(subject, way, processes, steps, accumulated, console.print)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        if taken is None or not processes.is_main:
            continue
        count = 1 if way.parallel is None else processes.count
        if way.parallel is None:
            fastest = min(fastest, taken.step.ms)
        batches = 1 if way.shares else count
        speed = accumulated * batches * subject.tokens / taken.step.ms * 1e3
        share = f"{batches / count * fastest / taken.step.ms:.3f}" if isfinite(fastest) else ""
        told = "" if taken.communication is None else f"{taken.communication:.3f}"
        numbers = [*(f"{ms:.3f}" for ms in taken.step), f"{speed:.0f}", share, told]
        values = [name, case, way.name, str(count), *numbers, mib(taken.memory_mib)]
        found: Row = dict(zip(COLUMNS, values, strict=True))
        table.add_row(*values)
        console.print(f"{way.name}: {taken.step.ms:.3f} ms", highlight=False)
        if out is not None:
            path = out / f"scaling-{environment}.csv"
            merge_by(lambda row: tuple(row[each] for each in NAMED), path, COLUMNS, [found])
    console.print(table)


def check_launched() -> None:
    """
    Raises:
        ValueError: this is one process alone.
    """
    if not launched():
        raise ValueError(
            "scaling is of several processes: start them by torchrun --nproc-per-node 2 -m "
            "fusewright_models.bench scaling"
        )
