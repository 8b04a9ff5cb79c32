"""Kernels compiled side by side, before the first call that needs them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from .backends import has_triton, interpreted
from .checks import checked_count
from .internals import launch_hooks
from .launches import Wanted, compilations, compile_side_by_side, compiling
from .registration import OPS

Tensor = torch.Tensor

# Held while the launchers of this package's ops are replaced.
LOCK = threading.RLock()
# Every package has its own copy of this module, as has a build that is imported beside the package,
# whose name begins with the package's namespace.
COPIES = re.compile(r"(fusewright\.\w+|_fusewright_\w+)\._core\.warming")


def warm_up(
    function: Callable[..., object],
    *inputs: Any,
    backward: bool = True,
    threads: int | None = None,
) -> int:
    """Compile the kernels that ``function(*inputs)`` launches, and those of its backward pass, side
    by side, so that the first real call compiles nothing.

    The function, a model or any other callable, is called once, and the gradients of its outputs
    are computed as autograd would for ``backward()``. Every kernel of every package of this family
    that is imported is compiled instead of launched: into Triton's cache, where later processes
    find it too, and loaded by this one. What torch itself computes is computed.

    No number that comes of it is of any use: the packages' functions return zeros meanwhile. So
    nothing is returned but a count, gradients are not accumulated, and random number generators
    and a module's buffers are afterwards as they were. What else torch changes in the function it
    changes here too, such as the parameters in a step of one of its own optimizers. Other threads
    compute as ever.

    Kernels depend on dtypes, widths and layouts, some on divisibility and on how many programs
    there are: the inputs are best those of a real call. On a machine without GPU or Triton there is
    nothing to compile. Of a function that computes on several GPUs, the kernels of the first one
    are compiled.

    Args:
        function: what is going to be called, such as a model or its method ``loss``, under the same
            grad mode, autocast and precision.
        inputs: its positional arguments, on the device of the real call.
        backward: whether to compile the backward pass of outputs that require a gradient. They are
            looked for in tuples, lists, mappings and dataclasses.
        threads: how many kernels are compiled at one time; as many as there are processors where
            left out.

    Checkpointing with ``use_reentrant=True`` takes no gradients of single tensors, and so no
    ``backward`` here.

    Returns:
        How many kernels the call and its backward pass launch, those that were compiled before
        included.

    Raises:
        TypeError: ``function`` cannot be called, or ``threads`` is no whole number.
        ValueError: ``threads`` is less than 1.
        Exception: what the function itself raises, and what Triton raises of a kernel.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    if threads is not None:
        threads = checked_count("threads", threads)
    if not has_triton():
        return 0
    wanted: list[Wanted] = []

    def run() -> None:
        with contextlib.ExitStack() as stack:
            # Repeated launches pass Triton by, but where a hook wants to be told of them.
            for copy in copies():
                stack.enter_context(copy.compiled_only(wanted))
            stack.enter_context(told_of_launches())
            stack.enter_context(kept_buffers(function))
            gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
            stack.enter_context(torch.random.fork_rng(range(gpus)))
            # Backward passes launch in this thread too.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            outputs = [y for y in tensors_in(function(*inputs)) if y.requires_grad]
            if backward:
                compute_gradients([y for y in outputs if y.grad_fn is not None])

    # Triton's pool is active to the end of a context.
    return contextvars.copy_context().run(compile_side_by_side, run, wanted, threads)


def copies() -> list[ModuleType]:
    """This module, of every package that is imported: in one order, in which they are locked."""
    return [module for name, module in sorted(sys.modules.items()) if COPIES.fullmatch(name)]


@contextlib.contextmanager
def compiled_only(wanted: list[Wanted]) -> Iterator[None]:
    """In this thread, launches of this package are compiled only, and its ops return zeros."""
    with LOCK, compilations(wanted):
        before = [(op, op.on_cuda, op.on_cpu, op.inference) for op in OPS]
        try:
            for op, on_cuda, on_cpu, inference in before:
                op.on_cuda = zeros_of(on_cuda)
                op.on_cpu = op.on_cuda if interpreted() else on_cpu
                op.inference = {True: zeros_of(inference[True]), False: op.on_cpu}
            yield
        finally:
            for op, on_cuda, on_cpu, inference in before:
                op.on_cuda, op.on_cpu, op.inference = on_cuda, on_cpu, inference


def zeros_of(launcher: Callable) -> Callable:
    """The launcher, with zeros for what its kernels have not written: indices, too, that torch
    would follow. An operand that it returns keeps its numbers.
    """

    def memory_of(x: Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def launch(*args: Any) -> Any:
        outputs = launcher(*args)
        if compiling.wanted is not None:
            kept = {memory_of(x) for x in tensors_in(args)}
            for output in tensors_in(outputs):
                if memory_of(output) not in kept:
                    output.zero_()
        return outputs

    return launch


@contextlib.contextmanager
def told_of_launches() -> Iterator[None]:
    """Every launch, of whatever thread, goes through Triton's dispatch."""

    def nothing(metadata: Any) -> None:
        pass

    hooks = launch_hooks()
    if hooks is None:
        yield
        return
    hooks[0].add(nothing)
    try:
        yield
    finally:
        hooks[0].remove(nothing)


@contextlib.contextmanager
def kept_buffers(function: Callable) -> Iterator[None]:
    """The buffers of a module, or of that whose method it is, are afterwards what they were."""
    owner = getattr(function, "__self__", function)
    modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else []
    before = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                # To numbers that several elements share nothing can have been written.
                if not is_expanded(buffer):
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(value)
                setattr(module, name, buffer)


def is_expanded(x: Tensor) -> bool:
    if x.layout != torch.strided:
        return False
    return any(size > 1 and not step for size, step in zip(x.shape, x.stride(), strict=True))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an output."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for part in parts:
        yield from tensors_in(part)


def compute_gradients(outputs: list[Tensor]) -> None:
    """Of all tensors that autograd would accumulate gradients of."""
    leaves = list(leaves_of(outputs))
    if leaves:
        upstream = [torch.zeros_like(y) for y in outputs]
        torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)


def leaves_of(outputs: list[Tensor]) -> Iterator[Tensor]:
    """The leaves of the graph that autograd has recorded of these outputs."""
    nodes: list[Any] = [y.grad_fn for y in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
