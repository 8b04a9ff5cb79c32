"""Time every candidate launch of the gating kernels on this GPU; the fastest lines go to
``gating/launch.py``.

    PYTHONPATH=packages/feed-forward/src:ci/testkit/src python packages/feed-forward/tune.py --out
    packages/feed-forward/results

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
from fusewright.feed_forward.gating import launch, reference
from fusewright.feed_forward.gating.launch import ElementsConfig
from fusewright_testkit.bench import environment_name
from fusewright_testkit.compiled import compile_launch, recorded_launches
from fusewright_testkit.timing import copies_needed, graph_time
from fusewright_testkit.yardstick import Yardstick

SIZES = ((1024, 1024), (4096, 1376), (8192, 4096), (16384, 5504))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OPS = torch.ops.fusewright_feed_forward


class Kind(NamedTuple):
    """One kind of launch: its table, how many tensors of gate's size it moves, and whether
    gate and up are halves of one tensor.
    """

    table: str
    passes: int
    halves: bool


KINDS = {
    "forward": Kind("FORWARD", 3, False),
    "backward": Kind("BACKWARD", 5, False),
    "halves_forward": Kind("FORWARD", 3, True),
    "halves_backward": Kind("BACKWARD", 5, True),
}


class Job(NamedTuple):
    """One pass at one size."""

    kind: str
    rows: int
    cols: int
    dtype: str


def candidates() -> list[ElementsConfig]:
    """Blocks of 4 to 32 elements a thread."""
    return [
        ElementsConfig(block, num_warps)
        for block, num_warps in itertools.product(
            (512, 1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16)
        )
        if 4 <= block / (32 * num_warps) <= 32
    ]


def precompile(jobs: list[tuple[Job, ElementsConfig]]) -> None:
    """Fill triton's cache on all cores; nothing is launched."""
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_one, jobs, chunksize=4))


def compile_one(candidate: tuple[Job, ElementsConfig]) -> None:
    """Compile what one candidate launches."""
    job, config = candidate
    with configured(job.kind, config), recorded_launches() as recorded:
        for call in launches(job, device="cpu", copies=1):
            call()
    for recorded_launch in recorded:
        compile_launch(recorded_launch, 90)


@contextlib.contextmanager
def configured(kind: str, config: ElementsConfig) -> Iterator[None]:
    """The launcher of ``kind`` with one candidate in place of its table, and no plan made
    before.
    """
    plans = (launch.forward_plan, launch.backward_plan)
    with mock.patch.object(launch, KINDS[kind].table, config):
        for plan in plans:
            plan.cache_clear()
        yield
    for plan in plans:
        plan.cache_clear()


def launches(job: Job, device: str = "cuda", copies: int | None = None) -> list[Callable]:
    """Calls of one launcher on cold copies of its inputs."""
    make = functools.partial(torch.randn if device == "cuda" else torch.empty, device=device)
    make = functools.partial(make, dtype=DTYPES[job.dtype])
    _, passes, halves = KINDS[job.kind]
    moved = passes * job.rows * job.cols * DTYPES[job.dtype].itemsize
    calls = []
    for _ in range(copies or copies_needed(moved)):
        joint = make(job.rows, 2 * job.cols)
        operands = (joint,) if halves else tuple(joint.view(2, job.rows, job.cols))
        forward, backward = launch.silu_mul, launch.silu_mul_backward
        if halves:
            forward, backward = launch.silu_mul_halves, launch.silu_mul_halves_backward
        if job.kind.endswith("backward"):
            calls.append(functools.partial(backward, make(job.rows, job.cols), *operands))
        else:
            calls.append(functools.partial(forward, *operands))
    return calls


def agrees(job: Job) -> bool:
    """Whether the kernels, as configured now, are right by the yardstick on a few rows."""
    name = "silu_mul_halves" if KINDS[job.kind].halves else "silu_mul"
    joint = torch.randn(301, 2 * job.cols, device="cuda", dtype=DTYPES[job.dtype])
    inputs = [joint] if KINDS[job.kind].halves else list(joint.view(2, 301, job.cols))
    try:
        Yardstick(getattr(reference, name), inputs).check(getattr(OPS, name))
    except AssertionError:
        return False
    return True


def main(
    out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV"),
    kinds: str = typer.Option(",".join(KINDS), help="passes to tune"),
    dtypes: str = typer.Option("bf16", help=f"of {', '.join(DTYPES)}"),
    best: int = typer.Option(4, help="candidates to print for each size"),
) -> None:
    """Time the candidates and print the best of each size."""
    jobs = [
        Job(kind, rows, cols, dtype)
        for kind, dtype in itertools.product(kinds.split(","), dtypes.split(","))
        for rows, cols in SIZES
    ]
    precompile(list(itertools.product(jobs, candidates())))
    table = []
    for job in jobs:
        times = []
        calls = launches(job)
        for config in candidates():
            with configured(job.kind, config):
                try:
                    if not agrees(job):
                        print("WRONG", job, config)
                        continue
                    times.append((graph_time(calls, replays=7, warm_seconds=0.01).ms, config))
                except Exception as error:
                    print("failed", job, config, repr(error)[:80])
        times.sort(key=lambda pair: pair[0])
        size = job.rows * job.cols * DTYPES[job.dtype].itemsize
        for rank, (ms, config) in enumerate(times):
            tbps = KINDS[job.kind].passes * size / ms / 1e9
            table.append(dict(**job._asdict(), ms=f"{ms:.5f}", tbps=f"{tbps:.3f}", config=config))
            if rank < best:
                print(
                    f"{job.kind:15} {job.rows}x{job.cols} {job.dtype} {ms * 1e3:7.2f} us "
                    f"{tbps:.2f} TB/s {tuple(config)}",
                    flush=True,
                )
        del calls
        torch.cuda.empty_cache()
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"tuning-{environment_name()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    typer.run(main)
