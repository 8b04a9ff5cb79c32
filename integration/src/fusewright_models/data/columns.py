"""Columns of numbers in CSV and parquet files, and the scales in which a model takes them.

Rows are counted from 1, that below the header of a CSV file.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..extras import imported

# Of a run's folder: the columns that its model was trained on.
COLUMNS = "columns.json"
SUFFIXES = (".csv", ".parquet")
# What a CSV file may have in the place of a number that is not known.
MISSING = {"", "na", "nan", "null", "none"}


def is_table(name: str) -> bool:
    """Whether that is the name of a file which can be read here."""
    return Path(name).suffix in SUFFIXES


def names_in(text: str) -> tuple[str, ...]:
    """The names of "a,b", written as in the header of a CSV file.

    Raises:
        ValueError: a name is empty or stands there twice.
    """
    names = tuple(next(csv.reader([text], skipinitialspace=True), ()))
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"wanted names of columns, such as a,b, each of them once; got {text!r}")
    return names


def read_columns(
    path: Path | str, names: Sequence[str], *, gaps: Collection[str] = ()
) -> np.ndarray:
    """The columns of those names of a CSV or parquet file.

    Args:
        path: of the file, which ends in .csv or .parquet.
        names: of the columns.
        gaps: names of columns in which values may be missing.

    Returns:
        ``[rows, columns]``, fp64; NaN where a value is missing.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, a column is not there or there twice, or a value is missing,
            not finite or no number; says in which column and row.
        RuntimeError: it is a parquet file, and the extra "tables" is not installed.
    """
    file = _checked(path)
    read = _read_parquet if file.suffix == ".parquet" else _read_csv
    values = read(file, names, gaps)
    kept = [name in gaps for name in names]
    for row, place in np.argwhere(~(np.isfinite(values) | (np.isnan(values) & kept)))[:1]:
        raise _refusal(file, names[place], row + 1, str(values[row, place]))
    return values


def has_column(path: Path | str, name: str) -> bool:
    """Whether a file of `read_columns` has a column of that name; errors as there."""
    file = _checked(path)
    if file.suffix == ".parquet":
        return name in _parquet(file).schema_arrow.names
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return name in next(csv.reader(lines, skipinitialspace=True), [])


def _checked(path: Path | str) -> Path:
    file = Path(path)
    if not is_table(file.name):
        raise ValueError(f"wanted a file that ends in {' or '.join(SUFFIXES)}; got {file}")
    if not file.is_file():
        raise FileNotFoundError(f"wanted a file of columns; {file} is none")
    return file


def _refusal(file: Path, name: str, row: int, got: str) -> ValueError:
    return ValueError(f"wanted a number in column {name!r} of row {row} of {file}; got {got}")


def _places(file: Path, names: Sequence[str], header: Sequence[str]) -> list[int]:
    """Where the columns stand."""
    for name in names:
        if (count := list(header).count(name)) != 1:
            known = ", ".join(header) or "none"
            got = f"{count} of that name" if count else known
            raise ValueError(f"wanted a column {name!r} in {file}; got {got}")
    return [header.index(name) for name in names]


def _read_csv(file: Path, names: Sequence[str], gaps: Collection[str]) -> np.ndarray:
    values = array("d")
    try:
        for row in _numbers(file, names, gaps):
            values.extend(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"wanted the text of a CSV file in {file}; got: {error}") from error
    return np.frombuffer(values).reshape(-1, len(names)) if values else np.empty((0, len(names)))


def _numbers(file: Path, names: Sequence[str], gaps: Collection[str]) -> Iterator[list[float]]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines, skipinitialspace=True)
        header = next(rows, [])
        places = _places(file, names, header)
        # Lines without anything are none of its rows.
        for number, row in enumerate(filter(None, rows), 1):
            if len(row) != len(header):
                wanted = f"{len(header)} values in row {number} of {file}"
                raise ValueError(f"wanted {wanted}, as in its header; got {len(row)}")
            try:
                yield [float(row[place]) for place in places]
            except ValueError:
                yield [
                    _number(file, name, number, row[place], name in gaps)
                    for name, place in zip(names, places, strict=True)
                ]


def _number(file: Path, name: str, row: int, text: str, gap: bool) -> float:
    if gap and text.strip().lower() in MISSING:
        return math.nan
    try:
        return float(text)
    except ValueError:
        raise _refusal(file, name, row, repr(text) if text else "nothing") from None


def _parquet(file: Path) -> Any:
    imported("pyarrow", extra="tables", purpose="parquet files")
    from pyarrow import parquet  # type: ignore[import-untyped]

    try:
        return parquet.ParquetFile(file)
    except ValueError as error:
        raise ValueError(f"wanted a parquet file in {file}; got: {error}") from error


def _read_parquet(file: Path, names: Sequence[str], gaps: Collection[str]) -> np.ndarray:
    opened = _parquet(file)
    _places(file, names, opened.schema_arrow.names)
    parts, first = [np.empty((0, len(names)))], 1
    for batch in opened.iter_batches(columns=list(names)):
        columns = [_of_arrow(file, name, first, batch.column(name), name in gaps) for name in names]
        parts.append(np.stack(columns, axis=1))
        first += len(batch)
    return np.concatenate(parts)


def _of_arrow(file: Path, name: str, first: int, column: Any, gap: bool) -> np.ndarray:
    """A part of a column, whose rows are numbered from ``first``."""
    from pyarrow import float64, types

    known = column.is_valid().to_numpy(zero_copy_only=False)
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        row = int(known.argmax()) if known.any() else 0
        got = f"a {column.type}, {column[row].as_py()!r}" if len(column) else f"a {column.type}"
        raise _refusal(file, name, first + row, got)
    if not (gap or known.all()):
        raise _refusal(file, name, first + int(known.argmin()), "nothing")
    numbers = column.cast(float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.where(known, numbers, np.nan)


@dataclass(frozen=True)
class Column:
    """A column in the scale of a model, which takes (value - mean) / scale."""

    name: str
    mean: float
    scale: float

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: the numbers are no scale.
        """
        numbers = [self.mean, self.scale]
        if not (all(type(x) is float and math.isfinite(x) for x in numbers) and self.scale > 0.0):
            raise ValueError(f"wanted a mean and a scale above 0 of {self.name!r}; got {numbers}")

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> Column:
        """With the mean and the standard deviation of ``values``; 1 where they are all equal."""
        if values.min() == values.max():
            # A mean of large numbers that are equal is rounded to another one.
            return cls(name, float(values.min()), 1.0)
        return cls(name, float(values.mean()), float(values.std()) or 1.0)

    @classmethod
    def as_is(cls, name: str) -> Column:
        """Whose values the model takes as they are."""
        return cls(name, 0.0, 1.0)

    def standardised(self, values: np.ndarray) -> np.ndarray:
        return (values - self.mean) / self.scale


@dataclass(frozen=True)
class Columns:
    """What a model was trained on: its inputs in their order, and its output."""

    inputs: tuple[Column, ...]
    output: Column

    @property
    def input_names(self) -> list[str]:
        return [each.name for each in self.inputs]

    def standardised_inputs(self, values: np.ndarray) -> np.ndarray:
        """``values [rows, inputs]`` in the scale of the model."""
        parts = [each.standardised(values[:, n]) for n, each in enumerate(self.inputs)]
        return np.stack(parts, axis=1)

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def read(cls, file: Path) -> Columns:
        """What `to_json` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is another one.
        """
        try:
            found = json.loads(file.read_bytes())
            inputs = tuple(Column(**each) for each in found["inputs"])
            return cls(inputs, Column(**found["output"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"wanted the columns of a run in {file}; got: {error!r}") from error
