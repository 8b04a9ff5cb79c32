"""How an op is registered with torch: the idiom of docs/decisions/0001.

An op is defined in its package's torch.library namespace with an implementation for CUDA (the
launcher), for the CPU (the reference, or the interpreted launcher) and for fake tensors. Its
derivative is its Autograd kernel, so the compiler and the torch.func transforms see one opaque op
that has its own derivative. A plain eager call skips the dispatcher.

Where a private name of torch is missing that this takes (``internals``), an op is called through
the dispatcher and its derivative is an ordinary autograd.Function around that call: eager,
autograd and torch.compile work as before, torch.func's transforms of the kernels raise.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .backends import interpreted
from .internals import FOUND, REGISTERS_AUTOGRAD
from .launches import current_device
from .precision import without_autocast

__all__ = ["Derivative", "Op", "apply", "empty_grad", "second_order"]

# "fusewright.norm._core" registers into "fusewright_norm".
NAMESPACE = __package__.rpartition(".")[0].replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# Every op of the package.
OPS: list[Op] = []
TENSORS = (torch.Tensor, torch.nn.Parameter)

_any_requires_grad = FOUND["_any_requires_grad"]
_are_functorch_transforms_active = FOUND["_are_functorch_transforms_active"]
_has_storage = FOUND["_has_storage"]
_is_tracing = FOUND["_is_tracing"]
_len_torch_dispatch_stack = FOUND["_len_torch_dispatch_stack"]
_len_torch_function_stack = FOUND["_len_torch_function_stack"]
Function: Any = FOUND["_SingleLevelFunction"] if REGISTERS_AUTOGRAD else torch.autograd.Function


class Derivative(Function):
    """An autograd.Function for one torch.func level, the one that its Autograd kernel runs at."""

    if REGISTERS_AUTOGRAD:

        @staticmethod
        def _compiled_autograd_key(ctx: Any) -> tuple[int]:
            # Compiled autograd distinguishes Functions by this; torch gives it to full Functions
            # only.
            return (ctx._autograd_function_id,)


class Op:
    """A registered op, called like a function.

    Args:
        signature: name and types as torch.library writes them, such as ``"f(Tensor x, float eps) ->
            Tensor"``.
        triton: the launcher, called with the first operand's device as the current one.
        reference: the same op, saved statistics included, in plain torch.
        fake: allocates the outputs.
        inference: the launcher for an eager call without gradients; it may return None for an
            output that only the derivative needs. ``triton`` where left out.
    """

    # The derivative; torch's stubs do not know that it has apply.
    function: Any = None

    def __init__(
        self,
        signature: str,
        *,
        triton: Callable,
        reference: Callable,
        fake: Callable,
        inference: Callable | None = None,
    ):
        name = signature.partition("(")[0]
        LIBRARY.define(signature)
        # The operands stand first in every signature.
        self.names = re.findall(r"Tensor\S*\s+(\w+)", signature.partition(") ->")[0])
        self.operands = len(self.names)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self.reference = reference
        self.on_cuda, self.on_cpu = triton, triton if interpreted() else reference
        self.inference = {True: inference or triton, False: self.on_cpu}
        LIBRARY.impl(name, self.launched, "CUDA")
        LIBRARY.impl(name, self.on_cpu, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        torch.library.register_vmap(self.overload, one_sample_at_a_time(self.overload), lib=LIBRARY)
        OPS.append(self)

    def derivative(self, function: type[Derivative]) -> type[Derivative]:
        """Class decorator: the op's derivative. Its forward gets, before the op's arguments, the
        function that computes the outputs.
        """
        self.function = function
        if REGISTERS_AUTOGRAD:
            LIBRARY.impl(self.overload.name().partition("::")[2], self.autograd, "Autograd")
        return function

    def derivative_of_reference(self, *unread: str) -> None:
        """Give the op, itself a derivative, the derivative of its reference, in plain torch.

        ``unread`` are operands that the reference does not read, since they follow from the others:
        they are not saved and get no gradient.
        """
        is_read = [name not in unread for name in self.names]
        reference = self.reference

        class SecondDerivative(Derivative):
            @staticmethod
            def forward(ctx, run, *args):
                ctx.save_for_backward(*itertools.compress(args, is_read))
                ctx.options = args[len(is_read) :]
                return run(*args)

            @staticmethod
            def backward(ctx, *cotangents):
                saved = iter(ctx.saved_tensors)
                operands = [next(saved) if read else None for read in is_read]
                inputs = [x if x is not None and x.is_floating_point() else None for x in operands]

                def backward(*inputs):
                    pairs = zip(inputs, operands, strict=True)
                    given = [operand if x is None else x for x, operand in pairs]
                    outputs = reference(*given, *ctx.options)
                    return outputs if isinstance(outputs, tuple) else (outputs,)

                grads = second_order(backward, inputs, cotangents)
                return None, *grads, *(None for _ in ctx.options)

        self.derivative(SecondDerivative)

    def launched(self, *args: Any) -> Any:
        """The launcher on the first operand's device, for a call through the dispatcher."""
        device = args[0].device
        if device.index == current_device():
            return self.on_cuda(*args)
        with torch.cuda.device(device):
            return self.on_cuda(*args)

    def __call__(self, *args: Any) -> Any:
        if not REGISTERS_AUTOGRAD:
            return self.dispatched(args)
        if torch.compiler.is_compiling() or not is_plain_call(args[: self.operands]):
            return self.overload(*args)
        on_cuda = args[0].is_cuda
        if on_cuda and args[0].device.index != current_device():
            with torch.cuda.device(args[0].device):
                return self(*args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return self.function.apply(self.on_cuda if on_cuda else self.on_cpu, *args)
        return self.inference[on_cuda](*args)

    def dispatched(self, args: Sequence[Any]) -> Any:
        """A call through the dispatcher, for an op that is not its own Autograd kernel."""
        if self.function is not None and needs_derivative(args):
            return self.function.apply(self.overload, *args)
        return self.overload(*args)

    def statistics(self, ctx: Any, run: Callable, *saved: torch.Tensor) -> tuple:
        """What the derivative's forward returns for its saved statistics, which have no derivative.

        Only the registered op has to return them; in a direct call autograd would wrap them for
        nothing.
        """
        if run is self.on_cuda or run is self.on_cpu:
            return (None,) * len(saved)
        ctx.mark_non_differentiable(*saved)
        return saved

    def autograd(self, *args: Any) -> Any:
        """The op's Autograd kernel; under a torch.func transform it runs once at each level that
        differentiates.
        """
        if not records_gradients(args):
            return self.below_autograd(*args)
        if not _are_functorch_transforms_active():
            return self.function.apply(self.below_autograd, *args)
        with FOUND["enable_single_level_autograd_function"]():
            return self.function.apply(self.below_autograd, *args)

    def below_autograd(self, *args: Any) -> Any:
        with FOUND["_AutoDispatchBelowAutograd"]():
            if not _are_functorch_transforms_active():
                return self.overload(*args)
            # A Function's forward runs without recording, but the levels further out have yet to
            # record theirs, and a forward-mode one to raise.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return self.overload(*args)


def is_plain_call(operands: Sequence[Any]) -> bool:
    """Whether a call may skip the dispatcher: no transform, mode, tracer or forward-mode level is
    active, and each operand has storage of its own, so is no tensor subclass, no wrapper that
    outlived its transform, and no pending negation.
    """
    for x in operands:
        if x is not None and (type(x) not in TENSORS or x.is_neg() or not _has_storage(x)):
            return False
    return (
        not _are_functorch_transforms_active()
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and not _is_tracing()
        and forward_ad._current_level < 0
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, for a function that sets up its context by itself, as torch.func wants
    it: torch then looks at its signature and binds the arguments to it, at each call. A plain call
    goes past that.
    """
    if not REGISTERS_AUTOGRAD or torch.compiler.is_compiling():
        return function.apply(*args)
    if not is_plain_call([x for x in args if isinstance(x, torch.Tensor)]):
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def records_gradients(args: Sequence[Any]) -> bool:
    """Whether autograd records this call. Forward mode always does: there the derivative raises
    where a tangent arrives.
    """
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and _any_requires_grad(*args)


def needs_derivative(args: Sequence[Any]) -> bool:
    """The same by public names, slower."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def one_sample_at_a_time(overload: Callable) -> Callable:
    """A vmap rule that is right for every op: call it for each sample and stack the results."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        def sample(index: int) -> tuple:
            return tuple(
                arg if dim is None else arg.select(dim, index)
                for arg, dim in zip(args, in_dims, strict=True)
            )

        if not info.batch_size:
            # Only the shapes matter: those of one sample of zeros.
            args = tuple(
                arg if dim is None else arg.new_zeros((*arg.shape[:dim], 1, *arg.shape[dim + 1 :]))
                for arg, dim in zip(args, in_dims, strict=True)
            )
        samples = [overload(*sample(index)) for index in range(max(info.batch_size, 1))]
        if isinstance(samples[0], torch.Tensor):
            return torch.stack(samples)[: info.batch_size], 0
        outputs = tuple(
            torch.stack(parts)[: info.batch_size] for parts in zip(*samples, strict=True)
        )
        return outputs, (0,) * len(outputs)

    return rule


def empty_grad(x: torch.Tensor) -> torch.Tensor:
    """What a backward op returns for a gradient that is not needed: an op cannot return None."""
    return x.new_empty(0)


def second_order(
    backward: Callable, inputs: Sequence[torch.Tensor | None], cotangents: Sequence
) -> list:
    """Gradients of ``inputs`` through a backward pass written in plain torch, in its own precision
    under autocast too; None for an input that is None.
    """
    present = [x for x in inputs if x is not None]

    def of_present(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(tensors)
        return backward(*(None if x is None else next(remaining) for x in inputs))

    with without_autocast(present[0].device):
        outputs, pullback = torch.func.vjp(of_present, *present)[:2]
        filled = tuple(
            torch.zeros_like(y) if g is None else g
            for y, g in zip(outputs, cotangents, strict=True)
        )
        gradients = iter(pullback(filled))
    return [None if x is None else next(gradients) for x in inputs]
