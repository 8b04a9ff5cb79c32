"""How an op of this package is registered with torch: the idiom of docs/decisions/0001, the same in
every package.

An op is defined in the package's torch.library namespace with an implementation for CUDA (the
launcher), for the CPU (the reference, or the interpreted launcher) and for fake tensors. Its
derivative is its Autograd kernel, so the compiler and the torch.func transforms see one opaque op
that knows how to differentiate itself. A plain eager call skips the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import (
    _any_requires_grad,
    _are_functorch_transforms_active,
    _has_storage,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ._backends import interpreted, without_autocast

__all__ = ["Derivative", "Op", "empty_grad", "second_order"]

NAMESPACE = "fusewright_deltanet"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
TENSORS = (torch.Tensor, torch.nn.Parameter)


class Derivative(_SingleLevelFunction):
    """An autograd.Function for one torch.func level, the one that its Autograd kernel runs at."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        # Compiled autograd tells Functions apart by this; torch gives it to full Functions only.
        return (ctx._autograd_function_id,)


class Op:
    """A registered op, called like a function.

    Args:
        signature: name and types as torch.library writes them, such as ``"f(Tensor x, float eps) ->
            Tensor"``.
        triton: the launcher.
        reference: the same op, saved statistics included, in plain torch.
        fake: allocates the outputs.
        untracked: the launcher for an eager call that no gradient passes through; it may return
            None for an output that only the derivative needs. ``triton`` where left out.
    """

    # The derivative; torch's stubs do not know that it has apply.
    function: Any

    def __init__(
        self,
        signature: str,
        *,
        triton: Callable,
        reference: Callable,
        fake: Callable,
        untracked: Callable | None = None,
    ):
        name = signature.partition("(")[0]
        LIBRARY.define(signature)
        # The operands stand first in every signature.
        self.operands = signature.partition(") ->")[0].count("Tensor")
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self.on_cuda, self.on_cpu = triton, triton if interpreted() else reference
        self.untracked = {True: untracked or triton, False: self.on_cpu}
        LIBRARY.impl(name, self.on_cuda, "CUDA")
        LIBRARY.impl(name, self.on_cpu, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        torch.library.register_vmap(self.overload, one_sample_at_a_time(self.overload), lib=LIBRARY)

    def derivative(self, function: type[Derivative]) -> type[Derivative]:
        """Class decorator: the op's derivative. Its forward gets, before the op's arguments, what
        computes the outputs.
        """
        self.function = function
        LIBRARY.impl(self.overload.name().partition("::")[2], self.autograd, "Autograd")
        return function

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or not plain(args[: self.operands]):
            return self.overload(*args)
        on_cuda = args[0].is_cuda
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return self.function.apply(self.on_cuda if on_cuda else self.on_cpu, *args)
        return self.untracked[on_cuda](*args)

    def statistics(self, ctx: Any, run: Callable, *found: torch.Tensor) -> tuple:
        """What the derivative's forward returns of its saved statistics, which nobody may
        differentiate.

        Only the registered op must show them; autograd would wrap them for nothing in a direct
        call.
        """
        if run is self.on_cuda or run is self.on_cpu:
            return (None,) * len(found)
        ctx.mark_non_differentiable(*found)
        return found

    def autograd(self, *args: Any) -> Any:
        """The op's Autograd kernel; under a torch.func transform it runs once at each level that
        differentiates.
        """
        if not records_gradients(args):
            return self.below_autograd(*args)
        if not _are_functorch_transforms_active():
            return self.function.apply(self.below_autograd, *args)
        with enable_single_level_autograd_function():
            return self.function.apply(self.below_autograd, *args)

    def below_autograd(self, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            if not _are_functorch_transforms_active():
                return self.overload(*args)
            # A Function's forward runs without recording, but the levels further out have yet to
            # record theirs, and a forward-mode one to raise.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return self.overload(*args)


def plain(operands: Sequence[Any]) -> bool:
    """Whether nothing watches a call and raw memory holds its operands: no transform, mode, tracer
    or forward-mode level, no tensor subclass, no wrapper that outlived its transform, no pending
    negation.
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


def records_gradients(args: Sequence[Any]) -> bool:
    """Whether autograd wants this call. Forward mode always does: there the derivative raises where
    a tangent arrives.
    """
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and _any_requires_grad(*args)


def one_sample_at_a_time(overload: Callable) -> Callable:
    """A vmap rule that is right for every op: call it for each sample and stack the results."""

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        def sample(index: int) -> tuple:
            return tuple(
                arg if dim is None else arg.select(dim, index)
                for arg, dim in zip(args, in_dims, strict=True)
            )

        if not info.batch_size:
            # Only the shapes are wanted: of one sample, which is made up.
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
    """What a backward op returns for a gradient that nobody asked for: an op cannot return None."""
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
        found = iter(pullback(filled))
    return [None if x is None else next(found) for x in inputs]
