"""Compare the ways to register one differentiable op with torch: what each supports and costs.

    python ci/studies/registration.py --out rows.csv

runs every check of every style of registration_styles.py on this machine (on CUDA where there is
one), once more in Triton's interpreter, prints the table and writes one CSV row per check. A check
that fails or raises is a row, never the end of the run.
"""

from __future__ import annotations

import csv
import functools
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import registration_op as op
import registration_styles as styles
import rich
import torch
import torch.nn.functional as F
import typer
from registration_costs import CALLS, call_cost, launch_steps, microseconds
from registration_op import ALLOCATE, EPS, INTERPRETED, KERNELS, Raw
from registration_styles import STYLES, Style
from rich.table import Table
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, vmap

COLUMNS = ("style", "check", "device", "result", "value_us")
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
Call = Callable[[Tensor, Tensor], Tensor]
Tensors = tuple[Tensor, ...]


def plain_formula(x: Tensor, weight: Tensor) -> Tensor:
    return op.reference_forward(x, weight, EPS)[0]


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


class Checks:
    """Each method returns what the style computes, as tensors, for the formula to be held to."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(3, 4, 48, generator=generator).to(device)
        self.weight = torch.randn(48, generator=generator).to(device)
        self.dy = torch.randn(4, 48, generator=generator).to(device)
        self.device = device

    def loss(self, call: Call) -> Call:
        return lambda x, weight: (call(x, weight) * self.dy.to(x.dtype)).square().sum()

    def leaves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, weight = self.x[0].to(dtype, copy=True), self.weight.to(dtype, copy=True)
        return x.requires_grad_(), weight.requires_grad_()

    def first_order(self, loss: Call, dtype: torch.dtype) -> Tensors:
        x, weight = self.leaves(dtype)
        value = loss(x, weight)
        return (value.detach(), *torch.autograd.grad(value, (x, weight)))

    def eager(self, call: Call, dtype: torch.dtype) -> Tensors:
        return self.first_order(self.loss(call), dtype)

    def compile_aot_eager(self, call: Call, dtype: torch.dtype) -> Tensors:
        compiled = torch.compile(self.loss(call), fullgraph=True, backend="aot_eager")
        return self.first_order(compiled, dtype)

    def compile_inductor(self, call: Call, dtype: torch.dtype) -> Tensors:
        return self.first_order(torch.compile(self.loss(call), fullgraph=True), dtype)

    def func_grad(self, call: Call, dtype: torch.dtype) -> Tensors:
        return grad(self.loss(call), (0, 1))(self.x[0].to(dtype), self.weight.to(dtype))

    def compile_of_func_grad(self, call: Call, dtype: torch.dtype) -> Tensors:
        compiled = torch.compile(grad(self.loss(call), (0, 1)), backend="aot_eager")
        return compiled(self.x[0].to(dtype), self.weight.to(dtype))

    def compile_of_func_grad_fullgraph(self, call: Call, dtype: torch.dtype) -> Tensors:
        compiled = torch.compile(grad(self.loss(call), (0, 1)), fullgraph=True)
        return compiled(self.x[0].to(dtype), self.weight.to(dtype))

    def compile_of_func_grad_of_leaves(self, call: Call, dtype: torch.dtype) -> Tensors:
        compiled = torch.compile(grad(self.loss(call), (0, 1)), backend="aot_eager")
        return tuple(g.detach() for g in compiled(*self.leaves(dtype)))

    def vmap(self, call: Call, dtype: torch.dtype) -> Tensors:
        return (vmap(call, (0, None))(self.x.to(dtype), self.weight.to(dtype)),)

    def vmap_of_func_grad(self, call: Call, dtype: torch.dtype) -> Tensors:
        batched = vmap(grad(self.loss(call), (0, 1)), (0, None))
        return batched(self.x.to(dtype), self.weight.to(dtype))

    def compile_of_vmap_of_func_grad(self, call: Call, dtype: torch.dtype) -> Tensors:
        batched = torch.compile(vmap(grad(self.loss(call), (0, 1)), (0, None)), backend="aot_eager")
        return batched(self.x.to(dtype), self.weight.to(dtype))

    def func_grad_of_vmap(self, call: Call, dtype: torch.dtype) -> Tensors:
        weight = self.weight.to(dtype)
        batched = vmap(self.loss(call), (0, None))
        return (grad(lambda x: batched(x, weight).sum())(self.x.to(dtype)),)

    def func_grad_of_vjp_primal(self, call: Call, dtype: torch.dtype) -> Tensors:
        weight = self.weight.to(dtype)
        primal = lambda x: torch.func.vjp(lambda x: self.loss(call)(x, weight), x)[0]  # noqa: E731
        return (grad(primal)(self.x[0].to(dtype)),)

    def second_order(self, call: Call, dtype: torch.dtype) -> Tensors:
        x, weight = self.leaves(dtype)
        first = torch.autograd.grad(self.loss(call)(x, weight), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    def func_second_order(self, call: Call, dtype: torch.dtype) -> Tensors:
        weight = self.weight.to(dtype)
        inner = grad(lambda x: self.loss(call)(x, weight))
        return (grad(lambda x: inner(x).square().sum())(self.x[0].to(dtype)),)

    def func_jvp(self, call: Call, dtype: torch.dtype) -> Tensors:
        x, weight = self.x[0].to(dtype), self.weight.to(dtype)
        return torch.func.jvp(lambda x: call(x, weight), (x,), (self.dy.to(dtype),))

    def compile_of_func_jvp(self, call: Call, dtype: torch.dtype) -> Tensors:
        return torch.compile(lambda: self.func_jvp(call, dtype), backend="aot_eager")()

    def forward_mode(self, call: Call, dtype: torch.dtype) -> Tensors:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(self.x[0].to(dtype), self.dy.to(dtype))
            primal, tangent = forward_ad.unpack_dual(call(x, self.weight.to(dtype)))
            return primal, torch.zeros_like(primal) if tangent is None else tangent

    def cuda_graph(self, call: Call, dtype: torch.dtype) -> Tensors:
        x, weight = self.leaves(dtype)
        step = lambda: torch.autograd.grad(self.loss(call)(x, weight), (x, weight))  # noqa: E731
        if dtype == torch.float64:
            return step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        return captured

    def names(self) -> list[str]:
        if INTERPRETED:
            return [
                "eager",
                "compile_aot_eager",
                "func_grad",
                "compile_of_func_grad",
                "forward_mode",
            ]
        skipped = {"loss", "leaves", "first_order", "names", "outcome", "opcheck", "autocast"}
        skipped |= set() if self.device == "cuda" else {"cuda_graph"}
        return [n for n in vars(Checks) if not n.startswith("_") and n not in skipped]

    def outcome(self, call: Call, name: str) -> str:
        """Right when the error against fp64 is at most twice the plain formula's plus two ulp."""
        torch._dynamo.reset()
        check = getattr(self, name)
        truth, allowed = check(plain_formula, torch.float64), check(plain_formula, torch.float32)
        got = check(call, torch.float32)
        for true, plain, ours in zip(truth, allowed, got, strict=True):
            ulp = torch.finfo(torch.float32).eps * true.abs().max()
            bound = 2 * (plain.double() - true).abs().max() + 2 * ulp
            error = (ours.double() - true).abs().max()
            if not error <= bound:
                return f"WRONG: error {error:.1e} of {true.abs().max():.1e}"
        return "right"

    def opcheck(self, overload: Any, *args: Any) -> str:
        failed = []
        for test in OPCHECKS:
            try:
                torch.library.opcheck(overload, args, test_utils=test)
            except Exception as error:
                failed.append(f"{test}: {first_line(error)}")
        return "; ".join(failed) or "right"

    def autocast(self, call: Call) -> str:
        """The rule of a norm that follows the autocast dtype, written in the public function."""

        def public(x: Tensor, weight: Tensor) -> Tensor:
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            return call(x, weight.to(x.dtype))

        for function in (public, torch.compile(public, fullgraph=True, backend="aot_eager")):
            x, weight = self.leaves(torch.float32)
            with torch.autocast(self.device, torch.bfloat16):
                y = function(x, weight)
            y.sum().backward()
            if y.dtype != torch.bfloat16 or x.grad is None or x.grad.dtype != torch.float32:
                return f"WRONG: output {y.dtype}"
        return "right"


def capabilities(style: Style, checks: Checks) -> Any:
    for name in checks.names():
        yield name.replace("_", " "), lambda name=name: checks.outcome(style.call, name)
    x, weight = checks.leaves(torch.float32)
    if not style.ops_are_differentiable:
        x, weight = x.detach(), weight.detach()
    rstd = op.reference_forward(x, weight, EPS)[1].detach()
    yield "opcheck forward", lambda: checks.opcheck(style.forward, x, weight, EPS)
    operands = (checks.dy, x.detach(), weight.detach(), rstd)
    yield "opcheck backward", lambda: checks.opcheck(style.backward, *operands)
    if not INTERPRETED:
        yield "autocast", lambda: checks.autocast(style.call)


def study(only: str, costs: bool) -> list[tuple[str, ...]]:
    device = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
    checks, rows = Checks(device), []

    def record(style: str, check: str, run: Callable[[], str | float]) -> None:
        try:
            result = run()
        except Exception as error:
            result = f"raises: {first_line(error)}"
        measured = isinstance(result, float)
        row = ("measured", f"{result:.2f}") if measured else (result, "")
        rows.append((style, check, device, *row))

    def record_costs(style: str, call_over: Callable[[Raw], Call]) -> None:
        """What is left of a call when the raw ops only allocate; on CUDA the whole call too."""
        settings = [("2x8 allocation only", ALLOCATE, (2, 8), torch.float32)]
        if device == "cuda":
            settings.append(("1024x1024 bf16", KERNELS, (1024, 1024), torch.bfloat16))
        for prefix, raw, shape, dtype in settings:
            for name in CALLS if style != "unregistered function" else CALLS[:1]:
                run = functools.partial(call_cost, call_over(raw), name, device, shape, dtype)
                record(style, f"{prefix}: {name}", run)

    for number, (name, build) in enumerate(STYLES.items()):
        if only not in name:
            continue
        registered = functools.cache(functools.partial(register, build, number))
        record(name, "registers", lambda r=registered: "right" if r(KERNELS) else "nothing")
        if rows[-1][3] != "right":
            continue
        for check, run in capabilities(registered(KERNELS), checks):
            record(name, f"interpreter: {check}" if INTERPRETED else check, run)
        if costs:
            record_costs(name, lambda raw, r=registered: r(raw).call)
    if costs:
        record_costs("unregistered Function", styles.unregistered_differentiable)
        record_costs("unregistered function", styles.unregistered)
        record_costs("F.rms_norm", lambda raw: lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS))
        if device == "cuda":
            for name, step in launch_steps().items():
                record("Triton", name, functools.partial(microseconds, step))
    return rows


def register(build: Callable[[str, Raw], Style], number: int, raw: Raw) -> Style:
    kind = "kernels" if raw is KERNELS else "allocate"
    return build(f"registration_study_{number}_{kind}", raw)


def interpreted(only: str) -> list[tuple[str, ...]]:
    """The same study in a process of its own, because triton reads the switch when imported."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.csv"
        command = [sys.executable, __file__, "--out", str(out), "--only", only, "--no-costs"]
        subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
        with out.open(newline="") as file:
            return [tuple(row) for row in csv.reader(file)][1:]


def main(
    out: Annotated[Path, typer.Option(help="The CSV file to write.")],
    only: Annotated[str, typer.Option(help="Only styles whose name contains this.")] = "",
    costs: Annotated[bool, typer.Option(help="Also time the calls.")] = True,
) -> None:
    """Run the comparison, print it, and write its rows."""
    warnings.filterwarnings("ignore")
    rows = study(only, costs)
    if not INTERPRETED:
        try:
            rows += interpreted(only)
        except subprocess.CalledProcessError as error:
            rows.append(("all", "interpreter", "cpu", f"raises: {first_line(error)}", ""))
    with out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    if not INTERPRETED:
        table = Table("check", "style", "result")
        order = list(dict.fromkeys(row[1] for row in rows))
        for row in sorted(rows, key=lambda row: order.index(row[1])):
            table.add_row(row[1], row[0], row[4] or row[3])
        rich.print(table)


if __name__ == "__main__":
    typer.run(main)
