"""Compile kernels for GPUs that are not there, and read what the machine code takes.

A package's launchers are called on CPU tensors while every Triton launch is recorded instead of
run; each recorded launch is then compiled for the asked capability. What is compiled is thus what a
launcher really asks for. Triton must be imported without its interpreter, so tests run this in a
process of their own, and by hand it is ``python -m fusewright_testkit.compiled``.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import typer

from .fresh import run_python
from .machine_code import (
    FOLLOWED,
    listing,
    machine_code_usage,
    spills_in_loops,
    undefined_registers,
)

# Shared memory that one program may take, in KiB, by compute capability.
SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}
# What tests of no tier compile for: the GPU whose launches are measured. Tier slow compiles for
# all four.
QUICK = (90,)
# All four as parameters of one test.
GPUS = [
    capability if capability in QUICK else pytest.param(capability, marks=pytest.mark.slow)
    for capability in SHARED_KIB
]


class Resources(NamedTuple):
    """What one compiled kernel takes: registers of a thread, spilled bytes of a thread, shared
    memory in bytes. Of a Gluon kernel, whose warp groups hold from their beginning what they were
    handed, spills count in the loops of its products alone. ``undefined``: registers that are
    read and never written, looked for where a kernel for Hopper multiplies warp groups' tiles.
    """

    kernel: str
    options: str
    capability: int
    registers: int
    spilled: int
    shared: int
    undefined: tuple[str, ...] = ()


class Launch(NamedTuple):
    """One recorded launch: the jitted function and its arguments."""

    function: object
    args: tuple
    kwargs: dict


class Driver:
    """Stands for the driver of a GPU that is not there: Triton compiles for it, loads nothing, and
    instead of launching a kernel appends its name to ``ran``.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.ran: list[str] = []
        # What Triton asks when it loads a kernel.
        self.utils = self

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple:
        """Module, function, registers, spills and most threads."""
        return name, name, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_KIB[self.capability] << 10}

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *args: self.ran.append(args[4])

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record Triton launches instead of running them."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(self, *args, grid, warmup, **kwargs):
        launches.append(Launch(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile one recorded launch for a compute capability, such as 90, and read its machine
    code.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    function = launch.function
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, _ = bind(*launch.args, **launch.kwargs)
    options, signature, constants, attributes = function._pack_args(
        backend, launch.kwargs, bound, specialization, None
    )
    source_of = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_of
    source = source_of(function, signature, constants, attributes)
    kernel = triton.compile(source, target=target, options=options.__dict__)
    cubin = kernel.asm["cubin"]
    registers, spilled = machine_code_usage(cubin)
    undefined: tuple[str, ...] = ()
    if capability == FOLLOWED and "wgmma" in kernel.asm["ptx"]:
        text = listing(cubin)
        undefined = undefined_registers(text)
        if function.is_gluon():
            spilled = spills_in_loops(text)
    flags = {k: v for k, v in launch.kwargs.items() if isinstance(v, (bool, int))}
    described = " ".join(f"{k}={v}" for k, v in flags.items() if v is not False)
    return Resources(
        function.fn.__name__,
        described,
        capability,
        registers,
        spilled,
        kernel.metadata.shared,
        undefined,
    )


def compiled_in_a_process(
    folder: pathlib.Path, launches: str, capability: int, *, may_spill: bool = False
) -> str:
    """Compile what a function of ``folder``'s module ``launches`` launches for a compute capability
    in a process whose triton is not the interpreter, and return what ``main`` prints.

    The module finds the GPU in the environment: FUSEWRIGHT_CAPABILITY, such as 90, and
    FUSEWRIGHT_SHARED_KIB.

    Raises:
        AssertionError: a kernel takes more shared memory than there is, reads a register that
            nothing has written or, unless it may, spills.
    """
    return run_python(
        f"{as_on_a_gpu(folder, capability)}"
        "from fusewright_testkit.compiled import main\n"
        f"main({f'launches:{launches}'!r}, [{capability}], check=True, may_spill={may_spill})\n"
    )


def as_on_a_gpu(folder: pathlib.Path, capability: int) -> str:
    """The first lines of a program that imports ``folder``'s module ``launches`` for a GPU."""
    return (
        "import os, sys\n"
        "os.environ.pop('TRITON_INTERPRET', None)\n"
        f"os.environ['FUSEWRIGHT_CAPABILITY'] = '{capability}'\n"
        f"os.environ['FUSEWRIGHT_SHARED_KIB'] = '{SHARED_KIB[capability]}'\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
    )


class Watched(tuple):
    """A launch table that notes the lines at which a search for the first that serves has ended."""

    taken: ClassVar[set[int]] = set()

    def __iter__(self) -> Iterator[Any]:
        for line in super().__iter__():
            try:
                yield line
            except GeneratorExit:
                self.taken.add(id(line))
                raise


def untaken_lines(launches: str) -> list[str]:
    """The lines of the launch tables of a package that a function of its module ``launches`` does
    not take on the GPU that the module finds in the environment. Nothing is compiled.
    """
    launch_all = getattr(importlib.import_module("launches"), launches)
    lines: dict[int, str] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("fusewright.") and ".launch" in module_name:
            for name, table in list(vars(module).items()):
                if name.isupper() and type(table) is tuple and all(map(is_line, table)):
                    setattr(module, name, Watched(table))
                    lines |= {id(line): f"{module_name} {name}: {line}" for line in table}
    with recorded_launches():
        launch_all()
    assert Watched.taken, "no table was searched"
    return [text for line, text in lines.items() if line not in Watched.taken]


def is_line(x: object) -> bool:
    """Whether this is a line of a table: numbers by name."""
    return isinstance(x, tuple) and hasattr(x, "_fields")


def main(
    launches: str = typer.Argument(help="module:function whose calls launch the kernels"),
    capability: list[int] = typer.Option([90], help="compute capability, such as 90; repeatable"),
    check: bool = typer.Option(
        False, help="fail on a spill, on too much shared memory or on an undefined register"
    ),
    may_spill: bool = typer.Option(False, help="do not fail on a spill"),
) -> None:
    """Compile what FUNCTION launches and print what each kernel takes."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("unset TRITON_INTERPRET: the interpreter compiles nothing")
    module, name = launches.split(":")
    launch_all: Callable[[], None] = getattr(importlib.import_module(module), name)
    with recorded_launches() as recorded:
        launch_all()
    failed = False
    for target in capability:
        for launch in recorded:
            found = compile_launch(launch, target)
            spills = found.spilled > 0 and not may_spill
            over = found.shared > SHARED_KIB[target] * 1024
            fails = spills or over or bool(found.undefined)
            failed |= fails
            undefined = f"undefined={','.join(found.undefined)} " if found.undefined else ""
            print(
                f"sm_{target} {found.kernel} registers={found.registers} spilled={found.spilled} "
                f"shared={found.shared} {undefined}{found.options}{' FAILED' if fails else ''}"
            )
    if not recorded:
        raise typer.BadParameter(f"{launches} launched no kernel")
    if check and failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
