"""Time every candidate launch of the mixture and head kernels on this GPU; the fastest lines go to
``mixture/launch.py`` and ``heads/launch.py``.

    PYTHONPATH=packages/mixture-head/src:ci/testkit/src python packages/mixture-head/tune.py --out
    packages/mixture-head/results

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
from fusewright.mixture_head.heads import launch as heads
from fusewright.mixture_head.heads import reference as heads_reference
from fusewright.mixture_head.mixture import launch as mixture
from fusewright.mixture_head.mixture import reference as mixture_reference
from fusewright_testkit.bench import environment_name
from fusewright_testkit.compiled import compile_launch, recorded_launches
from fusewright_testkit.timing import copies_needed, graph_time
from fusewright_testkit.yardstick import Yardstick

SIZES = (4000, 128000)
COMPONENTS, STORED = 10, 1376
SCALE = (False, -7.0, 5.0, 1e-3)
OPS = torch.ops.fusewright_mixture_head


class Kind(NamedTuple):
    """One kind of launch: its table, and how many bytes of a row it moves."""

    module: object
    table: str
    row_bytes: int


MIXTURE_BYTES, HIDDEN_BYTES = (3 * COMPONENTS + 1) * 4, COMPONENTS * STORED * 2
KINDS = {
    "forward": Kind(mixture, "FORWARD", 2 * MIXTURE_BYTES),
    "backward": Kind(mixture, "BACKWARD", 2 * MIXTURE_BYTES),
    "heads_forward": Kind(heads, "FORWARD", HIDDEN_BYTES),
    "heads_backward": Kind(heads, "BACKWARD", 2 * HIDDEN_BYTES),
}


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
    tiles = itertools.product((8, 16, 32), (64, 128, 256), (4, 8), (1, 2, 3, 4))
    tiles = (t for t in tiles if 4 <= t[0] * t[1] / (32 * t[2]) <= 32)
    if kind == "heads_forward":
        return [heads.ForwardConfig(*tile) for tile in tiles]
    return [
        heads.BackwardConfig(*tile, max_parts, min_rows=128)
        for tile, max_parts in itertools.product(tiles, (32, 64))
    ]


def precompile(jobs: list[tuple[str, NamedTuple]]) -> None:
    """Fill triton's cache on all cores; nothing is launched."""
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_one, jobs, chunksize=4))


def compile_one(job: tuple[str, NamedTuple]) -> None:
    """Compile what one candidate launches."""
    kind, config = job
    with configured(kind, config), recorded_launches() as recorded:
        for call in launches(kind, SIZES[0], device="cpu", copies=1):
            call()
    for launch in recorded:
        compile_launch(launch, 90)


def forget_plans() -> None:
    """Let the next launch read the tables again."""
    for plan in (
        mixture.forward_plan,
        mixture.backward_plan,
        heads.forward_plan,
        heads.backward_plan,
    ):
        plan.cache_clear()


@contextlib.contextmanager
def configured(kind: str, config: NamedTuple) -> Iterator[None]:
    """The launcher of ``kind`` with one candidate in place of its table, and no plan made
    before.
    """
    module, table, _ = KINDS[kind]
    in_force = (config,) if kind == "forward" else config
    with mock.patch.object(module, table, in_force):
        forget_plans()
        yield
    forget_plans()


def launches(
    kind: str, rows: int, device: str = "cuda", copies: int | None = None
) -> list[Callable[[], object]]:
    """Calls of one launcher on cold copies of its inputs."""
    make = functools.partial(torch.randn if device == "cuda" else torch.empty, device=device)
    calls = []
    for _ in range(copies or copies_needed(KINDS[kind].row_bytes * rows)):
        if kind == "forward":
            args = make(rows, COMPONENTS, 3), make(rows), None, *SCALE, True
            calls.append(functools.partial(mixture.mixture_forward, *args))
        elif kind == "backward":
            slopes = make(COMPONENTS, 3, rows), make(rows)
            args = make(()), make(()), None, *slopes, torch.float32, torch.float32, True
            calls.append(functools.partial(mixture.mixture_backward, *args))
        else:
            u = make(rows, COMPONENTS, STORED, dtype=torch.bfloat16)
            weight = make(COMPONENTS, STORED, 3)
            if kind == "heads_backward":
                dparams = make(rows, COMPONENTS, 3)
                calls.append(functools.partial(heads.silu_heads_backward, dparams, u, weight))
            else:
                calls.append(functools.partial(heads.silu_heads, u, weight))
    return calls


def agrees(kind: str) -> bool:
    """Whether the kernels, as configured now, are right by the yardstick on a few rows."""
    if kind.startswith("heads"):
        inputs = [
            torch.randn(301, COMPONENTS, STORED, device="cuda", dtype=torch.bfloat16),
            torch.randn(COMPONENTS, STORED, 3, device="cuda"),
        ]
        truth, op = heads_reference.silu_heads, OPS.silu_heads
    else:
        inputs = [
            torch.randn(301, COMPONENTS, 3, device="cuda"),
            torch.randn(301, device="cuda"),
        ]
        softplus, low, high, eps = SCALE
        truth = functools.partial(
            mixture_reference.mixture_nll, softplus=softplus, low=low, high=high, eps=eps
        )

        def op(params: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return OPS.mixture_nll(params, y, None, *SCALE)[0]

    try:
        Yardstick(truth, inputs).check(op)
    except AssertionError:
        return False
    return True


def main(
    out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV"),
    kinds: str = typer.Option(",".join(KINDS), help="passes to tune"),
    best: int = typer.Option(4, help="candidates to print for each size"),
) -> None:
    """Time the candidates and print the best of each size."""
    chosen = [(kind, rows) for kind in kinds.split(",") for rows in SIZES]
    precompile([(kind, config) for kind in kinds.split(",") for config in candidates_of(kind)])
    table = []
    for kind, rows in chosen:
        times = []
        calls = launches(kind, rows)
        for config in candidates_of(kind):
            with configured(kind, config):
                try:
                    if not agrees(kind):
                        print("WRONG", kind, rows, config)
                        continue
                    times.append((graph_time(calls, replays=7, warm_seconds=0.01).ms, config))
                except Exception as error:
                    print("failed", kind, config, repr(error)[:80])
        times.sort(key=lambda pair: pair[0])
        for rank, (ms, config) in enumerate(times):
            tbps = KINDS[kind].row_bytes * rows / ms / 1e9
            table.append(
                dict(
                    kind=kind,
                    rows=rows,
                    cols=COMPONENTS * (STORED if kind.startswith("heads") else 3),
                    ms=f"{ms:.5f}",
                    tbps=f"{tbps:.3f}",
                    config=config,
                )
            )
            if rank < best:
                print(f"{kind:14} {rows:6} {ms * 1e3:8.2f} us {tbps:.2f} TB/s {config}", flush=True)
        del calls
        torch.cuda.empty_cache()
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"tuning-{environment_name()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    typer.run(main)
