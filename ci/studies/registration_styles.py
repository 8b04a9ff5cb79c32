"""The styles that registration.py compares: one op, registered with torch in different ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from registration_op import (
    ALLOCATE,
    BACKWARD,
    EPS,
    FORWARD,
    INTERPRETED,
    Raw,
    allocate_backward,
    allocate_forward,
    backward_kernel,
    forward_kernel,
    reference_backward,
    triton_backward,
    triton_forward,
)
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction


class Style(NamedTuple):
    """rms_norm(x, weight) -> y, the registered raw ops, and whether these carry the derivative."""

    call: Callable[[Tensor, Tensor], Tensor]
    forward: Any
    backward: Any
    ops_are_differentiable: bool = True


def no_second_order(ctx: Any, *grads: Tensor | None) -> Any:
    raise RuntimeError("rms_norm: second derivatives are not implemented")


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ctx, dy, _: (*backward(dy, *ctx.saved_tensors), None)


def one_sample_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule that is right for every op: call it per sample and stack."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        samples = [
            call(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
        return outputs, (0,) * len(outputs)

    return rule


# Dynamo resolves a Function used in another one's backward only through a global.
FUNCTIONS: dict[str, Any] = {}


def function_over(namespace: str) -> Style:
    """Two autograd.Functions in setup_context form over the raw ops, which carry no derivative."""
    ops = getattr(torch.ops, namespace)
    forward_op, backward_op = ops.forward.default, ops.backward.default

    class RMSNormBackward(torch.autograd.Function):
        @staticmethod
        def forward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Any:
            return backward_op(dy, x, weight, rstd)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return one_sample_at_a_time(RMSNormBackward.apply)(info, in_dims, *args)

        backward = staticmethod(no_second_order)

    class RMSNorm(torch.autograd.Function):
        setup_context = staticmethod(save)

        @staticmethod
        def forward(x: Tensor, weight: Tensor, eps: float) -> Any:
            return forward_op(x, weight, eps)

        @staticmethod
        def backward(ctx: Any, dy: Tensor, _: None) -> Any:
            return (*FUNCTIONS[namespace].apply(dy, *ctx.saved_tensors), None)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return one_sample_at_a_time(RMSNorm.apply)(info, in_dims, *args)

    FUNCTIONS[namespace] = RMSNormBackward
    call = lambda x, weight: RMSNorm.apply(x, weight, EPS)[0]  # noqa: E731
    return Style(call, forward_op, backward_op, ops_are_differentiable=False)


def custom_op(name: str, schema: str, by_device: dict[str, Any], fake: Any) -> Any:
    op = torch.library.custom_op(
        name, by_device["CUDA"], mutates_args=(), device_types="cuda", schema=schema
    )
    op.register_kernel("cpu")(by_device["CPU"])
    op.register_fake(fake)
    return op


def custom_op_register_autograd(namespace: str, raw: Raw) -> Style:
    forward = custom_op(f"{namespace}::forward", FORWARD, raw.forward, allocate_forward)
    backward = custom_op(f"{namespace}::backward", BACKWARD, raw.backward, allocate_backward)
    forward.register_autograd(gradient(backward), setup_context=save)
    backward.register_autograd(no_second_order)
    return Style(lambda x, weight: forward(x, weight, EPS)[0], forward, backward)


def custom_op_function(namespace: str, raw: Raw) -> Style:
    custom_op(f"{namespace}::forward", FORWARD, raw.forward, allocate_forward)
    custom_op(f"{namespace}::backward", BACKWARD, raw.backward, allocate_backward)
    return function_over(namespace)


LIBRARIES: list[torch.library.Library] = []


def library_op(namespace: str, name: str, schema: str, by_device: Any, fake: Any) -> Any:
    library = torch.library.Library(namespace, "FRAGMENT")
    LIBRARIES.append(library)
    library.define(f"{name}{schema}")
    for key, implementation in by_device.items():
        library.impl(name, implementation, key)
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, namespace), name).default


def library_function(namespace: str, raw: Raw) -> Style:
    library_op(namespace, "forward", FORWARD, raw.forward, allocate_forward)
    library_op(namespace, "backward", BACKWARD, raw.backward, allocate_backward)
    return function_over(namespace)


def library_function_guarded(namespace: str, raw: Raw) -> Style:
    style = library_function(namespace, raw)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise RuntimeError("rms_norm: torch.compile over torch.func transforms is unsupported")
        return style.call(x, weight)

    return style._replace(call=call)


PLAIN = frozenset({Tensor, torch.nn.Parameter, float, int, bool, type(None)})


def untraced(args: tuple[Any, ...]) -> bool:
    """Nothing watches this call: no compiler, transform, mode, tracer or tensor subclass."""
    return (
        PLAIN.issuperset(map(type, args))
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._is_tracing()
        and forward_ad._current_level < 0
    )


def recorded(args: tuple[Any, ...]) -> bool:
    """Autograd wants this call; in forward mode Function.apply raises where a tangent arrives."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


class Op:
    """A registered op whose derivative is its Autograd kernel, callable like a function.

    Under a torch.func transform the Autograd kernel runs once per level. _SingleLevelFunction
    records the level at hand only; it also switches grad mode off, which would keep the levels
    further out from recording theirs, so `outer_levels` switches it on for the call below.
    """

    def __init__(
        self, overload: Any, by_device: dict[str, Any], fast: bool, outer_levels: bool
    ) -> None:
        self.overload, self.by_device = overload, by_device
        self.fast, self.outer_levels = fast, outer_levels

    def differentiate(self, function: Any) -> None:
        self.function = function
        namespace, name = self.overload.name().split("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        LIBRARIES.append(library)
        library.impl(name, self.autograd, "Autograd")
        rule = one_sample_at_a_time(self.overload)
        torch.library.register_vmap(self.overload, rule, lib=library)

    def __call__(self, *args: Any) -> Any:
        if not self.fast or torch.compiler.is_compiling() or not untraced(args):
            return self.overload(*args)
        implementation = self.by_device["CUDA" if args[0].is_cuda else "CPU"]
        if recorded(args):
            return self.function.apply(implementation, *args)
        return implementation(*args)

    def autograd(self, *args: Any) -> Any:
        if not recorded(args):
            return self.below(*args)
        if not torch._C._are_functorch_transforms_active():
            return self.function.apply(self.below, *args)
        with enable_single_level_autograd_function():
            return self.function.apply(self.below, *args)

    def below(self, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            if self.outer_levels and torch._C._are_functorch_transforms_active():
                with torch.enable_grad():
                    return self.overload(*args)
            return self.overload(*args)


def autograd_key(
    namespace: str,
    raw: Raw,
    base: Any = _SingleLevelFunction,
    outer_levels: bool = True,
    fast: bool = False,
    second_order: bool = False,
) -> Style:
    forward = library_op(namespace, "forward", FORWARD, raw.forward, allocate_forward)
    backward = library_op(namespace, "backward", BACKWARD, raw.backward, allocate_backward)
    rms_norm = Op(forward, raw.forward, fast, outer_levels)
    rms_norm_backward = Op(backward, raw.backward, fast, outer_levels)

    class RMSNorm(base):
        @staticmethod
        def forward(ctx: Any, run: Any, x: Tensor, weight: Tensor, eps: float) -> Any:
            y, rstd = run(x, weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            ctx.set_materialize_grads(False)
            if not second_order:
                ctx.mark_non_differentiable(rstd)
            return y, rstd

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, drstd: Tensor | None) -> Any:
            x, weight, rstd = ctx.saved_tensors
            dy = torch.zeros_like(x) if dy is None else dy
            dx, dweight = rms_norm_backward(dy, x, weight, rstd)
            if drstd is not None:
                dx = dx - x * (drstd * rstd**3 / x.shape[-1]).unsqueeze(-1)
            return None, dx, dweight, None

    class RMSNormBackward(base):
        @staticmethod
        def forward(ctx: Any, run: Any, *args: Tensor) -> Any:
            ctx.save_for_backward(*args)
            return run(*args)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> Any:
            if not second_order:
                no_second_order(ctx)
            return None, *torch.func.vjp(reference_backward, *ctx.saved_tensors)[1](cotangents)

    rms_norm.differentiate(RMSNorm)
    rms_norm_backward.differentiate(RMSNormBackward)
    return Style(lambda x, weight: rms_norm(x, weight, EPS)[0], forward, backward)


def triton_op(namespace: str, raw: Raw) -> Style:
    def forward_body(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if raw is ALLOCATE or (x.device.type == "cpu" and not INTERPRETED):
            return raw.forward["CPU"](x, weight, eps)
        return triton_forward(x, weight, eps, torch.library.wrap_triton(forward_kernel))

    def backward_body(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        if raw is ALLOCATE or (x.device.type == "cpu" and not INTERPRETED):
            return raw.backward["CPU"](dy, x, weight, rstd)
        wrapped = torch.library.wrap_triton(backward_kernel)
        return triton_backward(dy, x, weight, rstd, wrapped)

    forward = torch.library.triton_op(f"{namespace}::forward", forward_body, mutates_args=())
    backward = torch.library.triton_op(f"{namespace}::backward", backward_body, mutates_args=())
    forward.register_autograd(gradient(backward), setup_context=save)
    backward.register_autograd(no_second_order)
    return Style(lambda x, weight: forward(x, weight, EPS)[0], forward, backward)


def unregistered(raw: Raw) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: raw.forward["CUDA" if x.is_cuda else "CPU"](x, weight, EPS)[0]


def unregistered_differentiable(raw: Raw) -> Callable[[Tensor, Tensor], Tensor]:
    """An autograd.Function alone: the least that a differentiable call from Python costs."""

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            y, rstd = raw.forward["CUDA" if x.is_cuda else "CPU"](x, weight, EPS)
            ctx.save_for_backward(x, weight, rstd)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return raw.backward["CUDA" if dy.is_cuda else "CPU"](dy, *ctx.saved_tensors)

    return RMSNorm.apply


STYLES: dict[str, Callable[[str, Raw], Style]] = {
    "custom_op + register_autograd": custom_op_register_autograd,
    "custom_op + Function": custom_op_function,
    "triton_op + register_autograd": triton_op,
    "Library + Function": library_function,
    "Library + guarded Function": library_function_guarded,
    "Library + Autograd key (Function)": functools.partial(
        autograd_key, base=torch.autograd.Function
    ),
    "Library + Autograd key (one level)": functools.partial(autograd_key, outer_levels=False),
    "Library + Autograd key": autograd_key,
    "Library + Autograd key + eager path": functools.partial(autograd_key, fast=True),
    "Library + Autograd key + eager path + second order": functools.partial(
        autograd_key, fast=True, second_order=True
    ),
}
