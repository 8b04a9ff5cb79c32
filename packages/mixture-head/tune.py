"""The launches of the mixture and of the heads and their candidates: ``python -m
fusewright_testkit.tune mixture-head``.

The fastest lines go to ``mixture/launch.py`` and ``heads/launch.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from typing import NamedTuple

import torch
from fusewright.mixture_head import mixture_nll
from fusewright.mixture_head.heads import launch as heads
from fusewright.mixture_head.heads import reference
from fusewright.mixture_head.mixture import launch as mixture
from fusewright_testkit import Case
from fusewright_testkit.bench import load
from fusewright_testkit.cases import by_pass
from fusewright_testkit.tune import Tuning, lines

bench = load(pathlib.Path(__file__).parent)
CHECKED_ROWS = 301
MIXTURE_COLS = 3 * bench.COMPONENTS
HEADS_COLS = bench.COMPONENTS * bench.STORED


class SiLUHeads(torch.autograd.Function):
    """The narrow layer alone."""

    @staticmethod
    def forward(ctx, u, weight):
        ctx.save_for_backward(u, weight)
        return heads.silu_heads(u, weight)

    @staticmethod
    def backward(ctx, dparams):
        return heads.silu_heads_backward(dparams, *ctx.saved_tensors)


def tunings() -> list[Tuning]:
    return [
        Tuning(
            names=dict(kind=kind, rows=rows, cols=HEADS_COLS if of_heads else MIXTURE_COLS),
            case=heads_case(rows) if of_heads else mixture_case(rows),
            op=SiLUHeads.apply if of_heads else functools.partial(mixture_nll, backend="triton"),
            module=heads if of_heads else mixture,
            candidates=lines(
                candidates_of(kind),
                "BACKWARD" if kind.endswith("backward") else "FORWARD",
                table=kind == "forward",
            ),
            backward=kind.endswith("backward"),
            rate="tbps",
        )
        for kind in ("forward", "backward", "heads_forward", "heads_backward")
        for rows in bench.ROWS
        for of_heads in [kind.startswith("heads")]
    ]


def mixture_case(rows: int) -> Case:
    """Forward the slopes are written, as large as what they belong to."""
    moved = 2 * rows * (MIXTURE_COLS + 1) * torch.float32.itemsize
    return dataclasses.replace(
        bench.mixture_case(rows),
        bytes_moved=by_pass(moved, moved),
        sample=functools.partial(bench.mixture_inputs, CHECKED_ROWS),
    )


def heads_case(rows: int) -> Case:
    """The narrow layer alone: of hidden units that are given."""
    return Case(
        op="silu_heads",
        sizes=dict(L=rows, K=bench.COMPONENTS, F=bench.STORED),
        dtype=torch.bfloat16,
        reference=reference.silu_heads,
        inputs=functools.partial(heads_inputs, rows),
        sample=functools.partial(heads_inputs, CHECKED_ROWS),
        bytes_moved=by_pass(rows * HEADS_COLS * torch.bfloat16.itemsize),
    )


def heads_inputs(rows: int, device: str) -> list[torch.Tensor]:
    """u and weight."""
    u = torch.randn(rows, bench.COMPONENTS, bench.STORED, dtype=torch.bfloat16, device=device)
    return [u, torch.randn(bench.COMPONENTS, bench.STORED, 3, device=device)]


def candidates_of(kind: str) -> list[NamedTuple]:
    """Launches of 4 to 32 elements a thread; for mixtures, one or two rows a thread."""
    if kind == "forward":
        return [
            mixture.ForwardConfig(float("inf"), block_rows, num_warps, held)
            for block_rows, num_warps, held in itertools.product(
                (32, 64, 128, 256), (1, 2, 4, 8), (True, False)
            )
            if 1 <= block_rows / (32 * num_warps) <= 2
        ]
    if kind == "backward":
        return [
            mixture.BackwardConfig(block_rows, block_cols, num_warps)
            for block_rows, block_cols, num_warps in itertools.product(
                (16, 32, 64, 128, 256), (16, 32), (1, 2, 4, 8)
            )
            if 4 <= block_rows * block_cols / (32 * num_warps) <= 32
        ]
    if kind == "heads_forward":
        tiles = itertools.product((8, 16, 32), (64, 128, 256), (4, 8), (1, 2, 3, 4))
        return [
            heads.ForwardConfig(*tile)
            for tile in tiles
            if 4 <= tile[0] * tile[1] / (32 * tile[2]) <= 32
        ]
    tiles = itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8), (32, 64, 128))
    return [
        heads.BackwardConfig(*tile, min_rows=128)
        for tile in tiles
        if 16 <= tile[0] * tile[1] / (32 * tile[2]) <= 64
    ]
