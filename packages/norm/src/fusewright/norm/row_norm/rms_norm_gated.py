r"""Root-mean-square normalisation times an activated gate, as behind linear attention.

    y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) * activation(gate)

over the last axis, N columns; every other axis counts rows; activation(gate) is gate *
sigmoid(gate) ("silu") or sigmoid(gate) ("sigmoid"). The backward pass is that of rms_norm with dy *
activation(gate) for dy, and

    dgate = dy * rms_norm(x) * activation'(gate)

Saved for it: x, gate, weight, and 1 / sqrt(mean(x^2) + eps) in fp32, one number a row. Statistics,
products and the sums over rows are fp32; outputs are rounded once, so nothing is rounded between
the norm and the gate.

Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_option, check_same, checked_number
from .._core.precision import wide
from .._core.registration import Derivative, Op, empty_grad
from .._core.typed import called_as
from . import launch, launch_backward, reference
from .checks import check_rows, check_vector, checked_eps, flat_rows
from .rms_norm import RMSNorm

Tensor = torch.Tensor
Activation = Literal["silu", "sigmoid"]
ACTIVATIONS = ("silu", "sigmoid")


def _forward_triton(x, gate, weight, eps, weight_offset, activation, statistics=True):
    y, _, _, rstd = launch.norm_forward(
        *(x, None, weight, None, eps, weight_offset, False, statistics),
        gate=gate,
        activation=activation,
    )
    return y, rstd


def _forward_reference(x, gate, weight, eps, weight_offset, activation):
    y = reference.rms_norm_gated(
        x, gate, weight, eps=eps, weight_offset=weight_offset, activation=activation
    )
    return y, reference.rstd_of(wide(x), eps).squeeze(-1).float()


def _forward_fake(x, gate, weight, eps, weight_offset, activation):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward_triton(dy, x, gate, weight, rstd, eps, weight_offset, activation, weight_grad):
    dx, dgate, dweight, *_ = launch_backward.norm_backward(
        *(dy, None, x, weight, None, None, rstd, weight_offset, weight_grad, False),
        gate=gate,
        activation=activation,
    )
    return dx, dgate, empty_grad(x) if dweight is None else dweight


def _backward_reference(dy, x, gate, weight, rstd, eps, weight_offset, activation, weight_grad):
    dx, dgate, dweight = reference.rms_norm_gated_backward(
        dy, x, gate, weight, eps=eps, weight_offset=weight_offset, activation=activation
    )
    return dx, dgate, dweight if weight_grad else empty_grad(x)


def _backward_fake(dy, x, gate, weight, rstd, eps, weight_offset, activation, weight_grad):
    dweight = weight.new_empty(weight.shape) if weight_grad else empty_grad(x)
    return x.new_empty(x.shape), gate.new_empty(gate.shape), dweight


_forward = Op(
    "rms_norm_gated(Tensor x, Tensor gate, Tensor? weight, float eps, float weight_offset,"
    " str activation) -> (Tensor y, Tensor rstd)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=functools.partial(_forward_triton, statistics=False),
)
_backward = Op(
    "rms_norm_gated_backward(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd,"
    " float eps, float weight_offset, str activation, bool weight_grad)"
    " -> (Tensor dx, Tensor dgate, Tensor dweight)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("rstd")


@_forward.derivative
class _RMSNormGated(Derivative):
    @staticmethod
    def forward(ctx, run, x, gate, weight, eps, weight_offset, activation):
        y, rstd = run(x, gate, weight, eps, weight_offset, activation)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = eps, weight_offset, activation
        ctx.set_materialize_grads(False)
        return y, *_forward.statistics(ctx, run, rstd)

    @staticmethod
    def backward(ctx, dy, _):
        if dy is None:
            return None, None, None, None, None, None, None
        x, gate, weight, rstd = ctx.saved_tensors
        weight_grad = weight is not None and ctx.needs_input_grad[3]
        dx, dgate, dweight = _backward(dy, x, gate, weight, rstd, *ctx.options, weight_grad)
        return None, dx, dgate, dweight if weight_grad else None, None, None, None


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    activation: Activation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Divide each row of ``x`` by its root mean square, scale its columns and multiply by the
    activated gate, in one pass.

    Args:
        x, gate: ``[..., N]``, of one shape and dtype, as in :func:`fusewright.norm.rms_norm`, each
            with its own strides.
        weight, eps, weight_offset, backend: as in :func:`fusewright.norm.rms_norm`.
        activation: "silu" multiplies by gate * sigmoid(gate), "sigmoid" by sigmoid(gate).

    Returns:
        ``[..., N]``, contiguous, in x's dtype, under autocast too.

    Differentiable in x, gate and weight, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: as :func:`fusewright.norm.rms_norm`.
        ValueError: as :func:`fusewright.norm.rms_norm`, where gate differs from x in shape, dtype
            or device, and for another activation.
        RuntimeError: as :func:`fusewright.norm.rms_norm`.
    """
    check_rows(x)
    check_same("gate", gate, "x", x)
    check_vector("weight", weight, x)
    eps, weight_offset = checked_eps(eps, x), checked_number("weight_offset", weight_offset)
    check_option("activation", activation, ACTIVATIONS)
    if not uses_triton(x, backend):
        return reference.rms_norm_gated(
            x, gate, weight, eps=eps, weight_offset=weight_offset, activation=activation
        )
    return _forward(x, gate, weight, eps, weight_offset, activation)[0]


class RMSNormGated(RMSNorm):
    """:class:`fusewright.norm.RMSNorm` whose forward takes a gate beside x; same state dict.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype, weight_offset, backend: as in
            :class:`fusewright.norm.RMSNorm`.
        activation: "silu" or "sigmoid".
    """

    activation: Activation

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation = "silu",
        weight_offset: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        check_option("activation", activation, ACTIVATIONS)
        super().__init__(
            *(normalized_shape, eps, elementwise_affine, device, dtype),
            weight_offset=weight_offset,
            backend=backend,
        )
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """``x``, ``gate``: ``[..., *normalized_shape]``; returns the same shape."""
        rows, *vectors = flat_rows(x, self.normalized_shape, self.weight)
        check_same("gate", gate, "x", x)
        y = rms_norm_gated(
            rows,
            gate.reshape(rows.shape),
            *vectors,
            eps=self.eps,
            weight_offset=self.weight_offset,
            activation=self.activation,
            backend=self.backend,
        )
        return y.view(x.shape)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...  # type: ignore[override]

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        return f"{super().extra_repr()}, activation={self.activation!r}"
