"""Launch tables as data: how much of a tensor one program takes.

The table of the mixtures is read from the top; the first line whose ``max_components`` is not below
K serves it.
Source: results/tuning-h200-torch2.11-triton3.6.csv for mixtures of 10 components and ten heads of
1376 hidden units; unmeasured for others.
"""

from __future__ import annotations

from typing import NamedTuple


class MixtureConfig(NamedTuple):
    """One program computes ``block_rows`` mixtures, each in one thread of up to ``max_registers``,
    which holds all components or reads them again for each use.
    """

    max_components: float
    block_rows: int
    num_warps: int
    held: bool
    max_registers: int = 128


class FinishConfig(NamedTuple):
    """One program adds the partial sums of the mean, ``block`` at a time."""

    block: int
    num_warps: int


class BackwardConfig(NamedTuple):
    """One program turns and multiplies the slopes of ``block_rows`` rows by up to ``block_cols``
    parameters.
    """

    block_rows: int
    block_cols: int
    num_warps: int


class HeadsConfig(NamedTuple):
    """One program walks over ``block_rows`` rows of one head, ``block_cols`` hidden units at a
    time.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_stages: int


class HeadsBackwardConfig(NamedTuple):
    """One program walks over a share of the rows, ``block_rows`` at a time, at ``block_cols``
    hidden units of one head; there are up to ``max_parts`` shares of at least ``min_rows`` rows.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_stages: int
    max_parts: int
    min_rows: int


MIXTURE = (
    MixtureConfig(max_components=16, block_rows=128, num_warps=4, held=True),
    MixtureConfig(max_components=float("inf"), block_rows=128, num_warps=4, held=False),
)
FINISH = FinishConfig(block=1024, num_warps=4)
BACKWARD = BackwardConfig(block_rows=64, block_cols=32, num_warps=4)

HEADS = HeadsConfig(block_rows=16, block_cols=128, num_warps=4, num_stages=3)
HEADS_BACKWARD = HeadsBackwardConfig(
    block_rows=32, block_cols=64, num_warps=4, num_stages=3, max_parts=32, min_rows=128
)
ADD_PARTS = FinishConfig(block=1024, num_warps=4)


def mixture_config(components: int) -> MixtureConfig:
    return next(config for config in MIXTURE if components <= config.max_components)


def power_of_2(number: int) -> int:
    """The lowest power of 2 that is not below ``number``."""
    return 1 << (number - 1).bit_length()
