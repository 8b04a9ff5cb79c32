"""Time every candidate launch of the attention kernels on this GPU; the fastest lines go to
``launch.py`` and ``launch_backward.py`` of their family.

    PYTHONPATH=packages/attention/src:ci/testkit/src python packages/attention/tune.py --out
    packages/attention/results

Needs a GPU. Candidates that spill registers are left out; every other one is checked against the
reference before it is timed.
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
from fusewright.attention.common.problem import TileConfig
from fusewright.attention.rectangular import launch as forward
from fusewright.attention.rectangular import launch_backward as backward
from fusewright.attention.rectangular import reference as rectangular_reference
from fusewright.attention.rectangular.launch import SingleTileConfig
from fusewright.attention.window import launch as window
from fusewright.attention.window import reference as window_reference
from fusewright.attention.window.launch import Band
from fusewright_testkit.bench import environment_name
from fusewright_testkit.compiled import compile_launch, recorded_launches
from fusewright_testkit.timing import copies_needed, graph_time


class Size(NamedTuple):
    """B tasks, Nq queries, M keys, H heads of width D; and what of the keys a row sees."""

    batches: int
    queries: int
    keys: int
    heads: int
    width: int
    band: Band | None = None

    @property
    def pairs(self) -> int:
        """How many keys the rows of a head see together."""
        if self.band is None:
            return self.queries * self.keys
        length, prefix, every = self.band
        tokens = self.keys - prefix
        seen = (max(0, tokens - every * later) for later in range(self.queries))
        return sum(min(length, keys) for keys in seen) + self.queries * prefix

    def __str__(self) -> str:
        named = self._asdict() | {"band": None} | (self.band._asdict() if self.band else {})
        return " ".join(f"{k}={v}" for k, v in named.items() if v is not None)


# The table that each kind tunes, and how many products of all pairs of rows with D its
# launches compute.
TABLES = {
    "forward": (forward, "FORWARD", 2),
    "dq": (backward, "DQ", 3),
    "dkdv": (backward, "DKDV", 4),
    "window_forward": (window, "FORWARD", 2),
    "window_dq": (window, "DQ", 3),
    "window_dkdv": (window, "DKDV", 4),
    "single_forward": (forward, "SINGLE_TILE_FORWARD", 2),
    "single_backward": (backward, "SINGLE_TILE_BACKWARD", 5),
}
STREAMING_SIZES = (
    Size(4, 11000, 10000, 8, 64),
    Size(4, 5500, 5000, 8, 128),
    Size(4, 5500, 5000, 8, 32),
)
SINGLE_SIZES = (
    Size(256, 564, 64, 8, 64),
    Size(256, 564, 128, 8, 64),
    Size(256, 564, 128, 8, 128),
    Size(256, 564, 64, 8, 32),
)
WINDOW_SIZES = (
    Size(4, 4096, 4096, 8, 64, Band(512, 0)),
    Size(4, 4096, 4096, 8, 40, Band(512, 16)),
    Size(4, 4096, 4096, 4, 128, Band(512, 16)),
    Size(4, 4096, 4096, 8, 32, Band(512, 16)),
    # A segment of TitanMAC.
    Size(4, 512, 1040, 8, 40, Band(1024, 16, every=2)),
)
Candidate = TileConfig | SingleTileConfig
Job = tuple[str, Size, Candidate]
PLANS = forward.forward_plan, backward.backward_plan, window.forward_plan, window.backward_plan


def candidates_of(kind: str, size: Size) -> list[Candidate]:
    """Lines of a launch table for one size."""
    limits = dict(max_width=size.width, max_bytes=2)
    lines: list[Candidate] = []
    if kind.startswith("single"):
        for queries, warps, stages in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
            line = SingleTileConfig(
                size.keys, **limits, queries=queries, num_warps=warps, num_stages=stages
            )
            lines.append(line)
        return lines
    for queries, keys, warps, stages in itertools.product(
        (32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
    ):
        streamed, kept = (queries, keys) if kind.endswith("dkdv") else (keys, queries)
        area = queries * keys
        if kept >= 64 and streamed <= kept and 2048 <= area // (warps // 4) <= 8192 * 2:
            line = TileConfig(
                **limits,
                queries=queries,
                keys=keys,
                num_warps=warps,
                num_stages=stages,
                descriptors=False,
            )
            lines.append(line)
            # They cost the host time at every call, and a band is read by short launches.
            if size.band is None:
                lines.append(line._replace(hopper=True, descriptors=True))
    return lines


def sizes_of(kind: str) -> tuple[Size, ...]:
    if kind.startswith("window"):
        return WINDOW_SIZES
    return SINGLE_SIZES if kind.startswith("single") else STREAMING_SIZES


def without_spills(jobs: list[Job]) -> list[Job]:
    """The jobs whose kernels keep all in registers; fills triton's cache on all cores, and launches
    nothing.
    """
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return list(itertools.compress(jobs, pool.map(compiles_without_spill, jobs, chunksize=4)))


def compiles_without_spill(job: Job) -> bool:
    """Compile what one candidate launches, as for the bf16 inputs that are timed."""
    kind, size, candidate = job
    with configured(kind, candidate), recorded_launches() as recorded:
        # Nothing is written to this memory. One task would be compiled for alone.
        for call in launches(kind, size._replace(batches=2), device="cpu", copies=1):
            call()
    try:
        return not any(compile_launch(launch, 90).spilled for launch in recorded)
    except Exception:
        # More shared memory or registers than there are.
        return False


@contextlib.contextmanager
def configured(kind: str, candidate: Candidate) -> Iterator[None]:
    """The launcher of ``kind`` with one candidate in place of its table, and no plan made
    before.
    """
    module, table, _ = TABLES[kind]
    with mock.patch.object(module, table, (candidate,)):
        for plan in PLANS:
            plan.cache_clear()
        yield
    for plan in PLANS:
        plan.cache_clear()


def launches(
    kind: str, size: Size, device: str = "cuda", copies: int | None = None
) -> list[Callable[[], object]]:
    """Calls of one launch on cold copies of its inputs."""
    rows = size.queries + (size.keys if kind.endswith("forward") else 2 * size.keys)
    moved = 4 * rows * size.batches * size.heads * size.width
    return [
        functools.partial(launch_once, kind, *inputs(size, device), size.width**-0.5, size.band)
        for _ in range(copies or copies_needed(moved))
    ]


def launch_once(kind: str, do, q, k, v, o, softmax, scale: float, band) -> object:
    """The forward pass, all of the backward pass, or one half of it."""
    if kind.endswith("forward"):
        return launch_forward(q, k, v, scale, False, band)
    if kind == "single_backward":
        return launch_backward(do, q, k, v, None, None, None, scale, None)
    with one_half(kind):
        return launch_backward(do, q, k, v, o, o, softmax, scale, band)


def launch_forward(q, k, v, scale: float, with_lse: bool, band: Band | None) -> tuple:
    """The forward pass over all keys, or over a band."""
    if band is None:
        return forward.attention_forward(q, k, v, None, scale, with_lse)
    return window.attention_forward(q, k, v, band, scale, with_lse)


def launch_backward(do, q, k, v, o, o_low, softmax, scale: float, band: Band | None) -> tuple:
    """The backward pass over all keys, or over a band."""
    if band is None:
        return backward.attention_backward(do, None, q, k, v, None, o, o_low, softmax, scale)
    return window.attention_backward(do, None, q, k, v, o, o_low, softmax, band, scale)


@contextlib.contextmanager
def one_half(kind: str) -> Iterator[None]:
    """Leaves out the other launch of a streaming backward pass."""
    skipped = "dkdv" if kind.endswith("dq") else "dq"
    module = TABLES[kind][0]
    backward_plan = module.backward_plan

    class Nothing:
        def __call__(self, *args):
            return None

        dispatch = __call__

    def plan(*args):
        whole = backward_plan(*args)
        half = whole.launches._replace(**{skipped: Nothing()})
        if kind == "window_dq":
            half = half._replace(add_chunks=None)
        return whole._replace(launches=half)

    with mock.patch.object(module, "backward_plan", plan):
        yield


def inputs(size: Size, device: str) -> tuple[torch.Tensor, ...]:
    """do, q, k, v, o and softmax."""
    make = torch.randn if device == "cuda" else torch.empty
    draw = functools.partial(make, device=device, dtype=torch.bfloat16)
    wide = (size.batches, size.queries, size.heads, size.width)
    narrow = (size.batches, size.keys, size.heads, size.width)
    softmax = torch.full((2, size.batches, size.heads, size.queries), 9.0, device=device)
    return draw(wide), draw(wide), draw(narrow), draw(narrow), draw(wide), softmax


def agrees(size: Size) -> bool:
    """Whether the launchers, as configured now, compute the reference at a small size."""
    # Of numbers that divide by 16 just where those that are timed do, for which all is compiled.
    small = size._replace(
        batches=2, queries=96 + size.queries % 16, keys=min(size.keys, 192 + size.keys % 16)
    )
    band = size.band
    attention = functools.partial(
        rectangular_reference.rectangular_attention, scale=size.width**-0.5
    )
    if band is not None:
        band = band._replace(window=80)
        keys = band.prefix + 320 if band.every > 1 else 320
        small = small._replace(queries=320 // band.every, keys=keys, band=band)
        sizes = band._asdict() | {"scale": size.width**-0.5}
        attention = functools.partial(window_reference.sliding_window_attention, **sizes)
    do, q, k, v, _, _ = inputs(small, "cuda")
    scale = size.width**-0.5
    o, _, softmax, o_low = launch_forward(q, k, v, scale, True, band)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    truth = attention(*leaves)
    grads = torch.autograd.grad(truth, leaves, do.float())
    results = (o, *launch_backward(do, q, k, v, o, o_low, softmax, scale, band))
    pairs = zip(results, (truth, *grads), strict=True)
    return all(((a - b).norm() / b.norm()).item() < 6e-3 for a, b in pairs)


def main(
    out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV"),
    kinds: str = typer.Option(",".join(TABLES), help="launches to tune"),
    widths: str = typer.Option("64,128,40,32", help="widths of heads to tune"),
    best: int = typer.Option(5, help="candidates to print for each size"),
) -> None:
    """Time the candidates and print the best of each size."""
    chosen = [
        (kind, size)
        for kind in kinds.split(",")
        for size in sizes_of(kind)
        if str(size.width) in widths.split(",")
    ]
    jobs = without_spills([(*key, one) for key in chosen for one in candidates_of(*key)])
    table = []
    for kind, size in chosen:
        timed = []
        calls = launches(kind, size)
        for *of, candidate in jobs:
            if of != [kind, size]:
                continue
            with configured(kind, candidate):
                try:
                    if not agrees(size):
                        print("WRONG", kind, size, candidate)
                        continue
                    ms = graph_time(calls, replays=5, warm_seconds=0.01).ms
                    timed.append((ms, candidate))
                except Exception as error:
                    print("failed", kind, candidate, repr(error)[:80])
        timed.sort(key=lambda pair: pair[0])
        for rank, (ms, line) in enumerate(timed):
            work = 2 * TABLES[kind][2] * size.batches * size.heads * size.width
            tflops = work * size.pairs / ms / 1e9
            described = str(size)
            table.append(
                dict(
                    kind=kind,
                    case=described,
                    ms=f"{ms:.5f}",
                    tflops=f"{tflops:.1f}",
                    config=line,
                )
            )
            if rank < best:
                print(
                    f"{kind} {described}: {ms:.4f} ms {tflops:.0f} TFLOPS {line}",
                    flush=True,
                )
        del calls
        torch.cuda.empty_cache()
        write(out, table)


def write(out: pathlib.Path, table: list[dict]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"tuning-{environment_name()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    typer.run(main)
