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
from .precision import autocast, autocasts, without_autocast
from .registration import TENSORS

Tensor = torch.Tensor

_are_functorch_transforms_active = FOUND["_are_functorch_transforms_active"]
_has_storage = FOUND["_has_storage"]
_is_tracing = FOUND["_is_tracing"]


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """``F.linear`` of x ``[..., d]`` and each weight ``[n, d]``; what a compiler or a transform
    sees are these.
    """
    if is_eager(x, *weights):
        (x,), weights = autocast(x), tuple(for_products(*weights))
        if torch.is_grad_enabled():
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
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    of_backward = layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is None and not hooks and not of_backward


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
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple([F.linear(x, weight) for weight in weights])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        operands = x, weights, gradients, ctx.needs_input_grad
        if not autocasts(x.device.type):
            return gradients_of(*operands)
        with without_autocast(x.device):
            return gradients_of(*operands)


def gradients_of(
    x: Tensor,
    weights: list[Tensor],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Of x and of each weight, those that are needed and have any."""
    rows, dx = x.reshape(-1, x.shape[-1]), None
    found: list[Tensor | None] = []
    for weight, gradient, is_needed in zip(weights, gradients, needed[1:], strict=True):
        if gradient is None:
            found.append(None)
            continue
        dy = gradient.reshape(-1, len(weight))
        found.append(dy.mT @ rows if is_needed else None)
        if not needed[0]:
            continue
        if dx is None:
            dx = dy @ weight
        elif torch.is_grad_enabled():
            dx = torch.addmm(dx, dy, weight)
        else:
            dx.addmm_(dy, weight)
    return None if dx is None else dx.view(x.shape), *found
