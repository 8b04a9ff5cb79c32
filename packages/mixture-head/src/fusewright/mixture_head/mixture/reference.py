"""The log-likelihood of mixtures in plain torch: the specification, the yardstick of the tests and
the CPU implementation.

Everything is computed in fp32 (in fp64 for fp64 parameters), under autocast too. Gradients are
autograd's. The backward passes stand here for the derivatives of the ops, first and second.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .._core.precision import wide

Tensor = torch.Tensor
Components = tuple[Tensor, Tensor, Tensor, Tensor]

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)
# A finite target this many standard deviations away counts as just so far: squares and gradients
# stay finite.
FAR = 2.0**50


def mixture_components(
    params: Tensor, *, softplus: bool, low: float, high: float, eps: float
) -> Components:
    """(log pi, mu, sigma, log sigma), each ``[..., K]``, of params ``[..., K, 3]`` = (w, mu, s).

    log pi = log_softmax(w); log sigma = clamp(s, low, high), or sigma = softplus(s) + eps.
    """
    logits, mean, raw = wide(params).unbind(-1)
    if softplus:
        sigma = F.softplus(raw) + eps
        log_sigma = sigma.log()
    else:
        log_sigma = clamped(raw, low, high)
        sigma = log_sigma.exp()
    return logits.log_softmax(-1), mean, sigma, log_sigma


def mixture_log_likelihood(
    params: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    softplus: bool,
    low: float,
    high: float,
    eps: float,
) -> Tensor:
    """log p(y) of every mixture, ``[...]``; 0 where mask is False."""
    params, y = without_masked(params, y, mask)
    components = mixture_components(params, softplus=softplus, low=low, high=high, eps=eps)
    component = log_joint(components, y)
    # Less its maximum before logsumexp, whose gradient is exp of a difference from its result:
    # there the logarithm of a number of ties is lost to the rounding of a distance. The lowest
    # finite number in place of -inf, whose distance to itself is NaN.
    top = component.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(component.dtype).min)
    log_p = (component - top).logsumexp(-1) + top.squeeze(-1)
    return log_p if mask is None else torch.where(mask, log_p, 0.0)


def mixture_nll(
    params: Tensor, y: Tensor, mask: Tensor | None = None, **scale: float | bool
) -> Tensor:
    """-mean(log p(y)) over the targets where mask is True; 0 where there is none."""
    log_p = mixture_log_likelihood(params, y, mask, **scale)  # type: ignore[arg-type]
    return log_p.sum() * mean_factor(log_p, mask)


def mean_factor(log_p: Tensor, mask: Tensor | None) -> Tensor:
    """-1 / the number of targets that count, or -1 where none does."""
    if mask is None:
        return log_p.new_full((), -1.0 / max(log_p.numel(), 1))
    return -1.0 / mask.sum().clamp(min=1).to(log_p.dtype)


def mixture_slopes(
    params: Tensor,
    y: Tensor,
    mask: Tensor | None,
    *,
    softplus: bool,
    low: float,
    high: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """d log p / d params ``[..., K, 3]`` and d log p / d y ``[...]``.

    With the responsibilities r = softmax(log pi + log N(y; mu, sigma)) and z = (y - mu) / sigma:

        d/dw = r - pi,  d/dmu = r z / sigma,  d/dlog sigma = r (z^2 - 1),  d/dy = -sum r z / sigma
    """
    params, y = without_masked(params, y, mask)
    components = mixture_components(params, softplus=softplus, low=low, high=high, eps=eps)
    log_weight, mean, sigma, _ = components
    raw = wide(params[..., 2])
    z, _ = standardised(y, mean, sigma)
    r = log_joint(components, y).softmax(-1)
    slope_mean = r * z / sigma
    slope_log_sigma = r * (z.square() - 1.0)
    if softplus:
        slope_raw = slope_log_sigma * raw.sigmoid() / sigma
    else:
        slope_raw = slope_log_sigma * ((raw >= low) & (raw <= high))
    slope = torch.stack([r - log_weight.exp(), slope_mean, slope_raw], -1)
    slope_y = -slope_mean.sum(-1)
    if mask is None:
        return slope, slope_y
    return torch.where(mask[..., None, None], slope, 0.0), torch.where(mask, slope_y, 0.0)


def mixture_backward(
    upstream: Tensor,
    factor: Tensor | None,
    params: Tensor,
    y: Tensor,
    mask: Tensor | None,
    **scale: float | bool,
) -> tuple[Tensor, Tensor]:
    """(dparams, dy) for the gradient ``upstream`` of every log p, or of the mean whose factor this
    is; zeros where mask is False, whatever ``upstream`` holds there.
    """
    slope, slope_y = mixture_slopes(params, y, mask, **scale)  # type: ignore[arg-type]
    g = upstream if factor is None else upstream * factor
    g = g if mask is None else torch.where(mask, g, 0.0)
    return (g[..., None, None] * slope).to(params.dtype), (g * slope_y).to(y.dtype)


def without_masked(params: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeros in place of what must not count: NaN times a gradient of zero would be NaN."""
    if mask is None:
        return params, y
    return torch.where(mask[..., None, None], params, 0.0), torch.where(mask, y, 0.0)


def log_joint(components: Components, y: Tensor) -> Tensor:
    """log pi + log N(y; mu, sigma) of every component."""
    log_weight, mean, sigma, log_sigma = components
    z, far = standardised(y, mean, sigma)
    return log_weight - 0.5 * (z + far).square() - log_sigma - HALF_LOG_2_PI


def standardised(y: Tensor, mean: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """z = (y - mu) / sigma of every component, and 0. Past FAR nothing depends on the distance any
    more: there z is 0, and the second result is FAR, for an infinite y infinity, with the
    distance's sign.
    """
    y = y.to(mean.dtype)[..., None]
    # Of halves, because the difference of two finite numbers may overflow.
    half = 0.5 * y - 0.5 * mean
    is_far = half.abs() / sigma > 0.5 * FAR
    far = torch.where(y.isinf(), y.detach(), FAR * is_far * half.detach().sign())
    # Before the division, whose gradient would overflow where its quotient does.
    half = finite(half) * ~is_far
    return 2.0 * (half / sigma), far


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    """x, clamped to a range. Outside its gradient is multiplied by 0 and not, as clamp does it,
    replaced: NaN stays NaN.
    """
    x = finite(x)
    inside = (x >= low) & (x <= high)
    return x.detach().clamp(low, high) + inside * (x - x.detach())


def finite(x: Tensor) -> Tensor:
    """x with the largest finite numbers in place of infinities, whose products with 0 and distances
    to themselves are NaN; NaN stays.
    """
    return x.nan_to_num(nan=torch.nan)
