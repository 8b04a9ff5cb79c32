"""Time every candidate launch of the pooled update's kernels on this card; the fastest lines go to
``_update_configs.py``.

    PYTHONPATH=packages/memory-mlp/src:ci/testkit/src python packages/memory-mlp/tune_update.py
    --dtypes bf16 --out packages/memory-mlp/results

Needs a GPU. Each launch is timed alone, in a graph, on what the launches before it have left; then
the fastest ones together. Candidates that spill registers are left out; every other one must give
the whole step, outputs and gradients, that the tables of the package give, which are held against
the yardstick first.
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
from typing import Any, NamedTuple
from unittest import mock

import torch
import typer
from fusewright.memory_mlp import (
    _update_backward_launch,
    _update_launch,
    _update_problem,
    bench,
)
from fusewright.memory_mlp._backends import Card
from fusewright.memory_mlp._launch import Launch
from fusewright.memory_mlp._update_configs import UpdateBlock, UpdateTile
from fusewright_testkit.bench import environment_name
from fusewright_testkit.compiled import compile_launch, recorded_launches
from fusewright_testkit.timing import graph_time
from fusewright_testkit.yardstick import Yardstick

Tensors = list[torch.Tensor]
Size = tuple[int, int, int]

SIZES: tuple[Size, ...] = ((2048, 512, 512), (512, 320, 1280), (8192, 1024, 1024))
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
PRECISIONS = {"bf16": "narrow", "tf32": "tf32"}
PLANS = ((_update_launch, "update_plan"), (_update_backward_launch, "backward_plan"))
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
# Two runs of one step differ in how products are summed, and then in how operands are rounded.
SAME_STEP = {"bf16": 2e-2, "tf32": 4e-3}


class Kind(NamedTuple):
    """One launch: its table, the field of its pass's plan, its kernels, and how many pairs of
    operands and how many accumulators a step of its walk holds (0: elements); the axes of its
    output, N (rows), D (width) or H (hidden), and the one dtype that it serves, or "".
    """

    table: str
    backward: bool
    field: str
    kernels: tuple[str, ...]
    axes: str = ""
    pairs: int = 0
    sums: int = 1
    dtype: str = ""


GRADIENT_KERNELS = ("_gradients_kernel", "_add_splits_kernel")
KINDS = [
    Kind("ROUND", False, "rounds", ("_round_weights_kernel",), dtype="bf16"),
    Kind("TURN", False, "turns", ("_turn_kernel",), dtype="tf32"),
    Kind("HIDDEN", False, "hidden", ("_hidden_kernel",), "NH", 1),
    Kind("RESIDUAL", False, "residual", ("_residual_kernel",), "ND", 1),
    Kind("SLOPE", False, "slope", ("_slope_kernel",), "NH", 1),
    Kind("GRADIENTS", False, "gradients", GRADIENT_KERNELS, "DH", 1),
    Kind("STEP", False, "step", ("_step_kernel",)),
    Kind("INNER_PRODUCTS", True, "inner_products", ("_inner_products_kernel",)),
    Kind("COTANGENTS", True, "cotangents", ("_cotangents_kernel",)),
    Kind("P_BAR", True, "p_bar", ("_p_bar_kernel",), "NH", 1),
    Kind("E_BAR", True, "e_bar", ("_e_bar_kernel",), "ND", 2),
    Kind("Z_BAR", True, "z_bar", ("_z_bar_kernel",), "NH", 2, 2),
    Kind("DK", True, "dk", ("_dk_kernel",), "ND", 2),
    Kind("DWEIGHTS", True, "gradients", GRADIENT_KERNELS, "DH", 1),
]
Candidate = UpdateTile | UpdateBlock
Job = tuple[Kind, str, Size, Candidate]


def candidates_of(kind: Kind, dtype: str, size: Size) -> list[Candidate]:
    """Lines of a launch table for one precision that may be the fastest at a size."""
    if kind.dtype not in ("", dtype):
        return []
    if kind.table == "TURN":
        return [UpdateBlock(side, warps) for side, warps in ((32, 4), (64, 4), (64, 8), (128, 8))]
    if not kind.pairs:
        return [
            UpdateBlock(block, warps)
            for block, warps in itertools.product((512, 1024, 2048, 4096), (4, 8))
            if 4 <= block / (32 * warps) <= 16
        ]
    itemsize = DTYPES[dtype].itemsize
    depths = [bytes_of_a_row // itemsize for bytes_of_a_row in (128, 256)]
    found: list[Candidate] = []
    sides = (64, 32), (64, 64), (128, 64), (64, 128), (128, 128), (128, 256), (256, 128)
    for (rows, cols), depth, warps in itertools.product(sides, depths, (4, 8)):
        sums = kind.sums * rows * cols / (32 * warps)
        programs = programs_of(kind, size, rows, cols)
        least = min(LEAST_PROGRAMS * MULTIPROCESSORS, programs_of(kind, size, 64, 64))
        many = programs >= MANY_PROGRAMS * MULTIPROCESSORS
        fits = programs >= least and (not many or sums == MOST_SUMS)
        # A warp takes 16 rows; of 8 warps two groups of four, which want a tile of 64 rows each.
        fits = fits and (warps == 4 or rows * cols > 64 * 64)
        if LEAST_SUMS <= sums <= MOST_SUMS and (fits or (kind.axes == "DH" and cols > 32)):
            stage = kind.pairs * (rows + cols) * depth * itemsize
            found += [
                UpdateTile(PRECISIONS[dtype], rows, cols, depth, warps, stages)
                for stages in worthy_stages(stage, -(-walked(kind, size) // depth))
            ]
    return found


def programs_of(kind: Kind, size: Size, rows: int, cols: int) -> int:
    """How many tiles of a launch's output there are."""
    lengths = dict(zip("NDH", size, strict=True))
    return -(-lengths[kind.axes[0]] // rows) * -(-lengths[kind.axes[1]] // cols)


def walked(kind: Kind, size: Size) -> int:
    """How far the products of a launch walk: the axis that its output does not have."""
    lengths = dict(zip("NDH", size, strict=True))
    return next(length for axis, length in lengths.items() if axis not in kind.axes)


def worthy_stages(bytes_of_a_stage: int, steps: int) -> list[int]:
    """As many stages as one or more programs on a multiprocessor leave room for."""
    most = min(MOST_STAGES, steps)
    # Three of the smallest tiles, or two.
    sharings = (1, 2, 3) if bytes_of_a_stage <= 1 << 14 else (1, 2)
    possible = {min(SHARED_BYTES // sharing // bytes_of_a_stage, most) for sharing in sharings}
    return sorted(stages for stages in possible if stages >= 2)


def without_spills(jobs: list[Job], overlap: bool) -> list[Job]:
    """The jobs whose kernels keep all in registers; fills triton's cache on all cores, and launches
    nothing.
    """
    compiles = functools.partial(compiles_without_spill, overlap)
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return list(itertools.compress(jobs, pool.map(compiles, jobs, chunksize=4)))


def compiles_without_spill(overlap: bool, job: Job) -> bool:
    """Compile what one candidate launches."""
    kind, dtype, size, candidate = job
    card = Card(MULTIPROCESSORS, SHARED_BYTES, capability=90)
    with (
        mock.patch.object(_update_problem, "card_of", return_value=card),
        overlapping(overlap),
        in_precision(dtype),
        configured({kind: candidate}),
        recorded_launches() as recorded,
    ):
        step(kind.backward, unread_inputs(dtype, size))
    chosen = [one for one in recorded if one.function.fn.__name__ in kind.kernels]
    try:
        compiled = [compile_launch(launch, 90) for launch in chosen]
    except Exception:
        # More registers than there are.
        return False
    return all(not one.spilled and one.shared <= SHARED_BYTES for one in compiled)


@contextlib.contextmanager
def in_precision(dtype: str) -> Iterator[None]:
    """torch multiplies fp32 as the dtype's name says."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def overlapping(overlap: bool) -> Iterator[None]:
    """Whether a launch may begin while the one before it ends."""
    with mock.patch.object(_update_problem, "OVERLAP_FROM", 90 if overlap else 10**6):
        yield


@contextlib.contextmanager
def configured(chosen: dict[Kind, Candidate]) -> Iterator[None]:
    """The launchers with candidates in place of tables, and no plan made before."""
    with contextlib.ExitStack() as stack:
        for kind, candidate in chosen.items():
            module = _update_backward_launch if kind.backward else _update_launch
            line = (candidate,) if kind.pairs else candidate
            stack.enter_context(mock.patch.object(module, kind.table, line))
        forget_plans()
        yield
    forget_plans()


def forget_plans() -> None:
    for module, name in PLANS:
        getattr(module, name).cache_clear()


def inputs(dtype: str, size: Size, device: str) -> Tensors:
    """What memory_update takes, in the order of its op."""
    return bench.update_inputs(*size, DTYPES[dtype], device)


def described(size: Size) -> str:
    """A size as benchmarks spell it."""
    return " ".join(f"{axis}={length}" for axis, length in zip("NDH", size, strict=True))


def unread_inputs(dtype: str, size: Size) -> Tensors:
    return [torch.empty_like(x, device="cpu") for x in inputs(dtype, size, "meta")]


def step(backward: bool, tensors: Tensors) -> tuple[torch.Tensor | None, ...]:
    """The forward pass and, if asked, the backward pass, of W' and S'."""
    options = 2.0 / tensors[0].numel(), "silu", bench.MAX_GRAD_NORM
    found = _update_launch.launch_memory_update(*tensors, None, *options)
    if not backward:
        return found
    grads = _update_backward_launch.launch_memory_update_backward(
        tensors[2:10],
        None,
        *tensors[:2],
        tensors[2:6],
        tensors[6:10],
        tensors[10:],
        None,
        found[9],
        found[11:15],
        found[15:],
        *options,
        True,
        True,
    )
    return *found[:9], *(x for x in grads if x is not None)


class Recorder:
    """Stands for a launch of a plan, or for a plan of a plan, and keeps what it was called with."""

    def __init__(self, launch: Any) -> None:
        # What else a Launch calls run is triton's.
        self.launch = launch if isinstance(launch, Launch) else launch.run

    def __call__(self, *args: Any) -> None:
        self.call = functools.partial(self.launch, *args)
        self.call()

    run = __call__


def recorded_call(kind: Kind, tensors: Tensors) -> Callable[[], None]:
    """The one launch of a step, to be repeated."""
    module, name = PLANS[kind.backward]
    make = getattr(module, name)
    recorders = []

    def plan(*args: Any) -> Any:
        made = make(*args)
        recorders.append(Recorder(getattr(made, kind.field)))
        return made._replace(**{kind.field: recorders[0]})

    with mock.patch.object(module, name, plan):
        step(kind.backward, tensors)
    return recorders[0].call


def agrees(
    found: tuple[torch.Tensor | None, ...], expected: tuple[torch.Tensor | None, ...], limit: float
) -> bool:
    """Whether all but the single numbers, which may cancel to nearly nothing, are the same step."""
    pairs = [
        (a.float(), b.float())
        for a, b in zip(found, expected, strict=True)
        if a is not None and b is not None and b.ndim
    ]
    # One wait for the card.
    return bool(torch.stack([(a - b).norm() <= limit * b.norm() for a, b in pairs]).all())


def held_against_the_yardstick(tensors: Tensors) -> None:
    """The package as it is, on a few rows; the gates' gradients, of which each is one number that
    may cancel to nearly nothing, are left to the tests.
    """
    *others, alpha, eta, theta = tensors

    def having_gates(op: Callable) -> Callable:
        return lambda *leaves: op(*leaves, alpha, eta, theta)

    def in_fp64(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gates = (gate.to(leaves[2].dtype) for gate in (alpha, eta, theta))
        return bench.update_reference(*leaves, *gates)

    Yardstick(in_fp64, others).check(having_gates(bench.fusewright_update))


def main(
    out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV"),
    tables: str = typer.Option("", help="only these tables, by comma"),
    dtypes: str = typer.Option("bf16,tf32", help=f"of {', '.join(DTYPES)}"),
    sizes: str = typer.Option("0,1,2", help="which of the sizes, by comma"),
    best: int = typer.Option(3, help="candidates to print for each size"),
    overlap: bool = typer.Option(True, help="place programs while the launch before ends"),
) -> None:
    """Time the candidates and print the best of each size, and what the best take together."""
    kinds = [kind for kind in KINDS if not tables or kind.table in tables.split(",")]
    chosen_sizes = [SIZES[int(index)] for index in sizes.split(",")]
    # What one size compiles the next often finds in the cache.
    jobs = without_spills(
        [
            (kind, dtype, size, line)
            for size, kind, dtype in itertools.product(chosen_sizes, kinds, dtypes.split(","))
            for line in candidates_of(kind, dtype, size)
        ],
        overlap,
    )
    print(f"{len(jobs)} candidates", flush=True)
    table: list[dict] = []
    with overlapping(overlap):
        for dtype, size in itertools.product(dtypes.split(","), chosen_sizes):
            table += tuned(dtype, size, [job for job in jobs if job[1:3] == (dtype, size)], best)
            write(out, table)


def tuned(dtype: str, size: Size, jobs: list[Job], best: int, device: str = "cuda") -> list[dict]:
    """Rows of all launches at one size."""
    tensors = inputs(dtype, size, device)
    table: list[dict] = []
    fastest: dict[Kind, Candidate] = {}
    sums = {False: 0.0, True: 0.0}
    with in_precision(dtype):
        forget_plans()
        held_against_the_yardstick(inputs(dtype, (min(size[0], 512), *size[1:]), device))
        expected = step(True, tensors)
        for kind in dict.fromkeys(job[0] for job in jobs):
            lines = [job[3] for job in jobs if job[0] == kind]
            found = timed(kind, dtype, size, lines, tensors, expected, best)
            if found:
                ms, fastest[kind] = found[0]
                sums[kind.backward] += ms
            table += [
                dict(
                    table=kind.table,
                    case=described(size),
                    dtype=dtype,
                    ms=f"{ms:.5f}",
                    config=line,
                )
                for ms, line in found
            ]
        before = chain_times(tensors)
        with configured(fastest):
            together = chain_times(tensors)
    for name, times in (
        ("sum of the fastest", (sums[False] * 1e3, sum(sums.values()) * 1e3)),
        ("fastest together", together),
        ("tables as they are", before),
    ):
        print(
            f"{'CHAIN':15} {described(size):22} {dtype} {times[0]:7.2f} us forward "
            f"{times[1]:7.2f} us with backward: {name}",
            flush=True,
        )
    return table


def chain_times(tensors: Tensors) -> tuple[float, float]:
    """Microseconds of the forward pass, and of it with the backward pass."""
    forward, both = (
        graph_time([functools.partial(step, backward, tensors)], replays=15, warm_seconds=0.02).ms
        for backward in (False, True)
    )
    return forward * 1e3, both * 1e3


def timed(
    kind: Kind,
    dtype: str,
    size: Size,
    lines: list[Candidate],
    tensors: Tensors,
    expected: tuple[torch.Tensor | None, ...],
    best: int,
) -> list[tuple[float, Candidate]]:
    """Milliseconds of the candidates of one launch at one size, the fastest first."""
    found = []
    for line in lines:
        with configured({kind: line}):
            try:
                if not agrees(step(True, tensors), expected, SAME_STEP[dtype]):
                    print("WRONG", kind.table, dtype, size, line, flush=True)
                    continue
                call = recorded_call(kind, tensors)
                found.append((graph_time([call], replays=7, warm_seconds=0.003).ms, line))
            except Exception as error:
                print("failed", kind.table, dtype, size, line, repr(error)[:300], flush=True)
    found.sort(key=lambda pair: pair[0])
    for ms, line in found[:best]:
        print(
            f"{kind.table:15} {described(size):22} {dtype} {ms * 1e3:7.2f} us {line}",
            flush=True,
        )
    return found


def write(out: pathlib.Path, table: list[dict]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"tuning-update-{environment_name()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    typer.run(main)
