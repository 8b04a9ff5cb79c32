"""What more GPUs than were measured would do: bytes on the wire, memory and efficiency by formulas
and by a simulation of one step.

    python -m fusewright_models.studies.scaling --out docs --measured FILE

A step of one GPU is as long as its row in integration/results says. Messages go over the links of
a host first and then, each GPU with its own part, between hosts. A step of ``ddp, captured`` sends
its gradients behind the backward pass; of ``ddp, eager`` each bucket as soon as it is full; of
``fsdp`` the parameters of the next block while one computes, twice, and its gradients as soon as
they are there. Messages follow one another, beside the computation. Beside these steps stand those
that were measured, in a file of ``fusewright_models.bench scaling``.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from rich.console import Console

from .. import figures
from .results import write

HOST = 8
# Of an H200 in its host by NVLink, and of its own 400 Gbit/s adapter, by their data sheets; a
# message gets so much of them.
LINK, NETWORK, SHARE = 450e9, 50e9, 0.8
# Seconds that a message takes to begin on a host, and from host to host for each doubling of them.
BEGIN, BEGIN_BETWEEN = 10e-6, 20e-6
BUCKET = 25 * 2**20
FP32, PARAMETER = 4, 16
# Of a step: its backward pass, whose second half is all of that where it gathers again.
BACKWARD = 2.0 / 3.0
COUNTS = 2, 8, 64, 512
NONE: Mapping[tuple[str, str, int], float] = {}


@dataclass(frozen=True)
class Subject:
    """A model and a step of one GPU.

    Attributes:
        name: of the model, its preset and a batch.
        case: the same, as files of measurements name it.
        parameters: how many.
        blocks: that ``fsdp`` gathers one after another; 1 of a model that wants all at once.
        step_ms: of one GPU, replayed.
        memory_gib: the peak of that.
    """

    name: str
    case: str
    parameters: int
    blocks: int
    step_ms: float
    memory_gib: float


# By integration/results; parameters are the models' own.
SUBJECTS = (
    Subject("TransformerNP base, 64, 500, 64", "base M=64 N=500 B=64", 36_858_176, 12, 16.43, 7.3),
    Subject(
        "TitanMAC 170m, 4 x 4096", "170m dim=768 layers=14 B=4 T=4096", 168_460_536, 14, 206.5, 21.6
    ),
    Subject("HybridLM 350m plain, 2 x 4096", "", 351_480_713, 24, 133.9, 21.1),
    Subject(
        "HybridLM 350m, 2 x 4096", "350m dim=1024 layers=24 B=2 T=4096", 351_480_713, 1, 153.4, 7.6
    ),
    Subject(
        "HybridLM 1b, 1 x 4096", "1b dim=4096 layers=8 B=1 T=4096", 2_152_101_493, 1, 214.8, 46.5
    ),
)


@dataclass(frozen=True)
class Line:
    """A row of the result file.

    Attributes:
        subject: its name.
        way: of taking steps.
        gpus: how many.
        wire_gb: that each GPU sends in a step, in 10^9 bytes.
        memory_gib: of each GPU.
        step_ms: of all of them.
        efficiency: the step of one GPU over that.
        measured_ms: of that step; nan where it was not measured.
    """

    subject: str
    way: str
    gpus: int
    wire_gb: float
    memory_gib: float
    step_ms: float
    efficiency: float
    measured_ms: float = math.nan


def half(size: float, count: int) -> tuple[float, float]:
    """Bytes that each GPU sends, and seconds, of a tensor of ``size`` bytes being gathered from, or
    summed and scattered to, ``count`` GPUs; to sum it for all of them takes two.
    """
    local = min(count, HOST)
    hosts = math.ceil(count / HOST)
    inside = (local - 1) / local * size
    between = (hosts - 1) / hosts * size / local
    seconds = inside / (SHARE * LINK) + between / (SHARE * NETWORK)
    seconds += BEGIN * (local > 1) + BEGIN_BETWEEN * math.log2(max(hosts, 1))
    return inside + between, seconds


def captured(subject: Subject, count: int) -> tuple[float, float]:
    """Bytes and seconds of a step that averages its gradients at its end."""
    sent, seconds = half(FP32 * subject.parameters, count)
    return 2 * sent, 1e-3 * subject.step_ms + 2 * seconds


def overlapped(subject: Subject, count: int) -> tuple[float, float]:
    """Of one that averages each bucket while the backward pass goes on."""
    step = 1e-3 * subject.step_ms
    size = FP32 * subject.parameters
    buckets = max(1, math.ceil(size / BUCKET))
    sent, seconds = half(size / buckets, count)
    free = 0.0
    for number in range(buckets):
        ready = step * (1 - BACKWARD + BACKWARD * (number + 1) / buckets)
        free = max(free, ready) + 2 * seconds
    return 2 * sent * buckets, max(step, free)


def sharded(subject: Subject, count: int) -> tuple[float, float]:
    """Of one whose parameters are gathered, block by block, before they are needed."""
    blocks, step = subject.blocks, 1e-3 * subject.step_ms
    sent, seconds = half(FP32 * subject.parameters / blocks, count)
    clock = free = 0.0
    passes = [step * (1 - BACKWARD) / blocks] * blocks, [step * BACKWARD / blocks] * blocks
    for number, lengths in enumerate(passes):
        # The first block of a pass waits; of one alone the backward pass still has what it wants.
        gathered = clock if number and blocks == 1 else max(free, clock) + seconds
        free = max(free, gathered)
        for place, length in enumerate(lengths):
            begun = max(clock, gathered)
            if place + 1 < blocks:
                free = max(free, begun) + seconds
                gathered = free
            clock = begun + length
            if number:
                free = max(free, clock) + seconds
    gathers = 1 if blocks == 1 else 2
    return (gathers + 1) * blocks * sent, max(clock, free)


WAYS = {"ddp, captured": captured, "ddp, eager": overlapped, "fsdp, eager": sharded}
# Milliseconds by case, way and number of processes.
Measured = Mapping[tuple[str, str, int], float]


def measured_in(file: Path) -> Measured:
    """The steps of a file of ``fusewright_models.bench scaling``."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return {(row["case"], row["way"], int(row["processes"])): float(row["ms"]) for row in rows}


def line(subject: Subject, way: str, count: int, measured: Measured = NONE) -> Line:
    sent, seconds = WAYS[way](subject, count)
    states = PARAMETER * subject.parameters / 2**30
    memory = subject.memory_gib
    if way == "fsdp, eager":
        whole = FP32 * subject.parameters / 2**30
        # Two blocks are there at a time.
        memory += states / count - states + min(2, subject.blocks) * whole / subject.blocks
    ms = 1e3 * seconds
    taken = measured.get((subject.case, way, count), math.nan)
    return Line(subject.name, way, count, sent / 1e9, memory, ms, subject.step_ms / ms, taken)


def draw(lines: list[Line]) -> Figure:
    """Efficiency over GPUs: a panel for each way, a colour for each subject, and a cross where a
    captured step was measured; an eager one waits for the host, too.
    """
    heading = "Efficiency of training steps over the number of GPUs, higher is better"
    figure, panels = figures.panels([*WAYS], heading=heading, height=3.8, sharey=True)
    subjects = dict.fromkeys(each.subject for each in lines)
    for axes, way in zip(panels, WAYS, strict=True):
        for subject, colour in zip(subjects, itertools.cycle(figures.CURVES), strict=False):
            mine = [each for each in lines if (each.subject, each.way) == (subject, way)]
            counts = [x.gpus for x in mine]
            name = f"{subject.partition(',')[0]}, expected"
            axes.plot(counts, [x.efficiency for x in mine], ".-", color=colour, label=name)
            if way == "ddp, captured":
                taken = [x.efficiency * x.step_ms / x.measured_ms for x in mine]
                axes.plot(counts, taken, "x", color=colour, markersize=8)
        axes.set_xscale("log")
        axes.set_xticks(COUNTS, labels=[str(count) for count in COUNTS])
        axes.minorticks_off()
        figures.dress(axes, x="GPUs")
    panels[0].plot([], [], "kx", label="measured")
    panels[0].set_ylabel("efficiency", fontsize=figures.TEXT)
    figures.legend(figure, columns=3)
    return figure


def main(
    out: Annotated[Path, typer.Option(help="Folder of the rows and their picture.")],
    measured: Annotated[Path | None, typer.Option(help="What `bench scaling` wrote.")] = None,
) -> None:
    """Write what so many GPUs are expected to do."""
    taken = NONE if measured is None else measured_in(measured)
    lines = [line(subject, way, n, taken) for subject in SUBJECTS for way in WAYS for n in COUNTS]
    write(lines, out / "scaling.csv", draw, number=".3f")
    Console().print(f"results in {out / 'scaling.csv'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
