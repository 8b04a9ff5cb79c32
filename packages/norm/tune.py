"""Time every candidate launch of the norm kernels on this GPU; the fastest lines go to
``launch.py`` and ``launch_backward.py``.

    PYTHONPATH=packages/norm/src:ci/testkit/src python packages/norm/tune.py --out
    packages/norm/results

Needs a GPU. Every candidate is checked against the reference before it is timed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import functools
import itertools
import multiprocessing
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
import typer
from fusewright.norm.row_norm import launch, launch_backward, reference
from fusewright.norm.row_norm.launch import ForwardConfig, forward_plan, norm_forward
from fusewright.norm.row_norm.launch_backward import (
    BackwardConfig,
    BackwardSmallConfig,
    backward_plan,
    norm_backward,
)
from fusewright_testkit.bench import environment_name
from fusewright_testkit.compiled import compile_launch, recorded_launches
from fusewright_testkit.timing import copies_needed, graph_time

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
EPS = 1e-6
PASSES = {
    "forward": 2,
    "add_forward": 4,
    "backward": 3,
    "add_backward": 4,
    "layer_forward": 2,
    "layer_backward": 3,
    "small_backward": 3,
}


def forward_candidates(cols: int) -> Iterator[ForwardConfig]:
    """Tiles of 8 to 64 elements a thread."""
    for block_rows, num_warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        if 8 <= block_rows * cols / (32 * num_warps) <= 64:
            yield ForwardConfig(cols, block_rows, num_warps)


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


def small_candidates(cols: int) -> Iterator[BackwardSmallConfig]:
    """Tiles for the one launch that serves small tensors; the limits are those in force."""
    for tile, part_rows, part_cols, num_warps in itertools.product(
        (2048, 4096, 8192), (128, 256, 512), (8, 16, 32), (4, 8)
    ):
        per_thread = part_rows * part_cols / (32 * num_warps)
        if tile >= cols and 8 <= per_thread <= 32 and 16 <= tile / (32 * num_warps) <= 64:
            yield launch_backward.BACKWARD_SMALL._replace(
                tile_elements=tile,
                part_rows=part_rows,
                part_cols=part_cols,
                num_warps=num_warps,
            )


def candidates_of(kind: str, cols: int) -> list[NamedTuple]:
    if kind == "small_backward":
        return list(small_candidates(cols))
    return list((forward_candidates if kind.endswith("forward") else backward_candidates)(cols))


def precompile(jobs: list[tuple[str, int, int, NamedTuple]]) -> None:
    """Fill triton's cache on all cores; nothing is launched."""
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_one, jobs, chunksize=4))


def compile_one(job: tuple[str, int, int, NamedTuple]) -> None:
    """Compile what one candidate launches, as for the bf16 inputs that are timed."""
    kind, rows, cols, config = job
    with configured(kind, config), recorded_launches() as recorded:
        for call in launches(kind, rows, cols, device="cpu", copies=1):
            call()
    for recorded_launch in recorded:
        compile_launch(recorded_launch, 90)


@contextlib.contextmanager
def configured(kind: str, config: NamedTuple) -> Iterator[None]:
    """The launcher of ``kind`` with one candidate in place of its table, and no plan made
    before.
    """
    forward = kind.endswith("forward")
    plan = forward_plan if forward else backward_plan
    small = kind == "small_backward"
    in_force = config if small else launch_backward.BACKWARD_SMALL._replace(max_elements=0)
    names = ("FORWARD", "FORWARD_ADD", "FORWARD_LAYER") if forward else ("BACKWARD",)
    tables = {} if small else dict.fromkeys(names, (config,))
    if not forward:
        tables["BACKWARD_SMALL"] = in_force
    with mock.patch.multiple(launch if forward else launch_backward, **tables):
        plan.cache_clear()
        yield
    plan.cache_clear()


def launches(
    kind: str, rows: int, cols: int, device: str = "cuda", copies: int | None = None
) -> list[Callable[[], object]]:
    """Calls of one launcher on cold copies of its inputs."""
    make = functools.partial(torch.randn if device == "cuda" else torch.empty, device=device)
    half = functools.partial(make, dtype=torch.bfloat16)
    weight, bias = half(cols), half(cols)
    center = kind.startswith("layer")
    calls = []
    for _ in range(copies or copies_needed(PASSES[kind] * rows * cols * 2)):
        x, other = half(rows, cols), half(rows, cols)
        second = half(rows, cols) if kind == "add_backward" else None
        if kind.endswith("forward"):
            residual = other if kind == "add_forward" else None
            args = (x, residual, weight, bias if center else None, EPS, 0.0)
            calls.append(lambda args=args: norm_forward(*args, center=center))
        else:
            mean = make(rows) if center else None
            rstd = make(rows)
            args = (other, second, x, weight, bias, mean, rstd, 0.0)
            grads = dict(weight_grad=True, bias_grad=center)
            calls.append(lambda args=args, grads=grads: norm_backward(*args, **grads))
    return calls


def agrees(kind: str, cols: int) -> bool:
    """Whether the launcher, as configured now, computes the reference on a few rows."""
    x = torch.randn(301, cols, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(cols, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    truth = reference.rms_norm(*leaves, eps=EPS)
    y, _, _, rstd = norm_forward(x, None, weight, None, EPS, 0.0, center=False)
    pairs = [(y, truth)]
    if kind.endswith("backward"):
        dx, _, dweight, _ = norm_backward(
            dy, None, x, weight, None, None, rstd, 0.0, weight_grad=True, bias_grad=False
        )
        pairs = list(
            zip((dx, dweight), torch.autograd.grad(truth, leaves, dy.double()), strict=True)
        )
    return all(((a - b).norm() / b.norm()).item() < 4e-3 for a, b in pairs)


def main(
    out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV"),
    kinds: str = typer.Option(",".join(PASSES), help="passes to tune"),
    best: int = typer.Option(4, help="candidates to print for each size"),
) -> None:
    """Time the candidates and print the best of each size."""
    chosen = [
        (kind, rows, cols)
        for kind in kinds.split(",")
        for rows, cols in (SMALL_SIZES if kind == "small_backward" else SIZES)
    ]
    candidates = {key: candidates_of(key[0], key[2]) for key in chosen}
    precompile([(*key, config) for key, configs in candidates.items() for config in configs])
    table = []
    for kind, rows, cols in chosen:
        found = []
        calls = launches(kind, rows, cols)
        for config in candidates[kind, rows, cols]:
            with configured(kind, config):
                try:
                    if not agrees(kind, cols):
                        print("WRONG", kind, rows, cols, config)
                        continue
                    found.append((graph_time(calls, replays=7, warm_seconds=0.01).ms, config))
                except Exception as error:
                    print("failed", kind, config, repr(error)[:80])
        found.sort(key=lambda pair: pair[0])
        for rank, (ms, config) in enumerate(found):
            tbps = PASSES[kind] * rows * cols * 2 / ms / 1e9
            table.append(
                dict(
                    kind=kind,
                    rows=rows,
                    cols=cols,
                    ms=f"{ms:.5f}",
                    tbps=f"{tbps:.3f}",
                    config=config,
                )
            )
            if rank < best:
                print(
                    f"{kind:13} {rows}x{cols} {ms * 1e3:7.2f} us {tbps:.2f} TB/s {config[1:]}",
                    flush=True,
                )
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"tuning-{environment_name()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    typer.run(main)
