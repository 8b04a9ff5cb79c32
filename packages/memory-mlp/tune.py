"""The launches of the pooled update and their candidates: ``python -m fusewright_testkit.tune
memory-mlp``.

The fastest lines go to ``launch.py``, ``launch_backward.py`` and ``problem.py`` of ``update``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from fusewright.memory_mlp import memory_update
from fusewright.memory_mlp.update import launch, launch_backward, launch_hopper, problem
from fusewright.memory_mlp.update.problem import UpdateBlock, UpdateTile
from fusewright_testkit.bench import load
from fusewright_testkit.tune import Tuning, lines

bench = load(pathlib.Path(__file__).parent)
Size = tuple[int, int, int]

DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
PRECISIONS = {"bf16": "narrow", "tf32": "tf32"}
MULTIPROCESSORS = 132
# Of one program, and of the programs that a multiprocessor holds.
SHARED_BYTES = 227 << 10
# Sums of one thread.
LEAST_SUMS, MOST_SUMS = 16, 128
MOST_STAGES = 8
# Programs for each multiprocessor; those of the sums over rows are split.
LEAST_PROGRAMS = 0.4
# From so many programs of a tile on, a tile twice as large is no worse.
MANY_PROGRAMS = 8


class TunedLaunch(NamedTuple):
    """One launch of the update: its table, its kernels, and how many pairs of operands and how many
    accumulators a step of its loop holds (0: elements); the axes of its output, N (rows), D (width)
    or H (hidden), the one dtype that it serves, or "", and whether the loss has a gradient: that
    decides between E_BAR and E_BAR_AND_R, and between no others.
    """

    module: ModuleType
    table: str
    backward: bool
    kernels: tuple[str, ...]
    axes: str = ""
    pairs: int = 0
    sums: int = 1
    dtype: str = ""
    from_loss: bool = True


def tuned(table: str, *sizes: Any, module: ModuleType = launch, dtype: str = "") -> TunedLaunch:
    """A launch whose kernel has its table's name."""
    backward = module is launch_backward
    return TunedLaunch(module, table, backward, (f"{table.lower()}_kernel",), *sizes, dtype=dtype)


GRADIENT_KERNELS = ("gradients_kernel", "add_splits_kernel")
backward = functools.partial(tuned, module=launch_backward)
LAUNCHES = [
    tuned("ROUND", dtype="bf16")._replace(kernels=("round_weights_kernel",)),
    tuned("TRANSPOSE", module=problem, dtype="tf32"),
    tuned("HIDDEN", "NH", 1),
    tuned("RESIDUAL", "ND", 1),
    tuned("SLOPE", "NH", 1),
    tuned("GRADIENTS", "DH", 1)._replace(kernels=GRADIENT_KERNELS),
    tuned("STEP"),
    backward("INNER_PRODUCTS"),
    backward("COTANGENTS"),
    backward("P_BAR", "NH", 1),
    backward("E_BAR", "ND", 2)._replace(from_loss=False),
    backward("E_BAR_AND_R", "ND", 2, 2)._replace(kernels=("e_bar_kernel",)),
    backward("Z_BAR", "NH", 2),
    backward("DK", "ND", 2),
    backward("DWEIGHTS", "DH", 1)._replace(kernels=GRADIENT_KERNELS),
]
Candidate = UpdateTile | UpdateBlock


def states_of(update: Callable[..., Any], *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """An update without its loss, which then has no gradient."""
    return update(*tensors)[:-1]


update = functools.partial(
    bench.flat_update,
    functools.partial(memory_update, **bench.UPDATE_OPTIONS, backend="triton"),
)


def tunings() -> list[Tuning]:
    return [
        tuning(entry, dtype, size)
        for dtype, size, entry in itertools.product(DTYPES, bench.UPDATES, LAUNCHES)
        if is_of_a_table(entry, dtype, size)
    ]


def is_of_a_table(entry: TunedLaunch, dtype: str, size: Size) -> bool:
    """Whether a size takes a line of the launch's table: products over many rows have a kernel for
    Hopper, of one tile.
    """
    over_rows = entry.axes.startswith("N")
    if dtype == "bf16" and over_rows and launch_hopper.is_large(*size, MULTIPROCESSORS):
        return False
    return entry.dtype in ("", dtype)


def tuning(entry: TunedLaunch, dtype: str, size: Size) -> Tuning:
    case = bench.update_case(*size, DTYPES[dtype], "tf32" if dtype == "tf32" else "")
    op = update
    if not entry.from_loss:
        op = functools.partial(states_of, update)
        case = dataclasses.replace(case, reference=functools.partial(states_of, case.reference))
    return Tuning(
        names=dict(table=entry.table, case=case.described, dtype=dtype),
        case=case,
        op=op,
        module=entry.module,
        candidates=lines(candidates_of(entry, dtype, size), entry.table, table=entry.pairs > 0),
        backward=entry.backward,
        kernels=entry.kernels,
        # It finds in the cache what the launch before it wrote.
        cold=False,
        file="tuning-update",
    )


def candidates_of(entry: TunedLaunch, dtype: str, size: Size) -> list[Candidate]:
    """Lines of a launch table for one precision that may be the fastest at a size."""
    if entry.table == "TRANSPOSE":
        return [UpdateBlock(side, warps) for side, warps in ((32, 4), (64, 4), (64, 8), (128, 8))]
    if not entry.pairs:
        return [
            UpdateBlock(block, warps)
            for block, warps in itertools.product((512, 1024, 2048, 4096), (4, 8))
            if 4 <= block / (32 * warps) <= 16
        ]
    itemsize = DTYPES[dtype].itemsize
    depths = [bytes_of_a_row // itemsize for bytes_of_a_row in (128, 256)]
    candidates: list[Candidate] = []
    sides = (64, 32), (64, 64), (128, 64), (64, 128), (128, 128), (128, 256), (256, 128)
    for (rows, cols), depth, warps in itertools.product(sides, depths, (4, 8)):
        sums = entry.sums * rows * cols / (32 * warps)
        programs = programs_of(entry, size, rows, cols)
        least = min(LEAST_PROGRAMS * MULTIPROCESSORS, programs_of(entry, size, 64, 64))
        many = programs >= MANY_PROGRAMS * MULTIPROCESSORS
        fits = programs >= least and (not many or sums == MOST_SUMS)
        # A warp takes 16 rows; of 8 warps two groups of four, which want a tile of 64 rows each.
        fits = fits and (warps == 4 or rows * cols > 64 * 64)
        if LEAST_SUMS <= sums <= MOST_SUMS and (fits or (entry.axes == "DH" and cols > 32)):
            stage = entry.pairs * (rows + cols) * depth * itemsize
            candidates += [
                UpdateTile(PRECISIONS[dtype], rows, cols, depth, warps, stages)
                for stages in worthy_stages(stage, -(-reduced(entry, size) // depth))
            ]
    return candidates


def programs_of(entry: TunedLaunch, size: Size, rows: int, cols: int) -> int:
    """How many tiles of a launch's output there are."""
    lengths = dict(zip("NDH", size, strict=True))
    return -(-lengths[entry.axes[0]] // rows) * -(-lengths[entry.axes[1]] // cols)


def reduced(entry: TunedLaunch, size: Size) -> int:
    """How many products a launch adds: the length of the axis that its output does not have."""
    lengths = dict(zip("NDH", size, strict=True))
    return next(length for axis, length in lengths.items() if axis not in entry.axes)


def worthy_stages(bytes_of_a_stage: int, steps: int) -> list[int]:
    """As many stages as one or more programs on a multiprocessor leave room for."""
    most = min(MOST_STAGES, steps)
    # Three of the smallest tiles, or two.
    sharings = (1, 2, 3) if bytes_of_a_stage <= 1 << 14 else (1, 2)
    possible = {min(SHARED_BYTES // sharing // bytes_of_a_stage, most) for sharing in sharings}
    return sorted(stages for stages in possible if stages >= 2)
