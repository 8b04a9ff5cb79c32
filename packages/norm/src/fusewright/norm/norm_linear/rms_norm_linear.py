"""RMS normalisation and the linear layer behind it.

    rms_norm_linear(x)  y = rms_norm(x, norm_weight) weight^T + bias

over the last axis of x, N columns; y has M, the rows of weight. What the norm returns is rounded to
weight's dtype and is neither returned nor saved. Backward pass and what is saved for it:
``norm_linear.py``.

Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import checked_number
from .._core.typed import called_as
from ..row_norm.checks import check_rows, check_vector, checked_eps
from ..row_norm.rms_norm import RMSNorm
from .norm_linear import check_linear, norm_linear

Tensor = torch.Tensor


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """``F.linear(rms_norm(x, norm_weight), weight, bias)`` without the normalised rows in memory,
    where that is faster.

    Args:
        x, weight, bias, backend: as in :func:`layer_norm_linear`.
        norm_weight: ``[N]``, or None, which scales by 1.
        eps, weight_offset: as in :func:`rms_norm`.

    Returns:
        ``[..., M]``, contiguous, in weight's dtype; in autocast's dtype under autocast, to which
        weight and bias are then cast. A row of x that holds NaN or infinity is NaN.

    Differentiable in x and all weights and the bias, twice.

    Raises:
        TypeError: as :func:`layer_norm_linear`.
        ValueError: as :func:`layer_norm_linear`, and where weight_offset is not finite.
        RuntimeError: as :func:`layer_norm_linear`.
    """
    check_rows(x)
    check_vector("norm_weight", norm_weight, x)
    check_linear(x, weight, bias)
    eps, weight_offset = checked_eps(eps, x), checked_number("weight_offset", weight_offset)
    kernels = uses_triton(x, backend)
    return norm_linear(x, norm_weight, None, weight, bias, eps, weight_offset, False, kernels)


class RMSNormLinear(torch.nn.Module):
    """An ``RMSNorm`` named ``norm`` and a ``torch.nn.Linear`` named ``linear``, called as one.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``.
        eps, elementwise_affine: as of ``torch.nn.RMSNorm``.
        weight_offset: as of ``RMSNorm``.
        backend: "auto", "triton" or "reference".
    """

    norm: RMSNorm
    linear: torch.nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float | None = None,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        self.norm = RMSNorm(
            *(in_features, eps, elementwise_affine, device, dtype),
            weight_offset=weight_offset,
            backend=backend,
        )
        self.linear = torch.nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[..., in_features]``; returns ``[..., out_features]``."""
        norm, linear = self.norm, self.linear
        return rms_norm_linear(
            *(x, norm.weight, linear.weight, linear.bias),
            eps=norm.eps,
            weight_offset=norm.weight_offset,
            backend=norm.backend,
        )

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...
