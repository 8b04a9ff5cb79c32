"""Tasks from the rows of a table: some of them as context, others as targets.

Columns are standardised by the rows that are trained on. One row in five is held out: those whose
values have the lowest digests, whatever the order of the rows, so that of equal rows all are or
none is. No training task has a held-out row. A held-out task asks for held-out rows given training
ones, which is what a table's model is for. The reference is a linear function with Gaussian noise,
fitted to the training rows by least squares.

Log-likelihoods are those of the standardised output; in its own units they are lower by the
logarithm of its scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .columns import Column, Columns, read_columns
from .linear_regression import with_one
from .sizes import Size
from .task import Sampler, Task, normal_log_likelihood

# One row in so many is held out.
SHARE = 5
FEWEST_ROWS = 10
# Of a task, where nothing else is asked for and there are as many rows.
CONTEXTS, TARGETS = Size(8, 128), 64
# Where so many times as many rows are there as a task has, they are drawn one by one.
SPARSE = 16


@dataclass(frozen=True, eq=False)
class Table:
    """Rows to train on and rows to score, standardised: inputs, then the output.

    Attributes:
        columns: their names and scales.
        training: ``[R, inputs + 1]``, fp32, on the host.
        held_out: likewise.
        digest: of all rows in their order, in hexadecimal.
    """

    columns: Columns
    training: Tensor
    held_out: Tensor
    digest: str

    def __str__(self) -> str:
        names = ",".join(self.columns.input_names)
        count = len(self.training) + len(self.held_out)
        return f"of {names} and {self.columns.output.name}, {count} rows of digest {self.digest}"


def read_table(path: Path | str, inputs: Sequence[str], output: str) -> Table:
    """Those columns of a CSV or parquet file.

    Raises:
        OSError, ValueError, RuntimeError: as of ``read_columns``; or the output is an input, or
            there are fewer than 10 rows, or too few different ones to hold some out.
    """
    if output in inputs:
        raise ValueError(f"wanted an output that is none of the inputs; got {output!r}")
    # Both zeros are one number.
    values = read_columns(path, [*inputs, output]) + 0.0
    if len(values) < FEWEST_ROWS:
        raise ValueError(f"wanted {FEWEST_ROWS} rows or more in {path}; got {len(values)}")
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in values]
    limit = sorted(digests)[len(digests) // SHARE]
    held_out = np.array([each < limit for each in digests])
    if not held_out.any():
        raise ValueError(
            f"wanted rows of which one in {SHARE} can be held out in {path}; "
            f"got {len(set(digests))} different ones"
        )
    names = [*inputs, output]
    every = [Column.of(name, values[~held_out, n]) for n, name in enumerate(names)]
    scaled = np.stack([each.standardised(values[:, n]) for n, each in enumerate(every)], axis=1)
    training, rest = (torch.from_numpy(scaled[part]).float() for part in (~held_out, held_out))
    whole = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
    return Table(Columns(tuple(every[:-1]), every[-1]), training, rest, whole)


@dataclass(eq=False, kw_only=True)
class TableTasks(Sampler):
    """Rows of a table given others of it.

    Args:
        table: the rows.
        held_out: targets are held-out rows, given training ones; otherwise all are training rows.
        context_size: M; by default uniform from 8 to 128, or to half of the training rows.
        target_size: N; by default 64, or as many as there are.
        ragged: a context size for each task instead.
        device: where the rows lie and the tasks are made.
        seed: of both generators.

    Raises:
        ValueError: a task would have more rows than there are.
    """

    reference = "least squares"

    table: Table
    held_out: bool = False

    def __post_init__(self) -> None:
        self.x_width = len(self.table.columns.inputs)  # type: ignore[misc]
        super().__post_init__()
        known, asked = len(self.table.training), len(self.table.held_out)
        context, targets = self.contexts.high, self.target_size.high if self.target_size else 1
        if context + targets > known or targets > asked:
            raise ValueError(
                f"wanted a context and targets of at most {known} training rows together, and at "
                f"most {asked} targets, as many as are held out; got {context} and {targets}"
            )
        self.training, self.rest = (
            rows.to(self.device) for rows in (self.table.training, self.table.held_out)
        )
        x, y = with_one(self.table.training[:, :-1].double()), self.table.training[:, -1:].double()
        # On the host, whose solver takes columns that depend on each other.
        weights = torch.linalg.lstsq(x, y, driver="gelsd").solution
        self.weights = weights.to(self.device)
        least = torch.finfo(torch.float32).eps
        self.variance = (y - x @ weights).square().mean().clamp(min=least).to(self.device)

    @property
    def contexts(self) -> Size:
        most = min(CONTEXTS.high, len(self.table.training) // 2)
        return self.context_size or Size(min(CONTEXTS.low, most), most)

    def default_targets(self, context: int) -> Size:
        known, asked = len(self.table.training), len(self.table.held_out)
        number = min(TARGETS, known - context, asked)
        return Size(number, number)

    def sample_sized(self, batch: int, context: int, targets: int) -> Task:
        if self.held_out:
            shown = self.training[self.draw_rows(batch, len(self.training), context)]
            asked = self.rest[self.draw_rows(batch, len(self.rest), targets)]
        else:
            numbers = self.draw_rows(batch, len(self.training), context + targets)
            shown, asked = self.training[numbers].split((context, targets), dim=1)
        return Task(shown[..., :-1], shown[..., -1:], asked[..., :-1], asked[..., -1:])

    def draw_rows(self, batch: int, rows: int, count: int) -> Tensor:
        """``[batch, count]`` numbers below ``rows``, those of a task all different: each choice and
        order of them as likely as any other.
        """
        if rows < SPARSE * count:
            return self.uniform(0.0, 1.0, batch, rows).argsort(dim=1)[:, :count]
        # Of more than twice as many draws from so many rows no two in three are repeats.
        size = (batch, 2 * count + 32)
        drawn = torch.randint(rows, size, generator=self.generator, device=self.device)
        ordered, places = drawn.sort(dim=1, stable=True)
        again = torch.zeros_like(drawn)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        repeats = torch.empty_like(drawn).scatter_(1, places, again)
        first = repeats.argsort(dim=1, stable=True)[:, :count]
        return drawn.gather(1, first)

    def predict(self, task: Task, x_target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y by least squares at ``x_target [B, N, d_x]``, each ``[B, N, 1]``,
        fp64; the same for every task.
        """
        mean = with_one(x_target.double()) @ self.weights
        return mean, self.variance.expand_as(mean)

    def reference_log_likelihood(self, task: Task) -> Tensor:
        return normal_log_likelihood(task.y_target, *self.predict(task, task.x_target))
