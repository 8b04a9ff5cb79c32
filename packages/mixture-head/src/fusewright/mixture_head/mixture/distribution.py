"""Mean, variance, distribution function, quantiles and samples of Gaussian mixtures.

``params [..., K, 3]``, ``scale``, ``log_sigma_range`` and ``eps`` are those of
:func:`mixture_log_likelihood`, and so are the errors. Plain torch, in fp32 (fp64 for fp64 params),
under autocast too, without a host synchronisation. NaN in what a result depends on, as weights are
where every logit is -inf, makes it NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.checks import check_device, check_floating, checked_real
from ..common.scale import EPS, LOG_SIGMA_RANGE, Scale, checked_scale
from .checks import check_params, check_points
from .reference import Components, log_joint, mixture_components, standardised

Tensor = torch.Tensor
# Halvings until a bracket holds two neighbours: as many as the format has bits choose the sign, the
# exponent and the mantissa; a few more for what rounds to one side.
SPARE_HALVINGS = 6


def mixture_mean(
    params: Tensor,
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
) -> Tensor:
    """E[y] = sum_k pi_k mu_k, ``[...]``."""
    check_params(params)
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
    check_params(params)
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
    check_params(params)
    check_points(params, y)
    components = _components(params, scale, log_sigma_range, eps)
    return _cdf(components, y)


def mixture_quantiles(
    params: Tensor,
    levels: Tensor | Sequence[float],
    *,
    scale: Scale = "log_sigma",
    log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
    eps: float = EPS,
) -> Tensor:
    """The lowest number at which the distribution function, as computed, reaches each level.

    The components' own quantiles make a bracket, which is halved by the count of the floating-point
    numbers in it, about, until it holds two neighbours.

    Args:
        params: ``[..., K, 3]``.
        levels: ``[Q]`` probabilities, a tensor on params' device or numbers. 0 and 1 give -inf and
            inf, what is not within [0, 1] NaN.
        scale, log_sigma_range, eps: as in :func:`mixture_log_likelihood`.

    Returns:
        ``[..., Q]``; differentiable in params and levels, twice. No gradient flows through an
        infinite quantile, nor through one where the density is below the range of its dtype.
    """
    check_params(params)
    levels = _checked_levels(levels, params)
    components = _components(params, scale, log_sigma_range, eps)
    with torch.no_grad():
        quantiles = _bracketed_quantiles(levels, components)
    finite = quantiles.isfinite()
    with_levels = _with_level_axis(components)
    # A Newton step that moves nothing gives the first derivative; another one, from a centre that
    # has the first, gives the second too.
    center, levels = torch.where(finite, quantiles, 0.0), torch.where(finite, levels, 0.5)
    for _ in range(2):
        center = center + _newton_step(levels, center, with_levels)
    return torch.where(finite, center, quantiles)


def _bracketed_quantiles(levels: Tensor, components: Components) -> Tensor:
    """The quantiles ``[..., Q]``, without a derivative."""
    log_weight, mean, sigma, _ = components
    # A component without weight does not count.
    counts = (log_weight != -torch.inf)[..., None]
    own = mean[..., None] + sigma[..., None] * torch.special.ndtri(levels)
    low = torch.where(counts, own, torch.inf).amin(-2)
    high = torch.where(counts, own, -torch.inf).amax(-2)
    log_weight, mean, sigma, _ = _with_level_axis(components)
    for _ in range(torch.finfo(mean.dtype).bits + SPARE_HALVINGS):
        middle = _midpoint(low, high)
        below = _weighted_cdf(log_weight, (middle[..., None] - mean) / sigma) < levels
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    is_level = (levels >= 0.0) & (levels <= 1.0)
    return torch.where(_has_nan(components)[..., None] | ~is_level, torch.nan, high)


def _newton_step(levels: Tensor, center: Tensor, components: Components) -> Tensor:
    """Zero, with the derivatives of (level - F(center)) / p(center)."""
    density = log_joint(components, center).exp().sum(-1)
    vanishes = density < torch.finfo(density.dtype).tiny
    remainder = levels - _cdf(components, center)
    return (remainder - remainder.detach()) / torch.where(vanishes, torch.inf, density)


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
    check_params(params)
    components = _components(params.detach(), scale, log_sigma_range, eps)
    log_weight, mean, sigma, _ = components
    # Of clocks that ring at rates pi_k, the k-th rings first with probability pi_k.
    log_time = torch.empty_like(log_weight).exponential_(generator=generator).log() - log_weight
    first = log_time.argmin(-1, keepdim=True)
    center, spread = (x.gather(-1, first).squeeze(-1) for x in (mean, sigma))
    draw = center + spread * torch.empty_like(center).normal_(generator=generator)
    return torch.where(_has_nan(components), torch.nan, draw)


def _components(
    params: Tensor, scale: Scale, log_sigma_range: Sequence[float], eps: float
) -> Components:
    form = checked_scale(scale, log_sigma_range, eps)
    return mixture_components(params, **form._asdict())


def _checked_levels(levels: Tensor | Sequence[float], params: Tensor) -> Tensor:
    """levels, a tensor or numbers, as a vector of the computation's dtype on params' device."""
    dtype = torch.promote_types(params.dtype, torch.float32)
    if isinstance(levels, Tensor):
        check_floating("levels", levels)
        check_device("levels", levels, "params", params)
        if levels.ndim != 1:
            raise ValueError(f"levels must have one axis, got shape {tuple(levels.shape)}")
        return levels.to(dtype)
    if not isinstance(levels, Sequence):
        raise TypeError(f"levels must be a tensor or numbers, got {type(levels).__name__}")
    numbers = [checked_real("levels", level) for level in levels]
    # Filled in: a copy from the host would synchronise with the GPU.
    vector = params.new_empty(len(numbers), dtype=dtype)
    for index, number in enumerate(numbers):
        vector[index].fill_(number)
    return vector


def _with_level_axis(components: Components) -> Components:
    """The components with a new axis for the levels before their own: ``[..., 1, K]``."""
    log_weight, mean, sigma, log_sigma = (x.unsqueeze(-2) for x in components)
    return log_weight, mean, sigma, log_sigma


def _has_nan(components: Components) -> Tensor:
    """Where a parameter of a mixture is NaN, or its weights are."""
    log_weight, mean, sigma, _ = components
    return (log_weight.isnan() | mean.isnan() | sigma.isnan()).any(-1)


def _midpoint(low: Tensor, high: Tensor) -> Tensor:
    """A number in the bracket with about as many floating-point numbers on either side: 0 between
    signs; the geometric mean of numbers of different sizes, the mean of others.
    """
    info = torch.finfo(low.dtype)
    a, b = low.clamp(info.min, info.max), high.clamp(info.min, info.max)
    # Zero counts as the least number there is.
    size_a, size_b = (x.abs().clamp(min=info.smallest_normal * info.eps) for x in (a, b))
    far = (size_a > 2.0 * size_b) | (size_b > 2.0 * size_a)
    sign = torch.where(high > 0.0, 1.0, -1.0)
    middle = torch.where(far, sign * (size_a.sqrt() * size_b.sqrt()), a + 0.5 * (b - a))
    middle = torch.where((low < 0.0) & (high > 0.0), 0.0, middle)
    # Infinite ends may be all that the bracket holds.
    return torch.where(low == high, low, middle)


def _cdf(components: Components, y: Tensor) -> Tensor:
    log_weight, mean, sigma, _ = components
    z, far = standardised(y, mean, sigma)
    return _weighted_cdf(log_weight, z + far)


def _weighted_cdf(log_weight: Tensor, z: Tensor) -> Tensor:
    """The sum of pi Phi(z) over the components."""
    return (log_weight.exp() * torch.special.ndtr(z)).sum(-1)
