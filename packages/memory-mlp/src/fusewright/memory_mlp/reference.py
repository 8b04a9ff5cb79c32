"""The memory and its pooled update in plain torch: the specification, the yardstick of the tests
and the CPU implementation. ``scan_reference`` holds the scan over tokens.

Everything is computed in fp32 (in fp64 for fp64 inputs); weights and momentum stay so, what is as
wide as a key is rounded once, to the keys' dtype. Gradients are autograd's. The backward pass
stands here for the derivatives of the op, first and second.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .weights import MemoryWeights

Tensor = torch.Tensor


class Rows(NamedTuple):
    """What the inner loss and its gradients know of every pair of key and value.

    Attributes:
        h: act(z) of the hidden layer z = w1 k + b1.
        slope, curve: act'(z) and act''(z).
        r: M(k) - v.
        e: the gradient of the loss by M(k).
        dh: the gradient by h.
        p: the gradient by z, dh * slope.
    """

    h: Tensor
    slope: Tensor
    curve: Tensor
    r: Tensor
    e: Tensor
    dh: Tensor
    p: Tensor


def activated(z: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(act, act', act'') of z for "silu", "relu" or "gelu" (the exact one)."""
    if activation == "silu":
        s = torch.sigmoid(z)
        return z * s, s * (1.0 + z * (1.0 - s)), s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))
    if activation == "relu":
        step = (z > 0.0).to(z.dtype)
        return F.relu(z), step, torch.zeros_like(z)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    below = 0.5 * torch.erfc(-z / math.sqrt(2.0))
    return z * below, below + z * density, density * (2.0 - z * z)


def memory_read(q: Tensor, weights: MemoryWeights, *, activation: str = "silu") -> Tensor:
    """M(q) for q [*lead, N, D]."""
    h = activated(linear(wide(q), weights.w1, weights.b1), activation)[0]
    return linear(h, weights.w2, weights.b2).to(q.dtype)


def rows_of(
    k: Tensor,
    v: Tensor,
    row_weights: Tensor | None,
    weights: MemoryWeights,
    factor: float,
    activation: str,
) -> Rows:
    """The loss is ``factor / 2`` times the sum over rows and features of row_weight * r^2."""
    h, slope, curve = activated(linear(k, weights.w1, weights.b1), activation)
    r = linear(h, weights.w2, weights.b2) - v
    e = factor * r if row_weights is None else factor * row_weights.unsqueeze(-1) * r
    dh = e @ weights.w2
    return Rows(h, slope, curve, r, e, dh, dh * slope)


def gradients_of(k: Tensor, rows: Rows) -> MemoryWeights:
    """The gradient of the loss by the weights."""
    return MemoryWeights(rows.p.mT @ k, rows.p.sum(-2), rows.e.mT @ rows.h, rows.e.sum(-2))


def memory_update(
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
) -> tuple[MemoryWeights, MemoryWeights, Tensor, Tensor, Tensor]:
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
        came = descent(k, v, row_weights, weights, factor, activation, lead)
    finite = came.squares.sqrt().isfinite()
    used, inputs = came, Inputs(k, v, row_weights, weights, momentum, alpha, eta, theta)
    if torch.is_grad_enabled():
        # Autograd multiplies a skipped memory's gradients, zeros, by what is not finite.
        inputs = inputs.zero_unless(finite)
        used = descent(*inputs[:4], factor, activation, lead)
    rho, _ = clip(used.squares, max_grad_norm)

    def stepped(s: Tensor, g: Tensor) -> Tensor:
        return over(inputs.eta, s) * s - over(inputs.theta * rho, g) * g

    def kept(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(over(finite, new), new, old)

    moved = inputs.momentum.map(stepped, used.gradient)
    written = inputs.weights.map(lambda w, s: over(1.0 - inputs.alpha, w) * w + s, moved)
    loss = torch.where(finite, used.loss, came.loss)
    return (
        written.map(kept, weights),
        moved.map(kept, momentum),
        loss,
        came.squares.sqrt(),
        ~finite,
    )


class Inputs(NamedTuple):
    """What a step takes; k and v wide."""

    k: Tensor
    v: Tensor
    row_weights: Tensor | None
    weights: MemoryWeights
    momentum: MemoryWeights
    alpha: Tensor
    eta: Tensor
    theta: Tensor

    def zero_unless(self, finite: Tensor) -> Inputs:
        """Zeros for every memory that is not ``finite [*lead]``."""

        def used(x: Tensor) -> Tensor:
            return torch.where(over(finite, x), x, 0.0)

        k, v, row_weights, weights, momentum, *gates = self
        row_weights = None if row_weights is None else used(row_weights)
        rows = used(k), used(v), row_weights
        return Inputs(*rows, weights.map(used), momentum.map(used), *map(used, gates))


class Descent(NamedTuple):
    """The gradient G of the loss by the weights, the loss ``[*lead]``, and |G| squared."""

    gradient: MemoryWeights
    loss: Tensor
    squares: Tensor


def descent(
    k: Tensor,
    v: Tensor,
    row_weights: Tensor | None,
    weights: MemoryWeights,
    factor: float,
    activation: str,
    lead: int,
) -> Descent:
    rows = rows_of(k, v, row_weights, weights, factor, activation)
    gradient = gradients_of(k, rows)
    loss = 0.5 * (rows.e * rows.r).flatten(lead).sum(-1)
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
        came = descent(k, v, row_weights, weights, factor, activation, lead)
    finite = came.squares.sqrt().isfinite()
    inputs = Inputs(k, v, row_weights, weights, momentum, alpha, eta, theta)
    k, v, row_weights, weights, momentum, alpha, eta, theta = inputs.zero_unless(finite)
    rows = rows_of(k, v, row_weights, weights, factor, activation)
    gradient = gradients_of(k, rows)
    squares = inner(gradient, gradient, lead)
    rho, clipped = clip(squares, max_grad_norm)

    def if_finite(x: Tensor) -> Tensor:
        return torch.where(over(finite, x), x, 0.0)

    def if_skipped(x: Tensor) -> Tensor:
        return torch.where(over(finite, x), 0.0, x)

    # A step that was skipped hands on what it gets, and nothing else.
    dw_skipped, ds_skipped = dweights.map(if_skipped), dmomentum.map(if_skipped)
    dweights, dmomentum, dloss = dweights.map(if_finite), dmomentum.map(if_finite), if_finite(dloss)
    u = dweights.map(torch.add, dmomentum)
    ds = u.map(lambda u, skipped: over(eta, u) * u + skipped, ds_skipped)
    dalpha, deta = -inner(dweights, weights, lead), inner(u, momentum, lead)
    along = inner(u, gradient, lead)
    dtheta = -rho * along
    share = torch.where(clipped, along / torch.where(clipped, squares, 1.0), 0.0)
    a = u.map(lambda u, g: over(-theta * rho, u) * (u - over(share, g) * g), gradient)

    scale = factor if row_weights is None else factor * row_weights.unsqueeze(-1)
    p_bar = linear(k, a.w1, a.b1)
    dh_bar = p_bar * rows.slope
    e_bar = linear(rows.h, a.w2, a.b2) + dh_bar @ weights.w2.mT
    r_bar = scale * e_bar
    h_bar = rows.e @ a.w2 + r_bar @ weights.w2
    z_bar = h_bar * rows.slope + p_bar * rows.dh * rows.curve
    # The loss adds its own gradients of first order.
    p_loss, e_loss = (over(dloss, x) * x for x in (rows.p, rows.e))
    dk = rows.p @ a.w1 + (z_bar + p_loss) @ weights.w1
    dv = -r_bar - e_loss
    by_weights = MemoryWeights(
        (z_bar + p_loss).mT @ k,
        (z_bar + p_loss).sum(-2),
        rows.e.mT @ dh_bar + (r_bar + e_loss).mT @ rows.h,
        (r_bar + e_loss).sum(-2),
    )
    dw = by_weights.map(
        lambda g, u, skipped: g + over(1.0 - alpha, u) * u + skipped, dweights, dw_skipped
    )
    drows = None
    if row_weights is not None:
        by_loss = over(dloss, row_weights) * (0.5 * factor) * rows.r.square().sum(-1)
        drows = factor * (e_bar * rows.r).sum(-1) + by_loss
    return dk.to(dtype), dv.to(dtype), dw, ds, dalpha, deta, dtheta, drows


def loss_factor(reduction: str, k: Tensor) -> float:
    """Twice what the sum of the squares of the residuals is multiplied with, k being [.., N, D]."""
    rows, width = k.shape[-2:]
    count = {"sum": 1, "mean_feature": width, "mean_all": rows * width}[reduction]
    return 2.0 / max(count, 1)


def inner(a: MemoryWeights, b: MemoryWeights, lead: int) -> Tensor:
    """<a, b> over all four tensors, for every leading index."""
    parts = [(x * y).flatten(lead).sum(-1) for x, y in zip(a, b, strict=True)]
    return parts[0] + parts[1] + parts[2] + parts[3]


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x weight^T + bias, for every leading index."""
    return x @ weight.mT + bias.unsqueeze(-2)


def over(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each leading index, against x with more axes."""
    return numbers.reshape((*numbers.shape, *(1,) * (x.ndim - numbers.ndim)))


def wide(x: Tensor) -> Tensor:
    """x in the precision of the products: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()
