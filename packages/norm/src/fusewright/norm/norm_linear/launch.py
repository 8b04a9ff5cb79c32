"""Which kernels serve a norm of rows and the linear layer behind it, forward and backward."""

from __future__ import annotations

import torch

from .._core.launches import layouts
from .._core.registration import empty_grad
from ..row_norm.launch import norm_forward
from ..row_norm.launch_backward import norm_backward
from .launch_hopper import ALIGNED, hopper_config, plan_hopper

Tensor = torch.Tensor


def norm_linear_forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    center: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A norm of the rows of ``x``, times ``weight`` transposed, plus ``bias``.

    Returns:
        ``(y, mean, rstd)``: y contiguous, in weight's dtype; mean, None unless ``center``, and rstd
        fp32 in the shape of the leading axes.
    """
    *leading, cols = x.shape
    outputs, vectors = weight.shape[0], (norm_weight, norm_bias, bias)
    rows = x.shape[:-1].numel()
    config = hopper_config(rows, cols, outputs, x.dtype, weight.dtype, x.device)
    if config is None:
        z, _, mean, rstd = norm_forward(
            x, None, norm_weight, norm_bias, eps, weight_offset, center, dtype=weight.dtype
        )
        assert rstd is not None
        # The same bits for every layout.
        w = weight.contiguous().mT
        y = z.new_empty((*leading, outputs))
        into, z = y.view(rows, outputs), z.view(rows, cols)
        if bias is None:
            torch.mm(z, w, out=into)
        else:
            torch.addmm(bias.contiguous(), z, w, out=into)
        return y, mean, rstd
    matrices = in_bulk(x.reshape(rows, cols)), in_bulk(weight)
    whole = tuple(None if v is None else v.contiguous() for v in vectors)
    plan = plan_hopper(
        config, tuple(leading), cols, outputs, layouts(*matrices, *vectors), center, x.device
    )
    return plan.run((*matrices, *whole), (eps, weight_offset))


def in_bulk(x: Tensor) -> Tensor:
    """A matrix that a tensor descriptor reads: itself where its rows are contiguous, further apart
    than they are long, and each at a multiple of 16 bytes.
    """
    between, within = x.stride()
    aligned = not (between * x.itemsize % ALIGNED or x.data_ptr() % ALIGNED)
    if within == 1 and between >= x.shape[1] and aligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def norm_linear_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
    weight_offset: float,
    wanted: tuple[bool, bool, bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, norm_weight, norm_bias, weight and bias, empty where not ``wanted``.

    The products are torch's. What the norm returned, of which the weight's gradient is a product,
    is computed again, by the norm's backward pass where there is one.
    """
    x_grad, norm_weight_grad, norm_bias_grad, weight_grad, bias_grad = wanted
    *leading, cols = x.shape
    rows, outputs = x.shape[:-1].numel(), weight.shape[0]
    # The same bits for every layout.
    dy = dy.contiguous().view(rows, outputs)
    dx = dnorm_weight = dnorm_bias = dweight = dbias = empty_grad(x)
    z = None
    if x_grad or norm_weight_grad or norm_bias_grad:
        dz = dy.new_empty((*leading, cols))
        torch.mm(dy, weight.contiguous(), out=dz.view(rows, cols))
        dx, _, *found, z = norm_backward(
            *(dz, None, x, norm_weight, norm_bias, mean, rstd, weight_offset),
            weight_grad=norm_weight_grad,
            bias_grad=norm_bias_grad,
            y_dtype=weight.dtype if weight_grad else None,
        )
        dnorm_weight, dnorm_bias = (empty_grad(x) if grad is None else grad for grad in found)
    if weight_grad:
        if z is None:
            z, *_ = norm_forward(
                *(x, None, norm_weight, norm_bias, eps, weight_offset),
                center=mean is not None,
                statistics=False,
                dtype=weight.dtype,
            )
        dweight = torch.mm(dy.mT, z.view(rows, cols), out=weight.new_empty(weight.shape))
    if bias_grad:
        assert bias is not None
        dbias = dy.sum(0, dtype=torch.float32).to(bias.dtype)
    return dx, dnorm_weight, dnorm_bias, dweight, dbias
