"""Products of one tensor with several weights, which are one node of autograd.

    y_i = x W_i^T        dx = sum of dy_i W_i        dW_i = dy_i^T x

Autograd has five nodes for each of them, casts each weight and its gradient by a launch of its own,
and adds up the gradients of x one by one. Here the products of the backward pass add to one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from .casts import for_products
from .internals import FOUND, REGISTERS_AUTOGRAD
from .precision import autocast, without_autocast
from .registration import TENSORS

Tensor = torch.Tensor

_are_functorch_transforms_active = FOUND["_are_functorch_transforms_active"]
_has_storage = FOUND["_has_storage"]
_is_tracing = FOUND["_is_tracing"]
# Whether there are hooks of all modules.
has_global_hooks = FOUND["_has_any_global_hook"]
FORWARD = nn.Linear.forward


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """``F.linear`` of x ``[..., d]`` and each weight ``[n, d]``; what a compiler or a transform
    sees are these.
    """
    # Without gradients autocast keeps the casts of weights from call to call.
    if torch.is_grad_enabled() and is_eager(x, *weights):
        (x,), weights = autocast(x), tuple(for_products(*weights))
        return Linears.apply(x, *weights)
    return tuple([F.linear(x, weight) for weight in weights])


def linears_of(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """What each of the layers makes of x: :func:`linears` where they are plain linear ones, so that
    a layer that was put in the place of one, or has hooks, is called.
    """
    if all(is_plain_layer(layer) for layer in layers):
        return linears(x, *[layer.weight for layer in layers])  # type: ignore[arg-type]
    return tuple([layer(x) for layer in layers])


def is_plain_layer(layer: nn.Module) -> bool:
    """Whether a layer is a product with its weight and nothing else."""
    if type(layer) is not nn.Linear or layer.bias is not None:
        return False
    # As others put their own in its place, on the layer or for all.
    if "forward" in layer.__dict__ or nn.Linear.forward is not FORWARD:
        return False
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    of_backward = layer._backward_hooks or layer._backward_pre_hooks
    return not (hooks or of_backward or has_global_hooks is None or has_global_hooks())


def is_eager(x: Tensor, *weights: Tensor) -> bool:
    """Whether autograd is all that sees the call, or a mode that sees what is in its nodes too, as
    checkpoints have; and the weights are of one dtype.
    """
    if not REGISTERS_AUTOGRAD or torch.compiler.is_compiling():
        return False
    if _are_functorch_transforms_active() or _is_tracing() or forward_ad._current_level >= 0:
        return False
    dtype = weights[0].dtype
    if type(x) not in TENSORS or not _has_storage(x):
        return False
    return all(type(w) in TENSORS and w.dtype == dtype and _has_storage(w) for w in weights)


class Linears(torch.autograd.Function):
    """The products and their gradients, of operands of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        # Frozen weights want nothing of x, nor x without a gradient of them.
        of_x, *of_weights = ctx.needs_input_grad
        ctx.save_for_backward(x if any(of_weights) else None, *(weights if of_x else ()))
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        found = tuple([F.linear(x, weight) for weight in weights])
        if not of_x:
            frozen = [y for y, asked in zip(found, of_weights, strict=True) if not asked]
            ctx.mark_non_differentiable(*frozen)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        operands = x, weights, gradients, ctx.needs_input_grad, ctx.shape
        device = next((dy.device for dy in gradients if dy is not None), torch.device("cpu"))
        with without_autocast(device):
            return gradients_of(*operands)


def gradients_of(
    x: Tensor | None,
    weights: list[Tensor],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    shape: torch.Size,
) -> tuple[Tensor | None, ...]:
    """Of x, which is of this shape, and of each weight, those that are needed and have any."""
    dx: Tensor | None = None
    count = shape[:-1].numel()
    rows = None if x is None else x.reshape(count, shape[-1])
    found: list[Tensor | None] = []
    for place, gradient in enumerate(gradients):
        dy = None if gradient is None else gradient.reshape(count, gradient.shape[-1])
        of_weight = dy is not None and rows is not None and needed[1 + place]
        found.append(dy.mT @ rows if of_weight else None)  # type: ignore[union-attr,operator]
        if dy is None or not needed[0]:
            continue
        if dx is None:
            dx = dy @ weights[place]
        elif torch.is_grad_enabled():
            dx = torch.addmm(dx, dy, weights[place])
        else:
            dx.addmm_(dy, weights[place])
    return None if dx is None else dx.view(shape), *found
