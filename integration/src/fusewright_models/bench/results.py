"""Measured steps as rows of a result file and of a table on the terminal."""

from __future__ import annotations

import csv
import io
import platform
import re
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.table import Table

from .shapes import Shape
from .step import STAGES, Measurement

COLUMNS = ["op", "case", "pass", "provider", "dtype", "timing"]
COLUMNS += ["ms", "ms_p20", "ms_p80", "tflops", "gbps", "mem_mib"]
KEY = ["op", "case", "pass", "dtype", "timing"]
Row = dict[str, str]


def environment_name(device: torch.device) -> str:
    """The name of a result file: GPU, torch and triton, such as ``h200-torch2.11-triton3.6``."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    gpu = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")
    return "-".join([gpu, *(_short_version(name) for name in ("torch", "triton"))])


def _short_version(distribution: str) -> str:
    try:
        return distribution + ".".join(version(distribution).split(".")[:2])
    except PackageNotFoundError:
        return f"no-{distribution}"


def rows(
    shape: Shape,
    provider: str,
    measured: Measurement,
    operations: dict[str, float],
    device: torch.device,
) -> list[Row]:
    """Rows of the stages, timed where the device is, and of the whole step on the host's clock."""
    clock = "event" if device.type == "cuda" else "wall"
    times = [(name, clock, measured.stages[name]) for name in STAGES]
    found = []
    for name, timing, time in [*times, ("step", "wall", measured.step)]:
        count = operations.get(name)
        values = [
            *("TransformerNP", shape.case, name, provider, "bf16", timing),
            *(f"{ms:.4f}" for ms in time),
            f"{count / time.ms / 1e9:.1f}" if count else "",
            "",
            "" if measured.memory_mib is None else f"{measured.memory_mib:.1f}",
        ]
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def merge(path: Path, new: Iterable[Row]) -> None:
    """Put rows into a result file; those of the same case, pass and provider are replaced, whatever
    attention torch took then.
    """

    def identity(row: Row) -> tuple[str, ...]:
        return (*(row[column] for column in KEY), row["provider"].partition(" (")[0])

    merge_by(identity, path, COLUMNS, new)


def merge_by(
    identity: Callable[[Row], tuple[str, ...]], path: Path, columns: list[str], new: Iterable[Row]
) -> None:
    """Put rows into a file with these columns, in place of those of the same identity."""
    old: list[Row] = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
    kept = {identity(row): row for row in [*old, *new]}
    # Whole before it is written: what cannot be written costs no row of the file.
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.getvalue())


def empty_table(shape: Shape) -> Table:
    """The table of one shape, to be filled by ``add``."""
    table = Table(title=shape.case, caption="step and stages in ms")
    table.add_column("provider")
    table.add_column("attention")
    for name in ("tokens/s", "step", *STAGES, "TFLOPS", "GiB", "steps", "loss"):
        table.add_column(name, justify="right")
    return table


def add(
    table: Table,
    shape: Shape,
    provider: str,
    measured: Measurement,
    operations: dict[str, float],
) -> None:
    """A line of the table."""
    memory = measured.memory_mib
    table.add_row(
        provider,
        measured.attention,
        f"{1e3 * shape.tokens / measured.step.ms:,.0f}",
        f"{measured.step.ms:,.1f}",
        *(f"{measured.stages[name].ms:,.1f}" for name in STAGES),
        f"{operations['step'] / measured.step.ms / 1e9:.1f}",
        "" if memory is None else f"{memory / 1024:.1f}",
        str(measured.steps),
        f"{measured.loss:.5f}",
    )
