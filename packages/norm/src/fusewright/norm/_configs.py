"""Launch tables as data: how many rows and warps one program takes, by width of the row.

Each table is read from the top; the first line whose ``max_cols`` is not below the row's width
serves it.
Source: results/tuning-h200-torch2.11-triton3.6.csv for rows of 512 to 16384 columns and for the
small backward pass; unmeasured for narrower and for wider rows.
"""

from __future__ import annotations

from typing import NamedTuple


class ForwardConfig(NamedTuple):
    """One program holds ``block_rows`` whole rows in registers."""

    max_cols: int
    block_rows: int
    num_warps: int


class BackwardConfig(NamedTuple):
    """``programs_per_sm`` programs stay on each multiprocessor and walk over blocks of
    ``block_rows`` rows.

    With ``read_again`` they fetch the row a second time after its reduction instead of keeping it
    in registers. What of ``num_stages`` does not fit in a card's shared memory is left out.
    """

    max_cols: int
    block_rows: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    read_again: bool = False


class ForwardWideConfig(NamedTuple):
    """Rows too wide for registers are walked in blocks of ``block_cols`` columns."""

    block_cols: int
    num_warps: int


class BackwardSmallConfig(NamedTuple):
    """Up to ``max_elements`` and ``max_rows`` of ``max_cols``, one launch serves: programs of
    ``tile_elements`` (whole rows) compute dx, others, ``part_rows`` by ``part_cols`` at a time,
    dweight and dbias.
    """

    max_elements: int
    max_rows: int
    max_cols: int
    tile_elements: int
    part_rows: int
    part_cols: int
    num_warps: int


class BackwardWideConfig(NamedTuple):
    """dx as in the forward pass; dweight in ``parts`` shares, by tiles of ``block_rows`` and
    ``part_cols``.
    """

    block_cols: int
    num_warps: int
    parts: int
    block_rows: int
    part_cols: int


class AddPartsConfig(NamedTuple):
    """One program adds ``block_cols`` columns, ``block_parts`` shares at a time."""

    block_parts: int
    block_cols: int
    num_warps: int


class SinkhornConfig(NamedTuple):
    """One program holds ``matrices`` square matrices of up to ``max_n`` rows in registers; in the
    backward pass ``programs_per_sm`` programs stay on each multiprocessor and walk over blocks of
    them.
    """

    max_n: int
    matrices: int
    num_warps: int
    programs_per_sm: int = 0


FORWARD_NARROW = (
    ForwardConfig(max_cols=64, block_rows=32, num_warps=4),
    ForwardConfig(max_cols=256, block_rows=8, num_warps=4),
    ForwardConfig(max_cols=512, block_rows=2, num_warps=1),
    ForwardConfig(max_cols=2048, block_rows=1, num_warps=4),
)
FORWARD = (
    *FORWARD_NARROW,
    ForwardConfig(max_cols=8192, block_rows=1, num_warps=8),
    ForwardConfig(max_cols=16384, block_rows=1, num_warps=16),
)
# rms_norm_gated reads two tensors as well and takes these lines, unmeasured.
FORWARD_ADD = (*FORWARD_NARROW, ForwardConfig(max_cols=16384, block_rows=1, num_warps=16))
FORWARD_LAYER = (*FORWARD_NARROW, ForwardConfig(max_cols=16384, block_rows=1, num_warps=8))
# Up to so many elements the rows that were read make room in the cache for those that are written.
EVICT_ELEMENTS = 1 << 22
FORWARD_WIDE = ForwardWideConfig(block_cols=8192, num_warps=16)

BACKWARD = (
    BackwardConfig(max_cols=64, block_rows=32, num_warps=4, num_stages=2, programs_per_sm=2),
    BackwardConfig(max_cols=256, block_rows=16, num_warps=4, num_stages=3, programs_per_sm=2),
    BackwardConfig(max_cols=512, block_rows=4, num_warps=4, num_stages=4, programs_per_sm=2),
    BackwardConfig(max_cols=1024, block_rows=4, num_warps=4, num_stages=3, programs_per_sm=2),
    BackwardConfig(max_cols=2048, block_rows=4, num_warps=8, num_stages=3, programs_per_sm=1),
    BackwardConfig(max_cols=4096, block_rows=2, num_warps=8, num_stages=3, programs_per_sm=1),
    BackwardConfig(max_cols=8192, block_rows=1, num_warps=8, num_stages=3, programs_per_sm=1),
    BackwardConfig(
        max_cols=16384,
        block_rows=1,
        num_warps=32,
        num_stages=1,
        programs_per_sm=1,
        read_again=True,
    ),
)
BACKWARD_SMALL = BackwardSmallConfig(
    max_elements=1 << 20,
    max_rows=2048,
    max_cols=2048,
    tile_elements=8192,
    part_rows=256,
    part_cols=8,
    num_warps=8,
)
BACKWARD_WIDE = BackwardWideConfig(
    block_cols=4096, num_warps=8, parts=32, block_rows=8, part_cols=512
)
# What the reductions of a program may take of the shared memory beside its stages.
REDUCTION_BYTES = 2048

ADD_PARTS = AddPartsConfig(block_parts=128, block_cols=8, num_warps=8)

# Small matrices lie many to a warp, so that the sums of a row or column are a few steps inside the
# warp. Of 4 and 64 rows from results/tuning-sinkhorn-h200-torch2.11-triton3.6.csv, unmeasured of
# others.
SINKHORN_FORWARD = (
    SinkhornConfig(max_n=2, matrices=64, num_warps=1),
    SinkhornConfig(max_n=4, matrices=32, num_warps=1),
    SinkhornConfig(max_n=8, matrices=8, num_warps=1),
    SinkhornConfig(max_n=16, matrices=4, num_warps=2),
    SinkhornConfig(max_n=32, matrices=1, num_warps=2),
    SinkhornConfig(max_n=64, matrices=1, num_warps=4),
)
SINKHORN_BACKWARD = (
    SinkhornConfig(max_n=2, matrices=64, num_warps=1, programs_per_sm=16),
    SinkhornConfig(max_n=4, matrices=32, num_warps=1, programs_per_sm=16),
    SinkhornConfig(max_n=8, matrices=8, num_warps=1, programs_per_sm=16),
    SinkhornConfig(max_n=16, matrices=4, num_warps=2, programs_per_sm=8),
    SinkhornConfig(max_n=32, matrices=1, num_warps=2, programs_per_sm=8),
    SinkhornConfig(max_n=64, matrices=1, num_warps=4, programs_per_sm=4),
)


def forward_config(cols: int, residual: bool, center: bool) -> ForwardConfig | None:
    """The launch of a row of ``cols`` columns; None where it does not fit in registers."""
    table = FORWARD_ADD if residual else FORWARD_LAYER if center else FORWARD
    return next((config for config in table if cols <= config.max_cols), None)


def backward_config(
    cols: int, itemsize: int, operands: int, center: bool, gated: bool, shared_bytes: int
) -> BackwardConfig | None:
    """The launch of a row of ``cols`` columns of ``operands`` tensors; None where it does not fit
    in registers.
    """
    config = next((config for config in BACKWARD if cols <= config.max_cols), None)
    if config is None or (config.read_again and (itemsize > 2 or center or gated)):
        # Beside a centred row's two gradients, a gate, or a row in fp32, even one load of the row
        # spills.
        return None
    tile = config.block_rows * power_of_2(cols) * itemsize * operands
    # Of the stages, one is in registers and the others wait in shared memory; some of it goes to
    # reductions.
    stages = 1 + max(0, shared_bytes - REDUCTION_BYTES) // tile
    return config._replace(num_stages=min(config.num_stages, stages))


def sinkhorn_config(table: tuple[SinkhornConfig, ...], n: int) -> SinkhornConfig:
    """The launch of matrices of n rows."""
    return next(config for config in table if n <= config.max_n)


def power_of_2(cols: int) -> int:
    """The lowest power of 2 that is not below ``cols``."""
    return 1 << (cols - 1).bit_length()


def fits_small(rows: int, cols: int) -> bool:
    """Whether one launch serves the backward pass of a tensor of this size."""
    limits = BACKWARD_SMALL
    return (
        rows * cols <= limits.max_elements and rows <= limits.max_rows and cols <= limits.max_cols
    )
