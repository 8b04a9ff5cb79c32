"""The pooled update of a memory of any number of layers in plain torch: the specification, the
yardstick of the tests and the CPU implementation.

Everything is computed in fp32 (in fp64 for fp64 inputs). Weights and momentum stay so; tensors of
key width are rounded once, to the keys' dtype. Gradients are autograd's. The backward pass of two
layers is written out for the derivatives of the op, first and second.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._core.precision import wide
from ..common.reference import gradients_of, linear, over, rows_of
from ..common.weights import MemoryWeights, Weights, mapped

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
    rho, _ = clip(used.squares, max_grad_norm)
    new_momentum = mapped(
        lambda s, g: over(eta, s) * s - over(theta * rho, g) * g, s, used.gradient
    )
    new_weights = mapped(lambda w, s: over(1.0 - alpha, w) * w + s, w, new_momentum)

    def kept(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(over(finite, new), new, old)

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


def clip(squares: Tensor, max_grad_norm: float | None) -> tuple[Tensor, Tensor]:
    """(rho, whether the norm is above the limit), of the square of the norm."""
    if max_grad_norm is None:
        return torch.ones_like(squares), torch.zeros_like(squares, dtype=torch.bool)
    clipped = squares.sqrt() > max_grad_norm
    # The root has no derivative at zero.
    norm = torch.where(clipped, squares, 1.0).sqrt()
    return torch.where(clipped, max_grad_norm / norm, 1.0), clipped


def memory_update_backward(
    dweights: MemoryWeights,
    dmomentum: MemoryWeights,
    dloss: Tensor,
    k: Tensor,
    v: Tensor,
    weights: MemoryWeights,
    momentum: MemoryWeights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    row_weights: Tensor | None = None,
    *,
    activation: str = "silu",
    reduction: str = "sum",
    max_grad_norm: float | None = None,
) -> tuple[Tensor, Tensor, MemoryWeights, MemoryWeights, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of (k, v, W, S, alpha, eta, theta, row_weights) from those of W', S' and the loss.

    With A the cotangent of G, the part that reaches k, v and W is the Hessian of the loss times A;
    the clip adds a term of rank one to A.
    """
    lead = alpha.ndim
    dtype = k.dtype
    k, v = wide(k), wide(v)
    factor = loss_factor(reduction, k)
    with torch.no_grad():
        unchecked = descent(k, v, row_weights, weights, factor, activation, lead)
    finite = unchecked.squares.sqrt().isfinite()

    def if_finite(x: Tensor) -> Tensor:
        return torch.where(over(finite, x), x, 0.0)

    def if_skipped(x: Tensor) -> Tensor:
        return torch.where(over(finite, x), 0.0, x)

    k, v = if_finite(k), if_finite(v)
    row_weights = None if row_weights is None else if_finite(row_weights)
    weights, momentum = weights.map(if_finite), momentum.map(if_finite)
    alpha, eta, theta = if_finite(alpha), if_finite(eta), if_finite(theta)
    rows = rows_of(k, v, row_weights, weights, factor, activation)
    (_, h), (slope,), (curve,), r, (dh,), (p, e) = rows
    gradient = MemoryWeights(*gradients_of(rows, weights))
    squares = inner(gradient, gradient, lead)
    rho, clipped = clip(squares, max_grad_norm)

    # A step that was skipped passes its own gradients on to W and S, and nothing else.
    dw_skipped, ds_skipped = dweights.map(if_skipped), dmomentum.map(if_skipped)
    dweights, dmomentum, dloss = dweights.map(if_finite), dmomentum.map(if_finite), if_finite(dloss)
    u = dweights.map(torch.add, dmomentum)
    ds = u.map(lambda u, skipped: over(eta, u) * u + skipped, ds_skipped)
    dalpha, deta = -inner(dweights, weights, lead), inner(u, momentum, lead)
    along = inner(u, gradient, lead)
    dtheta = -rho * along
    ratio = torch.where(clipped, along / torch.where(clipped, squares, 1.0), 0.0)
    a = u.map(lambda u, g: over(-theta * rho, u) * (u - over(ratio, g) * g), gradient)

    scale = factor if row_weights is None else factor * row_weights.unsqueeze(-1)
    p_bar = linear(k, a.w1, a.b1)
    dh_bar = p_bar * slope
    e_bar = linear(h, a.w2, a.b2) + dh_bar @ weights.w2.mT
    r_bar = scale * e_bar
    h_bar = e @ a.w2 + r_bar @ weights.w2
    z_bar = h_bar * slope + p_bar * dh * curve
    # The loss adds its own gradients of first order.
    p_loss, e_loss = (over(dloss, x) * x for x in (p, e))
    dk = p @ a.w1 + (z_bar + p_loss) @ weights.w1
    dv = -r_bar - e_loss
    by_weights = MemoryWeights(
        (z_bar + p_loss).mT @ k,
        (z_bar + p_loss).sum(-2),
        e.mT @ dh_bar + (r_bar + e_loss).mT @ h,
        (r_bar + e_loss).sum(-2),
    )
    dw = by_weights.map(
        lambda g, u, skipped: g + over(1.0 - alpha, u) * u + skipped, dweights, dw_skipped
    )
    drows = None
    if row_weights is not None:
        by_loss = over(dloss, row_weights) * (0.5 * factor) * r.square().sum(-1)
        drows = factor * (e_bar * r).sum(-1) + by_loss
    return dk.to(dtype), dv.to(dtype), dw, ds, dalpha, deta, dtheta, drows


def loss_factor(reduction: str, k: Tensor) -> float:
    """Twice the factor of the sum of the residuals' squares in the loss, k being [.., N, D]."""
    rows, width = k.shape[-2:]
    count = {"sum": 1, "mean_feature": width, "mean_all": rows * width}[reduction]
    return 2.0 / max(count, 1)


def inner(a: Weights, b: Weights, lead: int) -> Tensor:
    """<a, b> over all tensors, for every leading index."""
    parts = [(x * y).flatten(lead).sum(-1) for x, y in zip(a, b, strict=True)]
    return functools.reduce(torch.add, parts)
