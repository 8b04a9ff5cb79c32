"""Time every candidate launch of the pooled update's kernels on this GPU; the fastest lines go to
``launch.py``, ``launch_backward.py`` and ``problem.py`` of ``update``.

    PYTHONPATH=packages/memory-mlp/src:ci/testkit/src python packages/memory-mlp/tune_update.py
    --dtypes bf16 --out packages/memory-mlp/results

Needs a GPU. Each launch is timed alone, in a graph, on the results of those before it; then
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
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import typer
from fusewright.memory_mlp._core.backends import DeviceProperties
from fusewright.memory_mlp._core.launches import Launch
from fusewright.memory_mlp.update import launch, launch_backward, problem
from fusewright.memory_mlp.update.problem import UpdateBlock, UpdateTile
from fusewright_testkit.bench import environment_name, load
from fusewright_testkit.compiled import compile_launch, recorded_launches
from fusewright_testkit.timing import graph_time
from fusewright_testkit.yardstick import Yardstick

bench = load(pathlib.Path(__file__).parent)

Tensors = list[torch.Tensor]
Size = tuple[int, int, int]

SIZES: tuple[Size, ...] = ((2048, 512, 512), (512, 320, 1280), (8192, 1024, 1024))
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
PRECISIONS = {"bf16": "narrow", "tf32": "tf32"}
PLANS = ((launch, "update_plan"), (launch_backward, "backward_plan"))
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


class TunedLaunch(NamedTuple):
    """One launch of the update: its table, the field of its pass's plan, its kernels, and how many
    pairs of operands and how many accumulators a step of its loop holds (0: elements); the axes of
    its output, N (rows), D (width) or H (hidden), and the one dtype that it serves, or "".
    """

    table: str
    backward: bool
    field: str
    kernels: tuple[str, ...]
    axes: str = ""
    pairs: int = 0
    sums: int = 1
    dtype: str = ""


GRADIENT_KERNELS = ("gradients_kernel", "add_splits_kernel")
LAUNCHES = [
    TunedLaunch("ROUND", False, "rounds", ("round_weights_kernel",), dtype="bf16"),
    TunedLaunch("TRANSPOSE", False, "transposes", ("transpose_kernel",), dtype="tf32"),
    TunedLaunch("HIDDEN", False, "hidden", ("hidden_kernel",), "NH", 1),
    TunedLaunch("RESIDUAL", False, "residual", ("residual_kernel",), "ND", 1),
    TunedLaunch("SLOPE", False, "slope", ("slope_kernel",), "NH", 1),
    TunedLaunch("GRADIENTS", False, "gradients", GRADIENT_KERNELS, "DH", 1),
    TunedLaunch("STEP", False, "step", ("step_kernel",)),
    TunedLaunch("INNER_PRODUCTS", True, "inner_products", ("inner_products_kernel",)),
    TunedLaunch("COTANGENTS", True, "cotangents", ("cotangents_kernel",)),
    TunedLaunch("P_BAR", True, "p_bar", ("p_bar_kernel",), "NH", 1),
    TunedLaunch("E_BAR", True, "e_bar", ("e_bar_kernel",), "ND", 2),
    TunedLaunch("Z_BAR", True, "z_bar", ("z_bar_kernel",), "NH", 2, 2),
    TunedLaunch("DK", True, "dk", ("dk_kernel",), "ND", 2),
    TunedLaunch("DWEIGHTS", True, "gradients", GRADIENT_KERNELS, "DH", 1),
]
Candidate = UpdateTile | UpdateBlock
Job = tuple[TunedLaunch, str, Size, Candidate]


def candidates_of(entry: TunedLaunch, dtype: str, size: Size) -> list[Candidate]:
    """Lines of a launch table for one precision that may be the fastest at a size."""
    if entry.dtype not in ("", dtype):
        return []
    if entry.table == "TRANSPOSE":
        return [UpdateBlock(side, warps) for side, warps in ((32, 4), (64, 4), (64, 8), (128, 8))]
    if not entry.pairs:
        return [
            UpdateBlock(block, warps)
            for block, warps in itertools.product((512, 1024, 2048, 4096), (4, 8))
            if 4 <= block / (32 * warps) <= 16
        ]
    itemsize = DTYPES[dtype].itemsize
    depths = [bytes_of_a_row // itemsize for bytes_of_a_row in (128, 256)]
    candidates: list[Candidate] = []
    sides = (64, 32), (64, 64), (128, 64), (64, 128), (128, 128), (128, 256), (256, 128)
    for (rows, cols), depth, warps in itertools.product(sides, depths, (4, 8)):
        sums = entry.sums * rows * cols / (32 * warps)
        programs = programs_of(entry, size, rows, cols)
        least = min(LEAST_PROGRAMS * MULTIPROCESSORS, programs_of(entry, size, 64, 64))
        many = programs >= MANY_PROGRAMS * MULTIPROCESSORS
        fits = programs >= least and (not many or sums == MOST_SUMS)
        # A warp takes 16 rows; of 8 warps two groups of four, which want a tile of 64 rows each.
        fits = fits and (warps == 4 or rows * cols > 64 * 64)
        if LEAST_SUMS <= sums <= MOST_SUMS and (fits or (entry.axes == "DH" and cols > 32)):
            stage = entry.pairs * (rows + cols) * depth * itemsize
            candidates += [
                UpdateTile(PRECISIONS[dtype], rows, cols, depth, warps, stages)
                for stages in worthy_stages(stage, -(-reduced(entry, size) // depth))
            ]
    return candidates


def programs_of(entry: TunedLaunch, size: Size, rows: int, cols: int) -> int:
    """How many tiles of a launch's output there are."""
    lengths = dict(zip("NDH", size, strict=True))
    return -(-lengths[entry.axes[0]] // rows) * -(-lengths[entry.axes[1]] // cols)


def reduced(entry: TunedLaunch, size: Size) -> int:
    """How many products a launch adds: the length of the axis that its output does not have."""
    lengths = dict(zip("NDH", size, strict=True))
    return next(length for axis, length in lengths.items() if axis not in entry.axes)


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
    entry, dtype, size, candidate = job
    gpu = DeviceProperties(MULTIPROCESSORS, SHARED_BYTES, capability=90)
    with (
        mock.patch.object(problem, "device_properties", return_value=gpu),
        overlapping(overlap),
        in_precision(dtype),
        configured({entry: candidate}),
        recorded_launches() as recorded,
    ):
        step(entry.backward, unread_inputs(dtype, size))
    chosen = [one for one in recorded if one.function.fn.__name__ in entry.kernels]
    try:
        compiled = [compile_launch(one, 90) for one in chosen]
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
    with mock.patch.object(problem, "OVERLAP_FROM", 90 if overlap else 10**6):
        yield


@contextlib.contextmanager
def configured(chosen: dict[TunedLaunch, Candidate]) -> Iterator[None]:
    """The launchers with candidates in place of tables, and no plan kept from before."""
    with contextlib.ExitStack() as stack:
        for entry, candidate in chosen.items():
            module = module_of(entry)
            line = (candidate,) if entry.pairs else candidate
            stack.enter_context(mock.patch.object(module, entry.table, line))
        forget_plans()
        yield
    forget_plans()


def module_of(entry: TunedLaunch) -> ModuleType:
    """The module that reads the launch's table."""
    if entry.table == "TRANSPOSE":
        return problem
    return launch_backward if entry.backward else launch


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
    """The forward pass and, with ``backward``, the backward pass, of W' and S'."""
    options = 2.0 / tensors[0].numel(), "silu", bench.MAX_GRAD_NORM
    outputs = launch.update_forward(*tensors, None, *options)
    if not backward:
        return outputs
    grads = launch_backward.update_backward(
        tensors[2:10],
        None,
        *tensors[:2],
        tensors[2:6],
        tensors[6:10],
        tensors[10:],
        None,
        outputs[9],
        outputs[11:15],
        outputs[15:],
        *options,
        True,
        True,
    )
    return *outputs[:9], *(x for x in grads if x is not None)


class Recorder:
    """Takes the place of a launch, or of a plan, in a plan and keeps the arguments of its call."""

    def __init__(self, launch: Any) -> None:
        # A Launch has an attribute run too: Triton's own launcher.
        self.launch = launch if isinstance(launch, Launch) else launch.run

    def __call__(self, *args: Any) -> None:
        self.call = functools.partial(self.launch, *args)
        self.call()

    run = __call__


def recorded_call(entry: TunedLaunch, tensors: Tensors) -> Callable[[], None]:
    """The one launch of a step, to be repeated."""
    module, name = PLANS[entry.backward]
    make = getattr(module, name)
    recorders = []

    def plan(*args: Any) -> Any:
        planned = make(*args)
        recorders.append(Recorder(getattr(planned, entry.field)))
        return planned._replace(**{entry.field: recorders[0]})

    with mock.patch.object(module, name, plan):
        step(entry.backward, tensors)
    return recorders[0].call


def agrees(
    outputs: tuple[torch.Tensor | None, ...],
    expected: tuple[torch.Tensor | None, ...],
    limit: float,
) -> bool:
    """Whether all but the single numbers, which may cancel to nearly nothing, are the same step."""
    pairs = [
        (a.float(), b.float())
        for a, b in zip(outputs, expected, strict=True)
        if a is not None and b is not None and b.ndim
    ]
    # One wait for the GPU.
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
    entries = [entry for entry in LAUNCHES if not tables or entry.table in tables.split(",")]
    chosen_sizes = [SIZES[int(index)] for index in sizes.split(",")]
    # What one size compiles the next often finds in the cache.
    jobs = without_spills(
        [
            (entry, dtype, size, line)
            for size, entry, dtype in itertools.product(chosen_sizes, entries, dtypes.split(","))
            for line in candidates_of(entry, dtype, size)
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
    fastest: dict[TunedLaunch, Candidate] = {}
    sums = {False: 0.0, True: 0.0}
    with in_precision(dtype):
        forget_plans()
        held_against_the_yardstick(inputs(dtype, (min(size[0], 512), *size[1:]), device))
        expected = step(True, tensors)
        for entry in dict.fromkeys(job[0] for job in jobs):
            lines = [job[3] for job in jobs if job[0] == entry]
            times = timed(entry, dtype, size, lines, tensors, expected, best)
            if times:
                ms, fastest[entry] = times[0]
                sums[entry.backward] += ms
            table += [
                dict(
                    table=entry.table,
                    case=described(size),
                    dtype=dtype,
                    ms=f"{ms:.5f}",
                    config=line,
                )
                for ms, line in times
            ]
        before = chain_times(tensors)
        with configured(fastest):
            together = chain_times(tensors)
    for name, pair in (
        ("sum of the fastest", (sums[False] * 1e3, sum(sums.values()) * 1e3)),
        ("fastest together", together),
        ("tables as they are", before),
    ):
        print(
            f"{'CHAIN':15} {described(size):22} {dtype} {pair[0]:7.2f} us forward "
            f"{pair[1]:7.2f} us with backward: {name}",
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
    entry: TunedLaunch,
    dtype: str,
    size: Size,
    lines: list[Candidate],
    tensors: Tensors,
    expected: tuple[torch.Tensor | None, ...],
    best: int,
) -> list[tuple[float, Candidate]]:
    """Milliseconds of the candidates of one launch at one size, the fastest first."""
    times = []
    for line in lines:
        with configured({entry: line}):
            try:
                if not agrees(step(True, tensors), expected, SAME_STEP[dtype]):
                    print("WRONG", entry.table, dtype, size, line, flush=True)
                    continue
                call = recorded_call(entry, tensors)
                times.append((graph_time([call], replays=7, warm_seconds=0.003).ms, line))
            except Exception as error:
                print("failed", entry.table, dtype, size, line, repr(error)[:300], flush=True)
    times.sort(key=lambda pair: pair[0])
    for ms, line in times[:best]:
        print(
            f"{entry.table:15} {described(size):22} {dtype} {ms * 1e3:7.2f} us {line}",
            flush=True,
        )
    return times


def write(out: pathlib.Path, table: list[dict]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"tuning-update-{environment_name()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    typer.run(main)
