"""The launches of sparse attention by tiles and their candidates: ``python -m
fusewright_testkit.tune gsa``.

The fastest lines go to ``launch.py`` and ``launch_backward.py`` of ``sparse``.
"""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from fusewright.gsa import sparse_attention
from fusewright.gsa.sparse import launch, launch_backward
from fusewright.gsa.sparse.launch_problem import UnionConfig
from fusewright_testkit import Case
from fusewright_testkit.bench import load
from fusewright_testkit.cases import by_pass, described
from fusewright_testkit.tune import Tuning, lines

bench = load(pathlib.Path(__file__).parent)
HEADS, WIDTH = 16, 64
# At which candidates are checked.
CHECKED = dict(T=2048, k=256)


class Kind(NamedTuple):
    """A line of the tables: its module and name, how many products of all pairs of rows it
    computes, and its kernels.
    """

    module: ModuleType
    table: str
    products: int
    kernels: tuple[str, ...]


KINDS = {
    "forward": Kind(launch, "UNION", 2, ("union_forward_kernel",)),
    "dq": Kind(launch_backward, "UNION_DQ", 3, ("union_dq_kernel",)),
    # With what depends on the tile: lists, and the sums of their segments.
    "dkdv": Kind(
        launch_backward,
        "UNION_DKDV",
        4,
        (
            "queries_of_tiles_kernel",
            "segments_kernel",
            "union_dkdv_kernel",
            "add_segments_kernel",
        ),
    ),
}
# Tokens, selected keys, heads of keys, and what is selected.
SIZES = (
    *((8192, 512, key_heads, "clustered") for key_heads in (16, 4, 2)),
    *((32768, 512, key_heads, "random") for key_heads in (4, 2)),
)


def tunings() -> list[Tuning]:
    return [tuning(kind, *size) for kind in KINDS for size in SIZES]


def tuning(kind: str, tokens: int, slots: int, key_heads: int, selected: str) -> Tuning:
    module, table, products, kernels = KINDS[kind]
    sizes = {"B": 1, "T": tokens, "H": HEADS, "Hkv": key_heads, "D": WIDTH, "k": slots}
    draw = functools.partial(inputs, key_heads=key_heads, kind=selected)
    # Of the selected pairs alone: tiles multiply more.
    work = 2 * products * tokens * slots * HEADS * WIDTH
    moved = 2 * tokens * WIDTH * 2 * (HEADS + key_heads) + 4 * tokens * slots
    reference = functools.partial(bench.reference_attention, scale=1 / math.sqrt(WIDTH))
    return Tuning(
        names=dict(kind=kind, case=f"{described(sizes)} {selected}"),
        case=Case(
            op="sparse_attention",
            sizes=sizes | {"selection": selected},
            dtype=torch.bfloat16,
            reference=reference,
            inputs=functools.partial(draw, tokens, slots),
            sample=functools.partial(draw, CHECKED["T"], CHECKED["k"]),
            bytes_moved=by_pass(moved),
            flops=by_pass(work, work),
        ),
        op=functools.partial(sparse_attention, path="tiles", backend="triton"),
        module=module,
        candidates=lines(candidates(kind), table, table=True),
        backward=kind != "forward",
        kernels=kernels,
        rate="tflops",
    )


def inputs(tokens: int, slots: int, device: str, *, key_heads: int, kind: str) -> list:
    """q, k, v, indices and count."""
    draw = functools.partial(torch.randn, dtype=torch.bfloat16, device=device)
    rows = (draw(1, tokens, heads, WIDTH) for heads in (HEADS, key_heads, key_heads))
    return [*rows, *bench.selection(tokens, slots, kind, device)]


def candidates(kind: str) -> Iterator[UnionConfig]:
    """Lines of a launch table; the products of few keys are transposed."""
    of_keys = kind == "dkdv"
    for rows, columns, warps in itertools.product(
        (16, 32, 64) if of_keys else (64, 128), (64, 128), (4, 8)
    ):
        # Warps share the rows of a product, 16 each.
        most = columns if of_keys and rows < 64 else rows * columns // 64
        if 16 * warps <= most and rows * columns // warps <= (1024 if of_keys else 2048):
            line = UnionConfig(WIDTH, 2, rows, columns, num_warps=warps, num_stages=3, hopper=True)
            yield line._replace(transposed=rows < 64)
