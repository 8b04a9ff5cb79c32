"""The function transforms under which an op must be right, each as a function of the op.

A test holds a transform of the kernels to the same transform of the reference, run eagerly, by the
yardstick: against fp64, with the error that plain torch makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap

from .yardstick import Yardstick, as_tuple

SAMPLES = 2
Call = Callable[..., object]


def hold(
    op,
    tensors: Sequence[torch.Tensor],
    transform: Callable[[Call], Call],
    run: Callable[[Call], Call] = lambda function: function,
) -> None:
    """The transform of ``op.kernels``, as ``run`` runs it, against that of ``op.reference``."""
    reference = detached(transform(op.reference))
    yardstick = Yardstick(reference, tensors, [None] * len(reference(*tensors)))
    yardstick.check(detached(run(transform(op.kernels))))


def detached(call: Call) -> Callable[..., tuple]:
    """What ``call`` returns of tensors that do not require a gradient themselves, as a tuple."""
    return lambda *tensors: as_tuple(call(*(t.detach() for t in tensors)))


def loss(call: Call) -> Call:
    """One number in which every output counts, each of its elements with a gradient of its own."""
    return lambda *tensors: sum((y * ramp(y)).square().sum() for y in as_tuple(call(*tensors)))


def ramp(y: torch.Tensor) -> torch.Tensor:
    """A number for each element of y."""
    return torch.linspace(-1.0, 2.0, y.numel(), device=y.device).view_as(y).to(y.dtype)


def every(tensors: Sequence) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


def first_of(call: Call) -> Call:
    """The first output alone."""
    return lambda *tensors: as_tuple(call(*tensors))[0]


def samples(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x * (1 + sample) + sample for sample in range(SAMPLES)])


def ended_vjp(call):
    """The pullback, called when no transform is active any more."""

    def pulled(*tensors):
        y, pullback = vjp(first_of(call), *tensors)
        return pullback(ramp(y))

    return pulled


def batched_cotangents(call):
    """Autograd's own batch of gradients, which maps over the backward pass alone."""

    def pulled(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = first_of(call)(*leaves)
        batch = torch.stack([y.detach().cos(), torch.ones_like(y)])
        return torch.autograd.grad(y, leaves, batch, is_grads_batched=True)

    return pulled


def func_grad(call):
    return lambda *tensors: grad(loss(call), every(tensors))(*tensors)


def mapped(call):
    """Over a new axis of the first operand alone."""
    return lambda x, *others: vmap(call, (0, *(None for _ in others)))(samples(x), *others)


def mapped_together(call):
    """Over a new last axis of every operand."""
    return lambda *tensors: vmap(call, in_dims=-1)(*(samples(t).movedim(0, -1) for t in tensors))


def mapped_func_grad(call):
    def of_tensors(x, *others):
        slopes = grad(loss(call), every((x, *others)))
        return vmap(slopes, (0, *(None for _ in others)))(samples(x), *others)

    return of_tensors


def func_grad_of_map(call):
    return lambda *tensors: grad(lambda *t: loss(mapped(call))(*t), every(tensors))(*tensors)


def func_grad_of_primal_of_vjp(call):
    def primal(*tensors):
        return vjp(lambda *t: loss(call)(*t), *tensors)[0]

    return lambda *tensors: grad(primal, every(tensors))(*tensors)


def func_grad_twice(call):
    def steepness(*tensors):
        return sum(s.square().sum() for s in grad(loss(call), every(tensors))(*tensors))

    return lambda *tensors: grad(steepness, every(tensors))(*tensors)


def jacobian(call):
    """Of the first output; for few elements."""
    return lambda *tensors: jacrev(first_of(call), every(tensors))(*tensors)


def slopes_to_differentiate(call):
    """Autograd's gradients, through which it may go once more."""
    return lambda *leaves: torch.autograd.grad(loss(call)(*leaves), leaves, create_graph=True)


EAGER = [
    ended_vjp,
    batched_cotangents,
    func_grad,
    mapped,
    mapped_together,
    mapped_func_grad,
    func_grad_of_map,
    func_grad_of_primal_of_vjp,
    func_grad_twice,
]


def forward_mode(function: Call, x: torch.Tensor) -> torch.Tensor:
    """The derivative along ones, by a dual number."""
    with forward_ad.dual_level():
        y = function(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(y).tangent


def func_jvp(function: Call, x: torch.Tensor) -> torch.Tensor:
    return jvp(function, (x,), (torch.ones_like(x),))[1]


def func_jvp_of_grad(function: Call, x: torch.Tensor) -> torch.Tensor:
    """Forward over reverse: a product with the Hessian."""
    slope = grad(lambda x: function(x).square().sum())
    return jvp(slope, (x,), (torch.ones_like(x),))[1]


def compiled_func_jvp(function: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(lambda x: func_jvp(function, x), fullgraph=True, backend="aot_eager")(x)


# All ways to ask for a tangent.
FORWARD_MODES = (forward_mode, func_jvp, func_jvp_of_grad)
