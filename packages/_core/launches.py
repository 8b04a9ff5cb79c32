"""Launches that are planned once for each kind of call and then repeated cheaply.

Triton's own dispatch inspects every argument of every call, which takes the host longer than a
small kernel takes the GPU. Here everything but the tensors and the floats is fixed when a plan is
made, so a repeated call goes straight to the compiled kernel.

A plan is kept under a key of everything that it depends on: shapes, options, device, and the
``layouts`` of all operands, their dtypes, strides and absences.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .internals import FOUND, build_launcher, can_rerun, compiles_in, launch_hooks
from .lazy import lazy_module

if TYPE_CHECKING:
    from . import kernels_gluon
else:
    kernels_gluon = lazy_module(__package__, "kernels_gluon")

Layout = tuple[torch.dtype, tuple[int, ...]]
Allocator = Callable[[], torch.Tensor]
Operands = tuple[torch.Tensor | None, ...]

_current_stream: Any = FOUND.get("_cuda_getCurrentRawStream")
current_device: Any = FOUND.get("_cuda_getDevice") or torch.cuda.current_device


class Wanted(NamedTuple):
    """A kernel as Triton gives it, which a pool may still be compiling, and the index of the device
    that it is compiled for.
    """

    kernel: Any
    device_index: int | None


class Compiling(threading.local):
    """What the launches of a thread compile instead of running; None where they run."""

    wanted: list[Wanted] | None = None


compiling = Compiling()


class Launch:
    """One launch of a kernel whose parameters are, in this order: tensor descriptors, tensors,
    floats, integers, constants.

    A launch serves tensors of the dtypes, and integers of the values, that it was made for, on one
    device, which is the current one. Tensors that do not start at a multiple of 16 bytes, launches
    with hooks and the interpreter take Triton's own dispatch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        integers: tuple[int, ...],
        options: dict[str, int],
        **constants: Any,
    ) -> None:
        self.kernel, self.integers, self.constants = kernel, integers, constants
        self.options = options
        self.grid = (*grid, 1, 1)[:3]
        self.device_index = device.index
        self.tail = (*integers, *constants.values())
        hooks = launch_hooks()
        self.repeats = self.device_index is not None and bool(hooks and _current_stream)
        # Whether its kernel may still have to be compiled.
        self.is_first = self.repeats
        self.enter_hook: Any
        self.exit_hook: Any
        self.enter_hook, self.exit_hook = hooks or (None, None)
        # Triton's compiled kernel, from the first launch on.
        self.compiled: Any = None

    def __call__(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        floats: tuple[float, ...] = (),
        described: tuple[Any, ...] = (),
    ) -> None:
        if not self.repeats:
            self.dispatch((*described, *tensors), floats)
            return
        addresses: list[Any] = []
        bits = 0
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
            else:
                address = tensor.data_ptr()
                addresses.append(address)
                bits |= address
        if bits & 15 or self.enter_hook.calls or self.exit_hook.calls:
            self.dispatch((*described, *tensors), floats)
        elif self.compiled is None:
            self.keep(self.dispatch((*described, *tensors), floats))
        else:
            # The three None: no metadata for hooks, and no hooks.
            self.run(
                *self.grid,
                _current_stream(self.device_index),
                self.function,
                self.compiled.packed_metadata,
                None,
                None,
                None,
                *described,
                *addresses,
                *floats,
                *self.tail,
            )

    def dispatch(self, tensors: tuple[Any, ...], floats: tuple[float, ...]) -> Any:
        """Triton's own launch; returns the compiled kernel, None where it did not run."""
        if compiling.wanted is not None:
            self.compile(compiling.wanted, tensors, floats)
            return None
        return self.kernel[self.grid](
            *tensors, *floats, *self.integers, **self.constants, **self.options
        )

    def compile(self, wanted: list[Wanted], tensors: tuple, floats: tuple[float, ...]) -> None:
        """Have Triton compile the kernel for these operands, and append it to ``wanted``."""
        # A pool of Triton's takes equal kernels for one, also those of two devices, of which each
        # has to load its own.
        if wanted and wanted[0].device_index != self.device_index:
            return
        kernel = self.kernel.warmup(
            *tensors, *floats, *self.integers, grid=self.grid, **self.constants, **self.options
        )
        # The interpreter compiles none.
        if kernel is not None:
            wanted.append(Wanted(kernel, self.device_index))

    def keep(self, compiled: Any) -> None:
        """Launch this compiled kernel from now on."""
        if compiled is None:
            return
        if not can_rerun(compiled):
            self.repeats = False
            return
        self.run, self.function = compiled.run, compiled.function
        # Last: another thread that sees it finds the other two.
        self.compiled = compiled


class DescribedLaunch(Launch):
    """A launch whose first operands are read and written by tensor descriptors, each as its own
    function makes it: of tensors that have the same shape and strides at every call.
    """

    descriptors: tuple[Callable[[torch.Tensor], Any], ...]
    # The kinds and fields of those of the first call: to check them again takes the host longer.
    made: tuple[tuple[type, dict[str, Any]], ...] = ()

    def __call__(
        self,
        tensors: tuple[Any, ...],
        floats: tuple[float, ...] = (),
        described: tuple[Any, ...] = (),
    ) -> None:
        operands = tensors[: len(self.descriptors)]
        if not self.made:
            made = [describe(x) for describe, x in zip(self.descriptors, operands, strict=True)]
            # Not the tensors: a plan would hold their memory.
            self.made = tuple([(type(x), vars(x) | dict(base=None)) for x in made])
        others = [
            descriptor_of(base, kind, fields)
            for base, (kind, fields) in zip(operands, self.made, strict=True)
        ]
        super().__call__(tensors[len(others) :], floats, (*described, *others))


def in_tiles(
    rows: int, cols: int, *, swizzled: int = 128, bits: int = 16
) -> Callable[[torch.Tensor], Any]:
    """The descriptor of a matrix of numbers of so many bits in tiles of this size, of which so many
    bytes are swizzled.
    """

    def describe(x: torch.Tensor) -> Any:
        layout = kernels_gluon.gl.NVMMASharedLayout(swizzled, bits, rank=2)
        return kernels_gluon.TensorDescriptor(
            x, list(x.shape), list(x.stride()), [rows, cols], layout
        )

    return describe


def descriptor_of(base: torch.Tensor, kind: type, fields: dict[str, Any]) -> Any:
    """A tensor's descriptor with the fields of another, which are not checked again."""
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__ = {**fields, "base": base}
    return descriptor


class LaunchCall(NamedTuple):
    """A launch, and what it is called with."""

    launch: Launch
    tensors: Operands
    floats: tuple[float, ...] = ()


def launch_in_order(*calls: LaunchCall) -> None:
    """Launch one after the other. The first time their kernels are compiled side by side, which
    takes as long as the one that takes longest.
    """
    prepare(*calls)
    launch(calls)


def prepare(*calls: LaunchCall) -> None:
    """The first time, compile the kernels of these launches side by side."""
    if calls[0].launch.is_first:
        compile_first(calls)


def launch(calls: Sequence[LaunchCall]) -> None:
    for call in calls:
        call.launch(call.tensors, call.floats)


def compile_first(calls: Sequence[LaunchCall]) -> None:
    for call in calls:
        call.launch.is_first = False
    # Nothing may be loaded by another thread while this one captures a graph.
    if compiling.wanted is not None or torch.cuda.is_current_stream_capturing():
        return

    def run() -> None:
        with compilations(wanted):
            for call in calls:
                # Not as a call, which would run what another thread has compiled meanwhile.
                call.launch.dispatch(call.tensors, call.floats)

    wanted: list[Wanted] = []
    # Not in the caller's context, which may have a pool of its own.
    contextvars.Context().run(compile_side_by_side, run, wanted)


@contextlib.contextmanager
def compilations(wanted: list[Wanted]) -> Iterator[None]:
    """The launches of this thread and package compile their kernels, and run none."""
    before, compiling.wanted = compiling.wanted, wanted
    try:
        yield
    finally:
        compiling.wanted = before


def compile_side_by_side(
    run: Callable[[], object], wanted: list[Wanted], threads: int | None = None
) -> int:
    """Call ``run``, whose launches append to ``wanted`` what Triton then compiles in a pool of
    threads, as many as processors by default, and load the kernels. Returns how many they are.

    Where one does not compile, Triton's pool stays active in the context of this call.
    """
    # Threads are enough, docs/decisions/0019: what compiles holds no lock of Python's.
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        with compiles_in(pool):
            run()
        kernels = {Wanted(finished(x.kernel), x.device_index) for x in wanted}
        # All results are read: an error in a thread is raised here.
        list(pool.map(build_launcher, [x.kernel for x in kernels]))
    # In this thread, one after the other. All launchers of triton 3.6 are modules of one name, and
    # to import one again fills in the module that was imported last: of two threads, one would get
    # the launcher of the other's kernel.
    for kernel in kernels:
        load(kernel)
    return len(kernels)


def finished(kernel: Any) -> Any:
    """The kernel that a pool has compiled."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def load(wanted: Wanted) -> None:
    """Load a kernel onto its device, and make what launches it."""
    if wanted.device_index is not None:
        with torch.cuda.device(wanted.device_index):
            # Triton loads it when this is read first.
            getattr(wanted.kernel, "run", None)


class Plan(NamedTuple):
    """One call of a launcher: its launch, none where there is nothing to compute; which operands it
    copies first, empty for none; and the memory of its outputs, None for one that is absent.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    outputs: tuple[Allocator | None, ...]

    def run(self, operands: Sequence, floats: tuple[float, ...] = ()) -> tuple:
        """Allocate the outputs and launch; the kernel takes them behind the operands."""
        outputs: tuple[torch.Tensor | None, ...] = ()
        # No comprehension, whose call takes the host longer.
        for allocate in self.outputs:
            outputs += (None if allocate is None else allocate(),)
        if self.launch is not None:
            if self.copies:
                operands = contiguous_where(operands, self.copies)
            self.launch((*operands, *outputs), floats)
        return outputs


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Allocator:
    """What a plan calls for an output or an intermediate result: contiguous, on the current
    device.
    """
    empty = FOUND.get("_empty_strided_cuda" if device.type == "cuda" else "_empty_strided_cpu")
    if empty is None:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device)
    return functools.partial(empty, tuple(shape), contiguous_strides(shape), dtype)


def allocate(allocator: Allocator | None) -> torch.Tensor | None:
    """A tensor of a plan; None where it plans none."""
    return None if allocator is None else allocator()


def contiguous_where(operands: Sequence, copies: Sequence[bool]) -> tuple:
    """The operands, those that a plan copies as contiguous copies."""
    return tuple(
        x.contiguous() if copy and x is not None else x
        for x, copy in zip(operands, copies, strict=True)
    )


def is_current(device: torch.device) -> bool:
    """Whether plans for this device may run now: they allocate and launch on the current one."""
    # Of the devices that plans are made for, only a GPU has an index.
    return device.index is None or device.index == current_device()


def layouts(*tensors: torch.Tensor | None) -> tuple[Layout | None, ...]:
    """Dtype and strides of each tensor, None for one that is absent: a part of a plan's key."""
    return tuple([None if x is None else (x.dtype, x.stride()) for x in tensors])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cdiv(number: int, size: int) -> int:
    """How many blocks of ``size`` cover ``number``."""
    return -(-number // size)
