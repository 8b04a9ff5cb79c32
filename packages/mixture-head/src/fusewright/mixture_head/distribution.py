"""What one asks of Gaussian mixtures: mean, variance, distribution function, quantiles, draws.

``params [..., K, 3]``, ``scale``, ``log_sigma_range`` and ``eps`` are those of
:func:`mixture_log_likelihood`, and so are the errors. Plain torch, in fp32 (fp64 for fp64 params),
under autocast too, without a host synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import reference
from ._checks import (
    EPS,
    LOG_SIGMA_RANGE,
    Scale,
    check_device,
    check_floating,
    check_params,
    checked_number,
    checked_scale,
)

Tensor = torch.Tensor
Components = tuple[Tensor, Tensor, Tensor, Tensor]
# As often as the precision has bits, and as often again for brackets far wider than the quantile.
HALVINGS = {torch.float32: 48, torch.float64: 96}


def mixture_mean(
    params: Tensor,
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
) -> Tensor:
    """E[y] = sum_k pi_k mu_k, ``[...]``."""
    log_weight, mean, *_ = _components(params, scale, log_sigma_range, eps)
    return (log_weight.exp() * mean).sum(-1)


def mixture_variance(
    params: Tensor,
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
) -> Tensor:
    """Var[y] = sum_k pi_k (sigma_k^2 + (mu_k - E[y])^2), ``[...]``."""
    log_weight, mean, sigma, _ = _components(params, scale, log_sigma_range, eps)
    weight = log_weight.exp()
    center = (weight * mean).sum(-1, keepdim=True)
    return (weight * (sigma.square() + (mean - center).square())).sum(-1)


def mixture_cdf(
    params: Tensor,
    y: Tensor,
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
) -> Tensor:
    """P(Y <= y) = sum_k pi_k Phi((y - mu_k) / sigma_k).

    Args:
        params: ``[..., K, 3]``.
        y: broadcasts with the leading shape of params.
        scale, log_sigma_range, eps: as in :func:`mixture_log_likelihood`.

    Returns:
        The broadcast shape; differentiable in params and y.
    """
    components = _components(params, scale, log_sigma_range, eps)
    check_floating("y", y)
    check_device("y", y, "params", params)
    return _cdf(components, y.to(components[1].dtype))


def mixture_quantiles(
    params: Tensor,
    levels: Tensor | Sequence[float],
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
) -> Tensor:
    """Where the distribution function reaches each level, by halving a bracket that the
    components' own quantiles make.

    Args:
        params: ``[..., K, 3]``.
        levels: ``[Q]`` probabilities, a tensor on params' device or numbers. 0 and 1 give -inf and
            inf, what is not within [0, 1] NaN.
        scale, log_sigma_range, eps: as in :func:`mixture_log_likelihood`.

    Returns:
        ``[..., Q]``; differentiable in params and levels, by the derivative of the inverse.
    """
    components = _components(params, scale, log_sigma_range, eps)
    log_weight, mean, sigma, _ = components
    levels = _checked_levels(levels, mean)
    with torch.no_grad():
        # A component without weight has no say.
        counts = (log_weight > -torch.inf)[..., None]
        own = mean[..., None] + sigma[..., None] * torch.special.ndtri(levels)
        low = torch.where(counts, own, torch.inf).amin(-2)
        high = torch.where(counts, own, -torch.inf).amax(-2)
        ends = low.isinf() | low.isnan()
        found = low
        for _ in range(HALVINGS[mean.dtype]):
            middle = low + 0.5 * (high - low)
            below = _cdf(_of_levels(components), middle) < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        found = torch.where(ends, found, low + 0.5 * (high - low))
    # F(x; params) = level gives dx = (dlevel - dF) / p(x): a Newton step that moves nothing.
    center = torch.where(ends, 0.0, found)
    log_weight, mean, sigma, log_sigma = components = _of_levels(components)
    z = (center[..., None] - mean) / sigma
    density = (log_weight - 0.5 * z.square() - log_sigma - reference.HALF_LOG_2_PI).exp().sum(-1)
    density = density.detach().clamp(min=torch.finfo(mean.dtype).tiny)
    step = (levels - _cdf(components, center)) / density
    return torch.where(ends, found, center + (step - step.detach()))


def mixture_sample(
    params: Tensor,
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One draw from every mixture, ``[...]``; no gradient flows through it.

    Args:
        params: ``[..., K, 3]``; expand it for more draws.
        scale, log_sigma_range, eps: as in :func:`mixture_log_likelihood`.
        generator: random numbers of the device of params; torch's default one if None.
    """
    log_weight, mean, sigma, _ = _components(params.detach(), scale, log_sigma_range, eps)
    # Of clocks that ring at rates pi_k, the k-th rings first with probability pi_k.
    log_time = torch.empty_like(log_weight).exponential_(generator=generator).log() - log_weight
    first = log_time.argmin(-1, keepdim=True)
    center, spread = (x.gather(-1, first).squeeze(-1) for x in (mean, sigma))
    return center + spread * torch.empty_like(center).normal_(generator=generator)


def _components(
    params: Tensor, scale: Scale, log_sigma_range: Sequence[float], eps: float
) -> Components:
    check_params(params)
    form = checked_scale(scale, log_sigma_range, eps)
    return reference.mixture_components(params, **form._asdict())


def _checked_levels(levels: Tensor | Sequence[float], like: Tensor) -> Tensor:
    """levels, a tensor or numbers, as a vector of the dtype and on the device of ``like``."""
    if isinstance(levels, Tensor):
        check_floating("levels", levels)
        check_device("levels", levels, "params", like)
        if levels.ndim != 1:
            raise ValueError(f"levels must have one axis, got shape {tuple(levels.shape)}")
        return levels.to(like.dtype)
    if not isinstance(levels, Sequence):
        raise TypeError(f"levels must be a tensor or numbers, got {type(levels).__name__}")
    numbers = [checked_number("levels", level, -math.inf, math.inf) for level in levels]
    # Filled in, because a copy from the host would wait for the card.
    found = like.new_empty(len(numbers))
    for index, number in enumerate(numbers):
        found[index].fill_(number)
    return found


def _of_levels(components: Components) -> Components:
    """Components beside a new axis of levels before their own."""
    log_weight, mean, sigma, log_sigma = (x.unsqueeze(-2) for x in components)
    return log_weight, mean, sigma, log_sigma


def _cdf(components: Components, y: Tensor) -> Tensor:
    log_weight, mean, sigma, _ = components
    z = (y[..., None] - mean) / sigma
    return (log_weight.exp() * torch.special.ndtr(z)).sum(-1)
