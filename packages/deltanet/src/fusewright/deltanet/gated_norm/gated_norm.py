"""The gated norm of Gated DeltaNet.

    y = o / sqrt(mean(o^2) + eps) weight silu(gate)

Over the last axis, everything in fp32, y rounded once to o's dtype. Saved for the backward pass:
the inputs. Each program of the backward pass writes a partial sum of the gradient of the weight;
these are added in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._core.backends import Backend, uses_triton
from .._core.precision import without_autocast
from .._core.registration import Derivative, Op, empty_grad
from .._core.typed import called_as
from . import launch, reference

Tensor = torch.Tensor


def _forward_fake(o, weight, gate, eps):
    return o.new_empty(o.shape)


def _backward_fake(dy, o, weight, gate, eps):
    dgate = empty_grad(o) if gate is None else gate.new_empty(gate.shape)
    return o.new_empty(o.shape), weight.new_empty(weight.shape), dgate


_forward = Op(
    "gated_norm(Tensor o, Tensor weight, Tensor? gate, float eps) -> Tensor",
    triton=launch.norm_forward,
    reference=reference.gated_norm,
    fake=_forward_fake,
)
_backward = Op(
    "gated_norm_backward(Tensor dy, Tensor o, Tensor weight, Tensor? gate, float eps)"
    " -> (Tensor do, Tensor dweight, Tensor dgate)",
    triton=launch.norm_backward,
    reference=reference.gated_norm_backward,
    fake=_backward_fake,
)


@_forward.derivative
class _GatedNorm(Derivative):
    @staticmethod
    def forward(ctx, run, o, weight, gate, eps):
        ctx.save_for_backward(o, weight, gate)
        ctx.eps = eps
        return run(o, weight, gate, eps)

    @staticmethod
    def backward(ctx, dy):
        o, weight, gate = ctx.saved_tensors
        do, dweight, dgate = _backward(dy, o, weight, gate, ctx.eps)
        return None, do, dweight, None if gate is None else dgate, None


_backward.derivative_of_reference()


def gated_norm(
    o: Tensor, weight: Tensor, gate: Tensor | None, eps: float, *, backend: Backend = "auto"
) -> Tensor:
    """RMSNorm(o) weight silu(gate) in o's dtype; without a gate the norm alone.

    Args:
        o: ``[..., V]``.
        weight: ``[V]``.
        gate: of o's shape, or None.
        eps: added to the mean square.
        backend: "auto", "triton" or "reference".
    """
    if uses_triton(o, backend):
        return _forward(o, weight, gate, eps)
    with without_autocast(o.device):
        return reference.gated_norm(o, weight, gate, eps)


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm(o) weight silu(gate), over the last axis; without a gate the norm alone."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__(width, eps, device=device, dtype=dtype)
        self.backend = backend

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        """``o`` and ``gate``: ``[..., width]``; returns the same shape."""
        assert self.weight is not None
        assert self.eps is not None
        return gated_norm(o, self.weight, gate, self.eps, backend=self.backend)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...
