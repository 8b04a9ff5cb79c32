"""Layer normalisation and the linear layer behind it.

    layer_norm_linear(x)  y = layer_norm(x, norm_weight, norm_bias) weight^T + bias

over the last axis of x, N columns; y has M, the rows of weight. What the norm returns is rounded to
weight's dtype, as by layer_norm itself, and is neither returned nor saved. Backward pass and what
is saved for it: ``norm_linear.py``.

Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import checked_number
from .._core.typed import called_as
from ..row_norm.checks import check_rows, check_vector
from ..row_norm.layer_norm import LayerNorm
from .norm_linear import check_linear, norm_linear

Tensor = torch.Tensor


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> Tensor:
    """``F.linear(layer_norm(x, norm_weight, norm_bias), weight, bias)`` without the normalised rows
    in memory, where that is faster.

    Args:
        x: ``[..., N]`` in fp32, bf16 or fp16 (the reference takes fp64 too). Any strides.
        norm_weight, norm_bias: ``[N]`` each, of any of these dtypes. None scales by 1 and adds 0.
        weight: ``[M, N]``, as ``torch.nn.Linear`` has it, of any of these dtypes, which the
            normalised rows are rounded to; fp64 beside an fp64 x alone.
        bias: ``[M]`` in weight's dtype, or None.
        eps: added to the variance.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve. Either takes one kernel where it is
            faster, on GPUs of compute capability 9.0 in bf16 and fp16, and otherwise the kernel of
            layer_norm and torch's product.

    Returns:
        ``[..., M]``, contiguous, in weight's dtype; in autocast's dtype under autocast, to which
        weight and bias are then cast. A row of x that holds NaN or infinity is NaN.

    Differentiable in x and all weights and biases, twice; the second derivative runs in plain
    torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, or eps is no number.
        ValueError: x has no axis, a shape or dtype does not fit, the devices differ, or eps is
            negative or not finite.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_rows(x)
    check_vector("norm_weight", norm_weight, x)
    check_vector("norm_bias", norm_bias, x)
    check_linear(x, weight, bias)
    eps = checked_number("eps", eps, lowest=0.0)
    kernels = uses_triton(x, backend)
    return norm_linear(x, norm_weight, norm_bias, weight, bias, eps, 0.0, True, kernels)


class LayerNormLinear(torch.nn.Module):
    """A ``LayerNorm`` named ``norm`` and a ``torch.nn.Linear`` named ``linear``, called as one.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``.
        eps, elementwise_affine: as of ``torch.nn.LayerNorm``.
        norm_bias: whether the norm has a bias.
        backend: "auto", "triton" or "reference".
    """

    norm: LayerNorm
    linear: torch.nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        norm_bias: bool = True,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        self.norm = LayerNorm(
            in_features, eps, elementwise_affine, norm_bias, device, dtype, backend=backend
        )
        self.linear = torch.nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[..., in_features]``; returns ``[..., out_features]``."""
        norm, linear = self.norm, self.linear
        return layer_norm_linear(
            *(x, norm.weight, norm.bias, linear.weight, linear.bias),
            eps=norm.eps,
            backend=norm.backend,
        )

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...
