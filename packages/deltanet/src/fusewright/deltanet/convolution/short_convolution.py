"""The short causal convolution of Gated DeltaNet, its SiLU and the unit length of each head's
columns, in one op.

    z_t = bias + sum_j weight_j x_(t - taps + 1 + j),  s = silu(z),  y = s, or s / |s| by head

Everything is fp32; y is rounded once. Saved for the backward pass: the inputs. Each program of the
backward pass writes partial sums of the gradients of taps and bias, which are added in a fixed
order.
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

OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor? place"


def _forward_fake(x, weight, bias, place, heads):
    return x.new_empty(x.shape)


def _backward_fake(dy, x, weight, bias, place, heads):
    dbias = empty_grad(weight) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


_forward = Op(
    f"short_convolution({OPERANDS}, int heads) -> Tensor",
    triton=launch.convolution_forward,
    reference=reference.short_convolution,
    fake=_forward_fake,
)
_backward = Op(
    f"short_convolution_backward(Tensor dy, {OPERANDS}, int heads)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    triton=launch.convolution_backward,
    reference=reference.short_convolution_backward,
    fake=_backward_fake,
)


@_forward.derivative
class _ShortConvolution(Derivative):
    @staticmethod
    def forward(ctx, run, x, weight, bias, place, heads):
        ctx.save_for_backward(x, weight, bias, place)
        ctx.heads = heads
        return run(x, weight, bias, place, heads)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, place = ctx.saved_tensors
        dx, dweight, dbias = _backward(dy, x, weight, bias, place, ctx.heads)
        return None, dx, dweight, None if bias is None else dbias, None, None


_backward.derivative_of_reference()


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    place: Tensor | None = None,
    heads: int = 0,
    history: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """silu(conv(x)), causal, each channel with taps of its own.

    Args:
        x: ``[B, T, channels]``.
        weight: ``[channels, taps]``, the last tap for the token itself.
        bias: ``[channels]``, or None.
        place: ``[T]``, the position of each token in its sequence; before position 0 stand zeros.
        heads: how many heads the channels belong to, whose columns get length 1; 0 leaves them.
        history: ``[B, taps - 1, channels]``, the tokens before x; zeros where left out. With a
            history the reference computes.
        backend: "auto", "triton" or "reference".
    """
    if history is None and uses_triton(x, backend):
        return _forward(x, weight, bias, place, heads)
    with without_autocast(x.device):
        return reference.short_convolution(x, weight, bias, place, heads, history)


class ShortConvolution(nn.Conv1d):
    """A causal convolution of each channel with taps of its own, then SiLU, over [B, T, channels];
    with ``heads`` the columns of each head get length 1. The parameters have the names of
    flash-linear-attention's layer.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        bias: bool = False,
        heads: int = 0,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__(
            *(channels, channels, kernel_size),
            groups=channels,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.heads: int = heads
        self.backend: Backend = backend

    def forward(
        self, x: Tensor, history: Tensor | None = None, place: Tensor | None = None
    ) -> Tensor:
        """In x's dtype, computed in fp32."""
        return short_convolution(
            x,
            self.weight.squeeze(1),
            self.bias,
            place=place,
            heads=self.heads,
            history=history,
            backend=self.backend,
        )

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def next_history(self, x: Tensor, history: Tensor) -> Tensor:
        """The history of the tokens that follow: the last of history and x."""
        return torch.cat((history.to(x.dtype), x), 1)[:, x.shape[1] :]
