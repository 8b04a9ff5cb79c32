"""The launches of the norms and their candidates: ``python -m fusewright_testkit.tune norm``.

The fastest lines go to ``launch.py`` and ``launch_backward.py`` of ``row_norm``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator

import fusewright.norm as norm
from fusewright.norm.row_norm import launch, launch_backward
from fusewright.norm.row_norm.launch import ForwardConfig
from fusewright.norm.row_norm.launch_backward import BackwardConfig, BackwardSmallConfig
from fusewright_testkit.bench import load
from fusewright_testkit.tune import Tables, Tuning, lines

bench = load(pathlib.Path(__file__).parent)
SIZES = (
    (1024, 1024),
    (8192, 512),
    (16384, 1024),
    (16384, 2048),
    (16384, 4096),
    (8192, 8192),
    (4096, 16384),
)
SMALL_SIZES = ((256, 1024), (512, 512), (1024, 1024), (2048, 512))
CHECKED_ROWS = 301
# The op of each kind and, of a forward pass, its table.
FORWARD = {
    "forward": ("rms_norm", "FORWARD"),
    "add_forward": ("add_rms_norm", "FORWARD_ADD"),
    "layer_forward": ("layer_norm", "FORWARD_LAYER"),
}
BACKWARD = {
    "backward": "rms_norm",
    "add_backward": "add_rms_norm",
    "layer_backward": "layer_norm",
    "small_backward": "rms_norm",
}


def tunings() -> list[Tuning]:
    forward = [
        tuning(kind, op, *size, lines(forward_candidates(size[1]), table, table=True))
        for kind, (op, table) in FORWARD.items()
        for size in SIZES
    ]
    backward = [
        tuning(
            kind,
            op,
            *size,
            (small_lines if kind == "small_backward" else backward_lines)(size[1]),
        )
        for kind, op in BACKWARD.items()
        for size in (SMALL_SIZES if kind == "small_backward" else SIZES)
    ]
    return forward + backward


def tuning(kind: str, op: str, rows: int, cols: int, candidates: dict[str, Tables]) -> Tuning:
    backward = kind.endswith("backward")
    case = bench.norm_case(op, rows, cols)
    return Tuning(
        names=dict(kind=kind, rows=rows, cols=cols),
        case=dataclasses.replace(case, sample=bench.norm_case(op, CHECKED_ROWS, cols).inputs),
        op=functools.partial(getattr(norm, op), eps=bench.EPS, backend="triton"),
        module=launch_backward if backward else launch,
        candidates=candidates,
        backward=backward,
        rate="tbps",
    )


def forward_candidates(cols: int) -> Iterator[ForwardConfig]:
    """Tiles of 8 to 64 elements a thread."""
    for block_rows, num_warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        if 8 <= block_rows * cols / (32 * num_warps) <= 64:
            yield ForwardConfig(cols, block_rows, num_warps)


def backward_lines(cols: int) -> dict[str, Tables]:
    """Lines for all but small tensors."""
    large = dict(BACKWARD_SMALL=launch_backward.BACKWARD_SMALL._replace(max_elements=0))
    found = lines(backward_candidates(cols), "BACKWARD", table=True)
    return {line: {**tables, **large} for line, tables in found.items()}


def backward_candidates(cols: int) -> Iterator[BackwardConfig]:
    """Tiles of 8 to 32 elements a thread, as many programs as a multiprocessor can hold."""
    for block_rows, num_warps, num_stages, programs, again in itertools.product(
        (1, 2, 4, 8), (4, 8, 16, 32), (1, 3, 4), (1, 2, 4), (False, True)
    ):
        tile = block_rows * cols
        shared = 0 if num_stages == 1 else num_stages * tile * 4
        fits = shared * programs <= 220 << 10 and 8 <= num_warps * programs <= 32
        if again and (cols < 8192 or num_stages > 1):
            continue
        if fits and 2048 <= tile <= 16384 and 8 <= tile / (32 * num_warps) <= 32:
            yield BackwardConfig(cols, block_rows, num_warps, num_stages, programs, again)


def small_lines(cols: int) -> dict[str, Tables]:
    return lines(small_candidates(cols), "BACKWARD_SMALL")


def small_candidates(cols: int) -> Iterator[BackwardSmallConfig]:
    """Tiles for the one launch that serves small tensors; the limits are those in force."""
    for tile, part_rows, part_cols, num_warps in itertools.product(
        (2048, 4096, 8192), (128, 256, 512), (8, 16, 32), (4, 8)
    ):
        per_thread = part_rows * part_cols / (32 * num_warps)
        if tile >= cols and 8 <= per_thread <= 32 and 16 <= tile / (32 * num_warps) <= 64:
            yield launch_backward.BACKWARD_SMALL._replace(
                tile_elements=tile, part_rows=part_rows, part_cols=part_cols, num_warps=num_warps
            )
