"""Time a package's ops and their peers in one run and write their rows to the result file.

    python -m fusewright_testkit.bench norm

A package's ``bench.py``, or folder ``bench``, beside its source declares

* ``cases()``: what is timed, each a :class:`fusewright_testkit.Case`;
* ``providers()``: from a provider's name to its functions by op. The package's own provider is
  called ``fusewright``. A peer that does not compute the same, such as another library's layer with
  parameters of its own, has ``inputs(device, dtype)`` of its own. One that moves its tensors in
  place, such as an optimizer, has ``prepare(inputs)``, which returns a step that is timed again and
  again; only its outputs are checked. One that has no backward pass here has ``forward_only`` true:
  its outputs are checked, its forward pass is timed. One that no CUDA graph may hold, since it
  waits for the GPU, has ``captures`` false; a step has it either way. One whose backward pass
  cannot run twice after one forward pass has ``repeats`` false: it is timed with that alone. A
  library that is not there is ``Absent``, and named with its reason.

Every provider that computes the same is checked against the yardstick before it is timed. Ours must
pass; a peer that does not is timed and named.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import importlib.util
import io
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
import typer
from rich.console import Console
from rich.table import Table

from .cases import Absent, Case, told
from .report import COLUMNS
from .timing import Time, copies_needed, event_time, graph_time, wall_time
from .yardstick import Yardstick, as_leaf, as_tuple

OURS = "fusewright"
# The columns that say what a row measures.
IDENTITY = ("op", "case", "pass", "provider", "dtype", "timing")
RECOMPILES = 64


def environment_name() -> str:
    """The name of a result file: GPU, torch and triton, such as ``h200-torch2.11-triton3.6``."""
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    gpu = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")
    torch_version, triton_version = (
        ".".join(module.__version__.split(".")[:2]) for module in (torch, triton)
    )
    return f"{gpu}-torch{torch_version}-triton{triton_version}"


class Timer:
    """One provider's function on one case: calls on cold copies of the inputs, on one stream."""

    def __init__(self, case: Case, op: Callable):
        self.case, self.op = case, op
        self.forward_only = getattr(op, "forward_only", False)
        self.captures = getattr(op, "captures", True)
        self.repeats = getattr(op, "repeats", True)
        self.stream = torch.cuda.Stream()
        bytes_of_one_call = case.bytes_moved["fwd+bwd"]
        self.inputs = []
        own = getattr(op, "inputs", None)
        for _ in range(copies_needed(bytes_of_one_call)):
            drawn = own("cuda", case.dtype) if own else case.inputs("cuda")
            self.inputs.append([as_leaf(x, None) for x in drawn])
        self.stream.wait_stream(torch.cuda.current_stream())

    def forward(self, inputs: list) -> Callable[[], object]:
        def call():
            with torch.no_grad():
                return self.op(*inputs)

        return call

    def backward(self, inputs: list) -> Callable[[], object]:
        with torch.cuda.stream(self.stream):
            outputs = as_tuple(self.op(*inputs))
            grads = [torch.randn_like(y) for y in outputs]
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    def both(self, inputs: list) -> Callable[[], object]:
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        grads = [torch.randn_like(y) for y in as_tuple(self.op(*inputs))]
        return lambda: torch.autograd.grad(as_tuple(self.op(*inputs)), leaves, grads)

    def times(self) -> Iterator[tuple[str, str, Time]]:
        """Pass, clock and time, one after the other."""
        for name, make in (("fwd", self.forward), ("bwd", self.backward)):
            if name == "bwd" and not self.repeats:
                continue
            calls = [make(inputs) for inputs in self.inputs]
            if self.captures:
                yield name, "graph", graph_time(calls, stream=self.stream)
            torch.cuda.current_stream().wait_stream(self.stream)
            yield name, "event", event_time(calls[0])
            if name == "fwd" and self.case.forward_wall:
                yield name, "wall", wall_time(calls[0])
            del calls
            if self.forward_only:
                return
        if self.captures:
            with torch.cuda.stream(self.stream):
                calls = [self.both(inputs) for inputs in self.inputs]
            yield "fwd+bwd", "graph", graph_time(calls, stream=self.stream)
        torch.cuda.current_stream().wait_stream(self.stream)
        yield "fwd+bwd", "wall", wall_time(self.both(self.inputs[0]))

    def peak_mib(self) -> float:
        """Memory that one forward and backward takes beyond its inputs; the forward alone where
        there is no other.
        """
        call = (self.forward if self.forward_only else self.both)(self.inputs[0])
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


class StepTimer:
    """One provider's step, which moves its tensors in place."""

    def __init__(self, case: Case, op: Callable):
        # What another provider left would be counted off.
        gc.collect()
        inputs = case.inputs("cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.captures = op.captures
        self.step = op.prepare(inputs)
        self.step()
        self.peak = (torch.cuda.max_memory_allocated() - before) / 2**20

    def times(self) -> Iterator[tuple[str, str, Time]]:
        """Pass, clock and time, one after the other."""
        yield "step", "wall", wall_time(self.step)
        yield "step", "event", event_time(self.step)
        if self.captures:
            yield "step", "graph", graph_time([self.step])

    def peak_mib(self) -> float:
        """Memory that the first step takes beyond its inputs, state included."""
        return self.peak


def rows_of_case(case: Case, provider: str, op: Callable) -> Iterator[dict]:
    """Result rows of one provider on one case."""
    # It takes seconds to import.
    import torch._dynamo

    # A compiled backward pass may otherwise not be run twice on one graph.
    torch._functorch.config.donated_buffer = False
    # Every case is compiled with and without gradients, more often than torch allows by default.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    timer = (StepTimer if hasattr(op, "prepare") else Timer)(case, op)
    memory = timer.peak_mib()
    for name, clock, time in timer.times():
        seconds = time.ms / 1e3
        flops = case.flops.get(name)
        yield {
            "op": case.op,
            "case": case.described,
            "pass": name,
            "provider": provider,
            "dtype": case.dtype_name,
            "timing": clock,
            "ms": f"{time.ms:.5f}",
            "ms_p20": f"{time.ms_p20:.5f}",
            "ms_p80": f"{time.ms_p80:.5f}",
            "tflops": f"{flops / seconds / 1e12:.1f}" if flops else "",
            "gbps": f"{case.bytes_moved[name] / seconds / 1e9:.1f}",
            "mem_mib": f"{memory:.1f}",
        }


@contextlib.contextmanager
def precision_of(case: Case) -> Iterator[None]:
    """torch multiplies fp32 matrices as the case says."""
    before = torch.backends.cuda.matmul.fp32_precision
    if case.precision == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def check(case: Case, provider: str, op: Callable, console: Console) -> None:
    """Hold a provider against the yardstick. Raises for ours, names a peer that errs more."""
    inputs = (case.sample or case.inputs)("cuda")
    grads = None
    if hasattr(op, "prepare"):
        # A step has as many outputs as parameters, and as many gradients beside them.
        grads = [None] * (len(inputs) // 2)
    elif getattr(op, "forward_only", False):
        with torch.no_grad():
            grads = [None] * len(as_tuple(case.reference(*inputs)))
    yardstick = Yardstick(case.reference, inputs, grads)
    try:
        yardstick.check(op)
    except AssertionError as error:
        if provider.startswith(OURS):
            raise
        console.print(f"  {provider} errs more than the yardstick allows: {error}")


def load(folder: pathlib.Path, what: str = "bench") -> ModuleType:
    """A package's ``bench.py`` or ``bench/``, or its ``tune.py``, which no wheel holds."""
    name = f"{what}_of_{folder.resolve().name.replace('-', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    paths = [folder / f"{what}.py", folder / what / "__init__.py"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        wanted = f"{what}.py or {what}/__init__.py"
        raise FileNotFoundError(f"wanted {wanted} in {folder}, found neither")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs: modules of a folder import one another through it.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(
    package: str = typer.Argument(help="folder name of the package, such as norm; run at the root"),
    out: pathlib.Path = typer.Option(None, help="folder of the result file; its own results/"),
    op: str = typer.Option("", help="only ops whose name contains this"),
    provider: str = typer.Option("", help="only these providers, by comma"),
    sizes: str = typer.Option("", help="only cases with all of these, such as 'T=4096 k=512'"),
) -> None:
    """Time PACKAGE and its peers on this machine's GPU."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("benchmarks need a CUDA device, and torch sees none")
    console = Console(width=160)
    folder = pathlib.Path("packages") / package
    bench = load(folder)
    providers = asked_for(bench.providers(), provider)
    present = ", ".join(name for name, ops in providers.items() if ops)
    console.print(f"{environment_name()}: {present}")
    for name, ops in providers.items():
        if isinstance(ops, Absent):
            console.print(f"  {name} is absent: {ops.reason}")
    out = out or folder / "results"
    found: list[dict] = []
    for case in bench.cases():
        if op not in case.op or not set(sizes.split()) <= set(case.described.split()):
            continue
        for name, ops in providers.items():
            if case.op not in ops:
                continue
            try:
                with precision_of(case):
                    if name.startswith(OURS) or not hasattr(ops[case.op], "inputs"):
                        check(case, name, ops[case.op], console)
                    torch.cuda.empty_cache()
                    found += rows_of_case(case, name, ops[case.op])
            except Exception as error:
                if name.startswith(OURS):
                    raise
                console.print(f"  {name} did not run {case.op}: {told(error)}")
            torch.cuda.empty_cache()
        console.print(f"{case.op} {case.sizes}")
        # After every case: a run that is cut off leaves what it has.
        if found:
            merge(out / f"{environment_name()}.csv", found)
    if not found:
        raise typer.BadParameter("nothing was timed")
    show(found, console)


def asked_for(providers: dict[str, dict], names: str) -> dict[str, dict]:
    """Those of the providers whose names, with commas between them, are given; all for none."""
    return {name: ops for name, ops in providers.items() if not names or name in names.split(",")}


def merge(
    path: pathlib.Path,
    rows: list[dict],
    columns: Sequence[str] = COLUMNS,
    identity: Sequence[str] = IDENTITY,
) -> None:
    """Write the rows, in place of those that the file has of the same identity; the others stay.

    Args:
        path: the file.
        rows: values by column.
        columns: of the file.
        identity: the columns that say what a row measures.
    """

    def measured(row: dict) -> tuple[str, ...]:
        return tuple(row[name] for name in identity)

    merged = {}
    if path.exists():
        with path.open(newline="") as file:
            merged = {measured(row): row for row in csv.DictReader(file)}
    merged |= {measured(row): row for row in rows}
    # Whole before it is written: what cannot be written costs no row of the file.
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(merged.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.getvalue())


def show(rows: list[dict], console: Console) -> None:
    """A short table: kernel time of the passes, wall time of both."""
    names = list(dict.fromkeys(row["provider"] for row in rows))
    table = Table("op", "case", "dtype", "pass", "timing", *names)
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        key = tuple(row[column] for column in ("op", "case", "dtype", "pass", "timing"))
        lines.setdefault(key, {})[row["provider"]] = f"{float(row['ms']) * 1e3:.1f}"
    for key, times in lines.items():
        table.add_row(*key, *(times.get(name, "") for name in names))
    console.print(table, "microseconds")


if __name__ == "__main__":
    typer.run(main)
