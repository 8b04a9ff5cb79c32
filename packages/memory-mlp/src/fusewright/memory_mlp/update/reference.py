"""The pooled update of a memory of any number of layers in plain torch: the specification, the
yardstick of the tests and the CPU implementation.

Everything is computed in fp32 (in fp64 for fp64 inputs). Weights and momentum stay so; tensors of
key width are rounded once, to the keys' dtype. Gradients are autograd's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._core.precision import wide
from ..common.reference import gradients_of, over, rows_of
from ..common.weights import Weights, mapped

Tensor = torch.Tensor


def memory_update(
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    row_weights: Tensor | None = None,
    *,
    activation: str = "silu",
    reduction: str = "sum",
    max_grad_norm: float | None = None,
) -> tuple[Weights, Weights, Tensor, Tensor, Tensor]:
    """One step for every leading index; k, v [*lead, N, D], the gates [*lead].

    S' = eta S - theta clip(G); W' = (1 - alpha) W + S'; G the gradient at W. Both stay where the
    norm of G is not finite.

    Returns:
        (W', S', loss, norm of G before the clip, whether the step was skipped).
    """
    lead = alpha.ndim
    k, v = wide(k), wide(v)
    factor = loss_factor(reduction, k)
    with torch.no_grad():
        unchecked = descent(k, v, row_weights, weights, factor, activation, lead)
    norm = unchecked.squares.sqrt()
    finite = norm.isfinite()
    used, w, s = unchecked, weights, momentum
    if torch.is_grad_enabled():
        # Autograd multiplies a skipped memory's gradients, zeros, by numbers that are not finite.
        def if_finite(x: Tensor) -> Tensor:
            return torch.where(over(finite, x), x, 0.0)

        k, v, alpha, eta, theta = map(if_finite, (k, v, alpha, eta, theta))
        row_weights = None if row_weights is None else if_finite(row_weights)
        w, s = mapped(if_finite, weights), mapped(if_finite, momentum)
        used = descent(k, v, row_weights, w, factor, activation, lead)
    rho = clip(used.squares, max_grad_norm)
    new_momentum = mapped(
        lambda s, g: over(eta, s) * s - over(theta * rho, g) * g, s, used.gradient
    )
    new_weights = mapped(lambda w, s: over(1.0 - alpha, w) * w + s, w, new_momentum)

    def kept(new: Tensor, old: Tensor) -> Tensor:
        # Plain torch would keep the order of the old ones' axes.
        return torch.where(over(finite, new), new, old).contiguous()

    return (
        mapped(kept, new_weights, weights),
        mapped(kept, new_momentum, momentum),
        torch.where(finite, used.loss, unchecked.loss),
        norm,
        ~finite,
    )


class Descent(NamedTuple):
    """The gradient G of the loss by the weights, the loss ``[*lead]``, and |G| squared."""

    gradient: Weights
    loss: Tensor
    squares: Tensor


def descent(
    k: Tensor,
    v: Tensor,
    row_weights: Tensor | None,
    weights: Weights,
    factor: float,
    activation: str,
    lead: int,
) -> Descent:
    rows = rows_of(k, v, row_weights, weights, factor, activation)
    gradient = gradients_of(rows, weights)
    loss = 0.5 * (rows.by_z[-1] * rows.residual).flatten(lead).sum(-1)
    return Descent(gradient, loss, inner(gradient, gradient, lead))


def clip(squares: Tensor, max_grad_norm: float | None) -> Tensor:
    """rho, of the square of the norm."""
    if max_grad_norm is None:
        return torch.ones_like(squares)
    clipped = squares.sqrt() > max_grad_norm
    # The root has no derivative at zero.
    norm = torch.where(clipped, squares, 1.0).sqrt()
    return torch.where(clipped, max_grad_norm / norm, 1.0)


def loss_factor(reduction: str, k: Tensor) -> float:
    """Twice the factor of the sum of the residuals' squares in the loss, k being [.., N, D]."""
    rows, width = k.shape[-2:]
    count = {"sum": 1, "mean_feature": width, "mean_all": rows * width}[reduction]
    return 2.0 / max(count, 1)


def inner(a: Weights, b: Weights, lead: int) -> Tensor:
    """<a, b> over all tensors, for every leading index."""
    parts = [(x * y).flatten(lead).sum(-1) for x, y in zip(a, b, strict=True)]
    return functools.reduce(torch.add, parts)
