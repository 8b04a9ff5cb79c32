"""Time what a user waits for before anything is cached, and write it to the package's results.

    python -m fusewright_testkit.first_call norm

For the first case of each op and each provider of the package's ``bench.py``, and for each other
case that says so, in processes of their own: seconds to import the package, of the first forward
and backward pass, and of the second ones. Two processes follow one another: the first finds
Triton's and Inductor's caches empty, the second finds what the first compiled. A third one, of ours
alone, finds them empty and warms up first. torch is imported, the GPU's context made, and the
operands drawn, before any clock runs.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import typer
from rich.console import Console

from .bench import OURS, asked_for, environment_name, load, merge, precision_of
from .cases import Case
from .timing import seconds_of
from .yardstick import as_leaf, as_tuple

COLUMNS = ("op", "case", "dtype", "provider", "cache")
CLOCKS = ("import_s", "warm_up_s", "fwd_s", "bwd_s", "second_fwd_s", "second_bwd_s")
CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"
LIMIT_SECONDS = 300


def first_cases(folder: pathlib.Path) -> list[Case]:
    """The first case of each op that has a backward pass, and those that are to be timed beside it:
    other kernels serve them.
    """
    found: list[Case] = []
    for case in load(folder).cases():
        is_first = case.op not in [other.op for other in found]
        if "fwd" in case.bytes_moved and (is_first or case.first_call):
            found.append(case)
    return found


def measure(
    folder: pathlib.Path, place: int, provider: str, device: str, warms_up: bool
) -> dict[str, float]:
    """Seconds by clock, in this process, which has not imported the package yet, of the case at
    this place.
    """
    torch.empty(1, device=device)
    start = time.perf_counter()
    package = importlib.import_module("fusewright." + folder.name.replace("-", "_"))
    seconds = {"import_s": time.perf_counter() - start}
    case = first_cases(folder)[place]
    function = load(folder).providers()[provider][case.op]
    own = getattr(function, "inputs", None)
    # The interpreter would take minutes for the whole.
    inputs = case.inputs if device == "cuda" else case.sample or case.inputs
    drawn = own(device, case.dtype) if own else inputs(device)
    leaves = [as_leaf(x, None) for x in drawn]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    has_backward = not getattr(function, "forward_only", False)
    with precision_of(case):
        if warms_up:
            seconds["warm_up_s"] = seconds_of(
                lambda: package.warm_up(function, *leaves, backward=has_backward)
            )
        for prefix in ("", "second_"):
            outputs: list[torch.Tensor] = []
            seconds[prefix + "fwd_s"] = seconds_of(
                lambda outputs=outputs: outputs.extend(as_tuple(function(*leaves)))
            )
            if not has_backward:
                continue
            upstream = [torch.ones_like(y) for y in outputs]
            seconds[prefix + "bwd_s"] = seconds_of(
                functools.partial(torch.autograd.grad, outputs, wanted, upstream)
            )
    return seconds


def rows_of(
    folder: pathlib.Path, place: int, provider: str, device: str, console: Console
) -> list[dict[str, str]]:
    """A row with empty caches, one with filled ones and, of ours, one with empty caches and a
    warm-up; none where the provider did not run.
    """
    case = first_cases(folder)[place]
    rows = []
    with tempfile.TemporaryDirectory() as filled, tempfile.TemporaryDirectory() as warmed:
        processes = [("empty", filled), ("filled", filled)]
        if provider == OURS:
            processes.append(("warmed", warmed))
        for cache, caches in processes:
            environment = os.environ | {name: f"{caches}/{name}" for name in CACHES}
            command = [sys.executable, "-m", __spec__.name, folder.name, "--device", device]
            command += ["--place", str(place), "--provider", provider]
            command += ["--warms-up"] if cache == "warmed" else []
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
                )
            except subprocess.TimeoutExpired:
                console.print(f"  {provider} took {case.op} more than {LIMIT_SECONDS} seconds")
                return rows
            if done.returncode:
                if provider.startswith(OURS):
                    raise RuntimeError(f"{provider} did not run {case.op}: {done.stderr}")
                console.print(f"  {provider} did not run {case.op}: {done.stderr[-300:]}")
                return rows
            seconds = json.loads(done.stdout.splitlines()[-1])
            what = case.op, case.described, case.dtype_name, provider, cache
            clocks = {name: f"{seconds[name]:.4f}" if name in seconds else "" for name in CLOCKS}
            rows.append(dict(zip(COLUMNS, what, strict=True)) | clocks)
    return rows


def main(
    package: str = typer.Argument(help="folder name of the package, such as norm; run at the root"),
    out: pathlib.Path = typer.Option(None, help="folder of the result file; its own results/"),
    op: str = typer.Option("", help="only ops whose name contains this"),
    provider: str = typer.Option("", help="only these providers, by comma"),
    device: str = typer.Option("cuda", help="where the operands are"),
    place: int = typer.Option(-1, help="of one case and provider, in this process"),
    warms_up: bool = typer.Option(False, "--warms-up", help="with it: warm up before"),
) -> None:
    """Time the first calls of PACKAGE and its peers."""
    folder = pathlib.Path("packages") / package
    if place >= 0:
        print(json.dumps(measure(folder, place, provider, device, warms_up)))
        return
    console = Console(width=160)
    out = out or folder / "results"
    path = out / f"first-call-{environment_name()}.csv"
    timed = False
    providers = asked_for(load(folder).providers(), provider)
    for number, case in enumerate(first_cases(folder)):
        for who, ops in providers.items():
            if op not in case.op or case.op not in ops:
                continue
            rows = rows_of(folder, number, who, device, console)
            for row in rows:
                console.print(" ".join(row.values()))
            # After every provider: a run that is cut off leaves what it has.
            if rows:
                merge(path, rows, [*COLUMNS, *CLOCKS], COLUMNS)
                timed = True
    if not timed:
        raise typer.BadParameter("nothing was timed")


if __name__ == "__main__":
    typer.run(main)
