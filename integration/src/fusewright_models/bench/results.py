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
from rich.table import Column, Table

from .step import Time

COLUMNS = ["op", "case", "pass", "provider", "dtype", "timing"]
COLUMNS += ["ms", "ms_p20", "ms_p80", "tflops", "gbps", "mem_mib"]
KEY = ["op", "case", "pass", "dtype", "timing"]
ABSENT = "absent"
Row = dict[str, str]


def environment_name(device: torch.device) -> str:
    """The name of a result file: GPU, torch and triton, such as ``h200-torch2.11-triton3.6``."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    gpu = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")
    return "-".join([gpu, *(_short_version(name) for name in ("torch", "triton"))])


def version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ABSENT


def _short_version(distribution: str) -> str:
    found = version_of(distribution)
    return (
        f"no-{distribution}" if found == ABSENT else distribution + ".".join(found.split(".")[:2])
    )


def row(
    named: tuple[str, str, str, str],
    timing: str,
    time: Time,
    memory_mib: float | None,
    operations: float | None = None,
) -> Row:
    """A row of op, case, pass and provider; the rate is that of so many operations."""
    rate = f"{operations / time.ms / 1e9:.1f}" if operations else ""
    times = (f"{ms:.4f}" for ms in time)
    return dict(
        zip(COLUMNS, (*named, "bf16", timing, *times, rate, "", mib(memory_mib)), strict=True)
    )


def merge(path: Path, new: Iterable[Row]) -> None:
    """Put rows into a result file; those of the same case, pass and provider are replaced, whatever
    attention torch took then.
    """

    def identity(row: Row) -> tuple[str, ...]:
        return (*(row[column] for column in KEY), row["provider"].partition(" (")[0])

    merge_by(identity, path, COLUMNS, new)


def keep_beside(
    file: Path | None, kind: str, columns: list[str], values: Iterable[str], named: int = 2
) -> None:
    """Put a row into the file of that kind beside a result file, if there is one, in place of that
    of the same first columns, so many as ``named``.
    """
    if file is not None:
        kept = dict(zip(columns, values, strict=True))
        path = file.with_name(f"{kind}-{file.name}")
        merge_by(lambda row: tuple(row[name] for name in columns[:named]), path, columns, [kept])


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


def table_of(title: str, caption: str, named: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table of columns to the left and to the right."""
    right = (Column(name, justify="right") for name in numbers)
    return Table(*named, *right, title=title, caption=caption)


def mib(memory_mib: float | None) -> str:
    return "" if memory_mib is None else f"{memory_mib:.1f}"


def gib(memory_mib: float | None, digits: int) -> str:
    return "" if memory_mib is None else f"{memory_mib / 1024:.{digits}f}"
