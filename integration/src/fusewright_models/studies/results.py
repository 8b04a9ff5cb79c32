"""Result files of studies: rows of a dataclass as CSV, and a picture of the same name."""

from __future__ import annotations

import csv
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from matplotlib.figure import Figure

from ..figures import save

RowT = TypeVar("RowT")
NO_FORMATS: Mapping[str, str] = {}


def columns(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def read(kind: type[RowT], file: Path) -> list[RowT] | None:
    """The rows of a file; None where its columns are others, or there are none."""
    hints = get_type_hints(kind)
    kinds: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: "True".__eq__}
    with file.open(newline="") as stream:
        reader = csv.DictReader(stream)
        rows = list(reader)
        if reader.fieldnames != columns(kind) or not rows:
            return None
    return [
        kind(**{name: kinds.get(hints[name], str)(x) for name, x in row.items()}) for row in rows
    ]


def rows_before(kind: type[RowT], file: Path) -> list[RowT]:
    """The rows of a file that need not be there; none where `read` has none."""
    return (read(kind, file) if file.is_file() else None) or []


def beside(
    rows: Iterable[RowT], before: Iterable[RowT], identity: Callable[[RowT], Hashable]
) -> list[RowT]:
    """The rows, behind those from before, but for those of the same identity."""
    rows = list(rows)
    replaced = {identity(row) for row in rows}
    return [*(row for row in before if identity(row) not in replaced), *rows]


def write(
    rows: Iterable[Any],
    file: Path,
    draw: Callable[[list[Any]], Figure],
    *,
    number: str = "",
    formats: Mapping[str, str] = NO_FORMATS,
) -> None:
    """Write the rows and what is drawn of them.

    Args:
        rows: of one kind, one or more.
        file: of the rows; the picture's suffix is .png.
        draw: of all rows.
        number: how floats are written, but for those of a column that has a format of its own.
        formats: by column.
    """
    rows = list(rows)
    names = columns(rows[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            values = {name: getattr(row, name) for name in names}
            writer.writerow(
                format(x, formats.get(name, number)) if isinstance(x, float) else x
                for name, x in values.items()
            )
    save(draw(rows), file)
