"""The launches of the gating and their candidates: ``python -m fusewright_testkit.tune
feed-forward``.

The fastest lines go to ``gating/launch.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib

import torch
from fusewright.feed_forward import silu_mul
from fusewright.feed_forward.gating import launch, reference
from fusewright.feed_forward.gating.silu_mul import silu_mul_halves
from fusewright_testkit.bench import load
from fusewright_testkit.tune import Tuning, lines

bench = load(pathlib.Path(__file__).parent)
CHECKED_ROWS = 301


def tunings() -> list[Tuning]:
    return [
        Tuning(
            names=dict(kind=prefix + kind, rows=rows, cols=cols, dtype="bf16"),
            case=case_of(rows, cols, halves=bool(prefix)),
            op=functools.partial(silu_mul_halves if prefix else silu_mul, backend="triton"),
            module=launch,
            candidates=lines(candidates(), kind.upper()),
            backward=kind == "backward",
            rate="tbps",
        )
        for prefix, kind in itertools.product(("", "halves_"), ("forward", "backward"))
        for rows, cols in bench.SHAPES
    ]


def case_of(rows: int, cols: int, *, halves: bool) -> bench.Case:
    case = bench.gating_case(rows, cols)
    if not halves:
        few = bench.gating_case(CHECKED_ROWS, cols)
        return dataclasses.replace(case, sample=few.inputs)

    def joint(rows: int, device: str) -> list[torch.Tensor]:
        return [torch.randn(rows, 2 * cols, dtype=case.dtype, device=device)]

    return dataclasses.replace(
        case,
        op="silu_mul_halves",
        reference=reference.silu_mul_halves,
        inputs=functools.partial(joint, rows),
        sample=functools.partial(joint, CHECKED_ROWS),
    )


def candidates() -> list[launch.ElementsConfig]:
    """Blocks of 4 to 32 elements a thread."""
    blocks = itertools.product((512, 1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16))
    return [
        launch.ElementsConfig(block, num_warps)
        for block, num_warps in blocks
        if 4 <= block / (32 * num_warps) <= 32
    ]
