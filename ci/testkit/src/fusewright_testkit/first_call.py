"""Time what a user waits for before anything is cached, and write it to the package's results.

    python -m fusewright_testkit.first_call norm

For the first case of each op and each provider of the package's ``bench.py``, in processes of their
own: seconds to import the package, of the first forward and backward pass, and of the second ones.
Two processes follow one another: the first finds Triton's and Inductor's caches empty, the second
finds what the first compiled. torch is imported, the GPU's context made, and the operands drawn,
before any clock runs.
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
CLOCKS = ("import_s", "fwd_s", "bwd_s", "second_fwd_s", "second_bwd_s")
CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"
LIMIT_SECONDS = 300


def first_cases(folder: pathlib.Path) -> dict[str, Case]:
    """The first case of each op that has a backward pass."""
    found: dict[str, Case] = {}
    for case in load(folder).cases():
        if "fwd" in case.bytes_moved:
            found.setdefault(case.op, case)
    return found


def measure(folder: pathlib.Path, op: str, provider: str, device: str) -> dict[str, float]:
    """Seconds by clock, in this process, which has not imported the package yet."""
    torch.empty(1, device=device)
    start = time.perf_counter()
    importlib.import_module("fusewright." + folder.name.replace("-", "_"))
    seconds = {"import_s": time.perf_counter() - start}
    case, function = first_cases(folder)[op], load(folder).providers()[provider][op]
    own = getattr(function, "inputs", None)
    # The interpreter would take minutes for the whole.
    inputs = case.inputs if device == "cuda" else case.sample or case.inputs
    drawn = own(device, case.dtype) if own else inputs(device)
    leaves = [as_leaf(x, None) for x in drawn]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    with precision_of(case):
        for prefix in ("", "second_"):
            outputs: list[torch.Tensor] = []
            seconds[prefix + "fwd_s"] = seconds_of(
                lambda outputs=outputs: outputs.extend(as_tuple(function(*leaves)))
            )
            if getattr(function, "forward_only", False):
                continue
            upstream = [torch.ones_like(y) for y in outputs]
            seconds[prefix + "bwd_s"] = seconds_of(
                functools.partial(torch.autograd.grad, outputs, wanted, upstream)
            )
    return seconds


def rows_of(
    folder: pathlib.Path, case: Case, provider: str, device: str, console: Console
) -> list[dict[str, str]]:
    """A row with empty caches and one with filled ones; none where the provider did not run."""
    rows = []
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {name: f"{caches}/{name}" for name in CACHES}
        command = [sys.executable, "-m", __spec__.name, folder.name, "--device", device]
        command += ["--op", case.op, "--provider", provider, "--here"]
        for cache in ("empty", "filled"):
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
    here: bool = typer.Option(False, "--here", help="of one op and provider, in this process"),
) -> None:
    """Time the first calls of PACKAGE and its peers."""
    folder = pathlib.Path("packages") / package
    if here:
        print(json.dumps(measure(folder, op, provider, device)))
        return
    console = Console(width=160)
    out = out or folder / "results"
    path = out / f"first-call-{environment_name()}.csv"
    timed = False
    providers = asked_for(load(folder).providers(), provider)
    for name, case in first_cases(folder).items():
        for who, ops in providers.items():
            if op not in name or name not in ops:
                continue
            rows = rows_of(folder, case, who, device, console)
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
