"""The launch of a norm and a linear layer in one kernel for Hopper."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import (
    Allocator,
    DescribedLaunch,
    Layout,
    allocate,
    allocator,
    cdiv,
    in_tiles,
)
from .._core.lazy import lazy_module

if TYPE_CHECKING:
    from . import kernels_hopper
else:
    kernels_hopper = lazy_module(__package__, "kernels_hopper")

DTYPES = torch.bfloat16, torch.float16
# Rows of a group of warps, groups of a program, and columns of x in a slice of shared memory.
ROWS = 64
GROUPS = 2
SLICE = 64
# A row starts at a multiple of 16 bytes, or no descriptor reads it.
ALIGNED = 16
# What reading and normalising a program's rows takes, in columns of y that it multiplies meanwhile.
# Unmeasured.
COLS_OF_A_PIECE = 160


class HopperConfig(NamedTuple):
    """Serves rows of up to ``max_cols`` columns: tiles of ``block_cols`` rows of weight in a ring
    of ``stages`` slices; of a tile of y ``stored_cols`` columns, all or half, are stored at a time;
    so many registers a thread that multiplies and that copies.
    """

    max_cols: int
    block_cols: int
    stages: int
    stored_cols: int
    registers: int = 232
    copying_registers: int = 24


class HopperConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``: columns of x and slices of them, and
    which operands there are.
    """

    COLS: int
    SLICES: int
    GROUPS: int
    BLOCK_COLS: int
    STORED_COLS: int
    STAGES: int
    REGISTERS: int
    COPYING_REGISTERS: int
    CENTER: bool
    NORM_WEIGHT: bool
    NORM_BIAS: bool
    BIAS: bool


# Wider rows leave the ring no room. Source: docs/decisions/0023-norm-linear-h200.csv and
# 0023-norm-linear-2-h200.csv.
HOPPER = (
    HopperConfig(max_cols=256, block_cols=128, stages=8, stored_cols=128),
    HopperConfig(max_cols=512, block_cols=128, stages=5, stored_cols=64),
)


class Faster(NamedTuple):
    """Rows of up to ``max_cols`` columns, so many of them or more, and so many columns of y or
    more, take less time in one kernel than in two.
    """

    max_cols: int
    fewest_rows: int
    fewest_outputs: int


# Source: the same, for rows of 256 and 512 columns; unmeasured for narrower ones. Between two
# measured sizes of which one is faster, two kernels serve.
FASTER = (
    Faster(max_cols=256, fewest_rows=16384, fewest_outputs=512),
    Faster(max_cols=256, fewest_rows=4096, fewest_outputs=4096),
    Faster(max_cols=256, fewest_rows=1024, fewest_outputs=8192),
    Faster(max_cols=512, fewest_rows=16384, fewest_outputs=2048),
)
# Where rows were measured, programs have tiles for 97 % of the time. Where they have them for less
# than this, one kernel may lose what it gains there.
LEAST_BUSY = 0.95


def hopper_config(
    rows: int, cols: int, outputs: int, x: torch.dtype, weight: torch.dtype, device: torch.device
) -> HopperConfig | None:
    """The line of the table that serves rows of so many columns and as many ``outputs`` of these
    dtypes; None where none does, or two kernels are faster.
    """
    if x not in DTYPES or weight != x or interpreted() or not rows or not cols or not outputs:
        return None
    gpu = device_properties(device)
    if gpu.capability != 90:
        return None
    if cols * x.itemsize % ALIGNED or outputs * x.itemsize % ALIGNED:
        return None
    config = next((config for config in HOPPER if cols <= config.max_cols), None)
    if config is None or not is_faster(rows, cols, outputs, config, gpu.multiprocessors):
        return None
    return config


def is_faster(rows: int, cols: int, outputs: int, config: HopperConfig, programs: int) -> bool:
    """Whether the kernel takes less time than a norm and a product of these sizes."""
    blocks, tiles, parts = pieces_of(rows, outputs, config.block_cols, programs)
    tiles_of_a_program = cdiv(blocks * parts, programs) * cdiv(tiles, parts)
    busy = blocks * tiles / (programs * tiles_of_a_program)
    return busy >= LEAST_BUSY and any(
        cols <= line.max_cols and rows >= line.fewest_rows and outputs >= line.fewest_outputs
        for line in FASTER
    )


class HopperPlan(NamedTuple):
    """One forward pass: the memory of y, mean and rstd, and the launch."""

    y: Allocator
    mean: Allocator | None
    rstd: Allocator
    launch: DescribedLaunch

    def run(self, operands: tuple, floats: tuple[float, ...]) -> tuple:
        """Allocate and launch; ``operands`` are x and weight as matrices with contiguous rows, then
        norm_weight, norm_bias and bias.
        """
        x, weight, *vectors = operands
        y, mean, rstd = self.y(), allocate(self.mean), self.rstd()
        # A Gluon kernel takes no absent pointer: what stands in is not touched.
        pointers = (*(x if v is None else v for v in vectors), rstd if mean is None else mean, rstd)
        self.launch((x, weight, y.view(len(x), len(weight)), *pointers), floats)
        return y, mean, rstd


@functools.lru_cache(maxsize=4096)
def plan_hopper(
    config: HopperConfig,
    leading: tuple[int, ...],
    cols: int,
    outputs: int,
    operands: tuple[Layout | None, ...],
    center: bool,
    device: torch.device,
) -> HopperPlan:
    """The plan of a call that a line serves, of leading axes of x and of operands of these layouts:
    x and weight as matrices, norm_weight, norm_bias and bias.
    """
    rows = math.prod(leading)
    x, _, *vectors = operands
    assert x is not None
    dtype, _ = x
    programs = device_properties(device).multiprocessors
    blocks, tiles, parts = pieces_of(rows, outputs, config.block_cols, programs)
    norm_weight, norm_bias, bias = (vector is not None for vector in vectors)
    launch = DescribedLaunch(
        kernels_hopper.hopper_norm_linear_kernel,
        (min(programs, blocks * parts),),
        device,
        (rows, outputs, blocks * parts, parts, tiles),
        dict(num_warps=4),
        CONFIG=HopperConstants(
            COLS=cols,
            SLICES=cdiv(cols, SLICE),
            GROUPS=GROUPS,
            BLOCK_COLS=config.block_cols,
            STORED_COLS=config.stored_cols,
            STAGES=config.stages,
            REGISTERS=config.registers,
            COPYING_REGISTERS=config.copying_registers,
            CENTER=center,
            NORM_WEIGHT=norm_weight,
            NORM_BIAS=norm_bias,
            BIAS=bias,
        ),
    )
    launch.descriptors = (
        in_tiles(ROWS, SLICE),
        in_tiles(config.block_cols, SLICE),
        in_tiles(ROWS, config.stored_cols),
    )
    statistic = allocator(leading, torch.float32, device)
    y = allocator((*leading, outputs), dtype, device)
    return HopperPlan(y, statistic if center else None, statistic, launch)


class Pieces(NamedTuple):
    """Blocks of rows, tiles of columns, and into how many parts the tiles of a block are cut."""

    blocks: int
    tiles: int
    parts: int


@functools.lru_cache(maxsize=4096)
def pieces_of(rows: int, outputs: int, block_cols: int, programs: int) -> Pieces:
    """In as many parts as make all rounds of the programs, of which each piece normalises its rows,
    take the least time.
    """
    blocks, tiles = cdiv(rows, GROUPS * ROWS), cdiv(outputs, block_cols)

    def time(parts: int) -> int:
        cols = cdiv(tiles, parts) * block_cols
        return cdiv(blocks * parts, programs) * (cols + COLS_OF_A_PIECE)

    return Pieces(blocks, tiles, min(range(1, tiles + 1), key=time))
