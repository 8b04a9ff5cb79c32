"""How often the yardstick lets a right kernel and a wrong one pass, by its number of draws.

    python ci/studies/yardstick.py --out rows.csv

runs norm's kernels in Triton's interpreter on fp32 inputs of many seeds, and beside them formulas
with a deliberate defect, and holds all of them against the yardstick with 0, 3, 8 and 16 draws.
"""

from __future__ import annotations

import csv
import functools
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

# Before triton is first imported.
os.environ["TRITON_INTERPRET"] = "1"

import fusewright.norm
import torch
import typer
from fusewright.norm import reference
from fusewright_testkit import yardstick
from fusewright_testkit.yardstick import Allowance, MovedResults, Yardstick, assert_within
from torch import Tensor

DRAWS = (0, 3, 8, 16)
EPS = 1e-5
OPS = {"rms_norm": ("y", "dx", "dweight"), "layer_norm": ("y", "dx", "dweight", "dbias")}
SHAPES = ((64, 1), (64, 2), (64, 3), (64, 128))


class Rounded(torch.autograd.Function):
    """Ten bits of the mantissa, as if a statistic had been kept in TF32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class WithoutLastRow(torch.autograd.Function):
    """A bias for every row whose gradient leaves one row out."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, x: Tensor) -> Tensor:
        return bias.expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:-1].sum(0), None


def coarse_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * Rounded.apply(reference.rstd_of(x, EPS)) * weight


def bias_of_63_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return reference.layer_norm(x, weight, eps=EPS) + WithoutLastRow.apply(bias, x)


DEFECTS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "rms_norm": {
        "rstd in 10 bits": coarse_rms_norm,
        "eps doubled": functools.partial(reference.rms_norm, eps=2 * EPS),
    },
    "layer_norm": {"dbias of 63 rows": bias_of_63_rows},
}


def passes(found: list[Tensor], truth: list[Tensor], allowed: list[Allowance]) -> bool:
    try:
        for triple in zip(found, truth, allowed, strict=True):
            assert_within(*triple)
    except AssertionError:
        return False
    return True


def study(op: str, shape: tuple[int, int], seeds: int) -> Iterator[tuple[str, object, object]]:
    """Subject, number of draws or quantity, and value."""
    oracle = functools.partial(getattr(reference, op), eps=EPS)
    subjects: dict[str, Callable[..., Tensor]] = {
        "kernel": functools.partial(getattr(fusewright.norm, op), eps=EPS, backend="triton"),
        **DEFECTS[op],
    }
    passed: Counter = Counter()
    eager_errors: dict[str, list[float]] = {name: [] for name in OPS[op]}
    for seed in range(seeds):
        torch.manual_seed(seed)
        inputs = [torch.randn(shape), *(torch.randn(shape[1]) for _ in OPS[op][2:])]
        with mock.patch.object(yardstick, "MOVES", 0):
            bare = Yardstick(oracle, inputs)
        eager = bare.run(oracle)
        with MovedResults():
            moved = [bare.run(oracle, torch.float64) for _ in range(max(DRAWS))]
        found = {name: bare.run(subject) for name, subject in subjects.items()}
        for draws in DRAWS:
            allowed = [
                Allowance.of(truth, each, *others)
                for truth, each, *others in zip(bare.truth, eager, *moved[:draws], strict=True)
            ]
            for name in subjects:
                passed[name, draws] += passes(found[name], bare.truth, allowed)
        for name, truth, each in zip(OPS[op], bare.truth, eager, strict=True):
            eager_errors[name].append((each.double() - truth).abs().max().item())
    for name in subjects:
        for draws in DRAWS:
            yield name, f"passed with {draws} draws", passed[name, draws]
    for name, errors in eager_errors.items():
        for which in (min, statistics.median, max):
            yield f"eager {name}", f"{which.__name__} of largest error", f"{which(errors):.1e}"


def main(
    out: Annotated[Path, typer.Option(help="The CSV file to write.")],
    seeds: Annotated[int, typer.Option(help="Sets of inputs for each shape.")] = 100,
) -> None:
    """Run the comparison and write its rows."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("op", "case", "seeds", "subject", "quantity", "value"))
        for op in OPS:
            for rows, cols in SHAPES:
                for row in study(op, (rows, cols), seeds):
                    writer.writerow((op, f"rows={rows} cols={cols}", seeds, *row))


if __name__ == "__main__":
    typer.run(main)
