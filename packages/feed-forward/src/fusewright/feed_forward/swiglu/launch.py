"""The launches of gated_feed_forward, forward and backward: products by torch, the gating by its
own kernels.

Operands are multiplied as contiguous matrices, so that every layout gives the same bits.
"""

from __future__ import annotations

import torch

from .._core.registration import empty_grad
from ..gating import launch as gating
from ..perceptron.launch import linear, product, product_of_rows

Tensor = torch.Tensor


def gated_feed_forward(
    x: Tensor, joint_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, joint, gated)``: the layer, and what the backward pass needs, the joint product and its
    gated halves.
    """
    joint = linear(x, joint_weight)
    gated = gating.silu_mul_halves(joint)
    return linear(gated, output_weight), joint, gated


def gated_feed_forward_inference(
    x: Tensor, joint_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, None, None]:
    """``(y, None, None)``; the joint product is freed before there is y."""
    gated = gating.silu_mul_halves(linear(x, joint_weight))
    return linear(gated, output_weight), None, None


def gated_feed_forward_backward(
    dy: Tensor,
    x: Tensor,
    joint_weight: Tensor,
    output_weight: Tensor,
    joint: Tensor,
    gated: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and both weights, empty where not ``wanted``."""
    x_grad, joint_weight_grad, output_weight_grad = wanted
    dy = dy.contiguous()
    if x_grad or joint_weight_grad:
        djoint = gating.silu_mul_halves_backward(product(dy, output_weight), joint)
    dx = product(djoint, joint_weight) if x_grad else empty_grad(x)
    djoint_weight = product_of_rows(djoint, x) if joint_weight_grad else empty_grad(x)
    doutput_weight = product_of_rows(dy, gated) if output_weight_grad else empty_grad(x)
    return dx, djoint_weight, doutput_weight
