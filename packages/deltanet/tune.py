"""Time every candidate launch of the rule's kernels on this GPU; the fastest lines go to
``launch.py``, ``launch_backward.py`` and ``launch_step.py`` of ``rule``.

    PYTHONPATH=packages/deltanet/src:ci/testkit/src python packages/deltanet/tune.py --out
    packages/deltanet/results

Needs a GPU. One kernel's line changes at a time, the others are as committed; the pass that the
kernel belongs to is timed as a whole. Every candidate is checked before that.
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
from fusewright.deltanet import gated_delta_rule, gated_delta_rule_step
from fusewright.deltanet._core.backends import DeviceProperties
from fusewright.deltanet.rule import launch, launch_backward, launch_step
from fusewright_testkit import Case, Yardstick
from fusewright_testkit.bench import environment_name, load
from fusewright_testkit.compiled import SHARED_KIB, compile_launch, recorded_launches
from fusewright_testkit.timing import copies_needed, graph_time

bench = load(pathlib.Path(__file__).parent)
# What candidates are compiled for before they are launched.
GPU = DeviceProperties(multiprocessors=132, shared_bytes=SHARED_KIB[90] << 10, capability=90)
MODEL, LONG, NARROW, WIDE, MANY = *bench.RULES, dict(B=4, T=4096, H=16, D=128)
STEP = bench.STEPS[0]
# What the carried state is cut into depends on how many rows and heads there are.
SERIAL = (MODEL, LONG, NARROW, WIDE, MANY)


class Kind(NamedTuple):
    """A line of the tables: its module and name, whether it is of the backward pass, and the sizes
    at which it is timed.
    """

    module: Any
    name: str
    backward: bool
    sizes: tuple[dict[str, int], ...]


KINDS = {
    "prepare": Kind(launch, "PREPARE", False, (MODEL, NARROW)),
    "states": Kind(launch, "STATES", False, SERIAL),
    "outputs": Kind(launch, "OUTPUTS", False, (MODEL, NARROW)),
    "local": Kind(launch_backward, "LOCAL", True, (MODEL, NARROW)),
    "state_gradients": Kind(launch_backward, "STATE_GRADIENTS", True, SERIAL),
    "inputs": Kind(launch_backward, "INPUTS", True, (MODEL, NARROW)),
    "through": Kind(launch_backward, "THROUGH", True, (MODEL, NARROW)),
    "step": Kind(launch_step, "STEP_BLOCK_V", False, (STEP,)),
}


class Job(NamedTuple):
    """A line that may stand in the place of a kind's committed one, and the sizes of its launch."""

    kind: str
    sizes: dict[str, int]
    line: Any


def committed(kind: str) -> Any:
    """The line or lines of the tables as they are."""
    return getattr(KINDS[kind].module, KINDS[kind].name)


def is_serial(kind: str) -> bool:
    """Whether it carries a state over chunks, by one of a table's lines."""
    return kind in ("states", "state_gradients")


def candidates(kind: str, width: int) -> Iterator[Any]:
    """Candidates for the place of the committed line."""
    line = committed(kind)
    if kind == "step":
        yield from (8, 16, 32, 64)
    elif is_serial(kind):
        for block_v, warps, stages in itertools.product((16, 32, 64), (4, 8), (2, 3, 4)):
            if block_v <= width:
                yield (launch.SerialConfig(block_v, warps, stages),)
    else:
        blocks = (64, 128) if width >= 128 else (64,)
        for block_k, block_v, warps, stages in itertools.product(blocks, blocks, (4, 8), (1, 2, 3)):
            yield line._replace(
                block_k=block_k, block_v=block_v, num_warps=warps, num_stages=stages
            )


@contextlib.contextmanager
def configured(kind: str, line: Any) -> Iterator[None]:
    """The launchers with one candidate in place of its line, and no plan made before."""
    plans = launch.forward_plan, launch_backward.backward_plan, launch_step.step_plan
    for plan in plans:
        plan.cache_clear()
    with mock.patch.object(KINDS[kind].module, KINDS[kind].name, line):
        yield
    for plan in plans:
        plan.cache_clear()


def rule(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (gated_delta_rule(*tensors, backend="triton").o,)


def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(gated_delta_rule_step(*tensors, backend="triton"))


def op_of(kind: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    return step if kind == "step" else rule


def case_of(kind: str, sizes: dict[str, int]) -> Case:
    return (bench.step_case if kind == "step" else bench.rule_case)(sizes)


@functools.cache
def yardstick(kind: str, width: int) -> Yardstick:
    case = case_of(kind, dict(B=2, T=130, H=4, D=width))
    return Yardstick(case.reference, case.inputs("cuda"))


def calls(
    kind: str, sizes: dict[str, int], stream: torch.cuda.Stream
) -> list[Callable[[], object]]:
    """The pass of a kind on cold copies of its inputs. For a backward pass the forward passes are
    done before, on the stream, by the lines that are in force.
    """
    case, op = case_of(kind, sizes), op_of(kind)
    copies = [case.inputs("cuda") for _ in range(copies_needed(case.bytes_moved["fwd"]))]
    if not KINDS[kind].backward:
        return [functools.partial(op, *inputs) for inputs in copies]
    backward_passes = []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for inputs in copies:
            leaves = [x.requires_grad_() for x in inputs]
            outputs = op(*leaves)
            grads = [torch.randn_like(y) for y in outputs]
            backward_passes.append(
                functools.partial(torch.autograd.grad, outputs, leaves, grads, retain_graph=True)
            )
    return backward_passes


def sound(jobs: list[Job]) -> list[Job]:
    """The candidates whose machine code may be launched, compiled on all cores."""
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return list(itertools.compress(jobs, pool.map(is_sound, jobs, chunksize=2)))


def is_sound(job: Job) -> bool:
    """Whether what a candidate launches compiles, fits, spills nothing and reads no register that
    nothing has written: an address made of one would end the process, and all candidates after it.
    """
    kind, sizes, line = job
    inputs = case_of(kind, sizes | ({} if kind == "step" else dict(T=64))).inputs("cpu")
    scale = 0.1
    tuned = mock.patch.object(launch, "device_properties", return_value=GPU)
    with tuned, configured(kind, line), recorded_launches() as recorded:
        if kind == "step":
            launch_step.step_forward(*inputs, scale)
        else:
            o, end, *saved = launch.rule_forward(*inputs, None, None, scale)
            if KINDS[kind].backward:
                operands = (*inputs, None, None, *saved)
                launch_backward.rule_backward(o, end, *operands, scale)
    name = f"{kind}_kernel"
    (tuned_launch,) = (each for each in recorded if each.function.fn.__name__ == name)  # type: ignore[attr-defined]
    # Where shared memory has no room, fewer stages are launched than the line has.
    if is_serial(kind) and tuned_launch.kwargs["num_stages"] < line[0].num_stages:
        return False
    try:
        resources = compile_launch(tuned_launch, GPU.capability)
    except Exception as error:
        print("failed", kind, line, repr(error)[:80])
        return False
    if resources.spilled or resources.undefined or resources.shared > GPU.shared_bytes:
        print("not sound", resources)
        return False
    return True


def main(
    out: pathlib.Path = typer.Option(pathlib.Path("."), help="folder of the CSV"),
    kinds: str = typer.Option(",".join(KINDS), help="kernels to tune"),
    best: int = typer.Option(4, help="candidates to print for each size"),
) -> None:
    """Time the candidates and print the best of each size."""
    chosen = [(kind, sizes) for kind in kinds.split(",") for sizes in KINDS[kind].sizes]
    jobs = sound(
        [Job(*each, line) for each in chosen for line in candidates(each[0], each[1]["D"])]
    )
    table = []
    for kind, sizes in chosen:
        results = []
        stream = torch.cuda.Stream()
        timed = calls(kind, sizes, stream)
        lines = [job.line for job in jobs if job[:2] == (kind, sizes)]
        for place, line in enumerate((committed(kind), *lines)):
            with configured(kind, line):
                try:
                    yardstick(kind, sizes["D"]).check(op_of(kind))
                    ms = graph_time(timed, replays=7, stream=stream, warm_seconds=0.01).ms
                except Exception as error:
                    print("failed", kind, line, repr(error)[:80])
                    continue
            results.append((ms, "committed" if place == 0 else str(line)))
        del timed
        case = " ".join(f"{key}={value}" for key, value in sizes.items())
        table += ranked(kind, case, results, best)
    write_table(out, "tuning", table)


def ranked(
    kind: str, case: str, results: list[tuple[float, str]], best: int
) -> list[dict[str, str]]:
    """Rows of a size, the fastest line first; the best are printed, and the committed one."""
    results.sort()
    for rank, (ms, line) in enumerate(results):
        if rank < best or line == "committed":
            print(f"{kind:16} {case} {ms * 1e3:8.1f} us {line}", flush=True)
    return [dict(kind=kind, case=case, ms=f"{ms:.5f}", line=line) for ms, line in results]


def write_table(out: pathlib.Path, name: str, table: list[dict[str, str]]) -> None:
    """A CSV of this environment."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}-{environment_name()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    typer.run(main)
