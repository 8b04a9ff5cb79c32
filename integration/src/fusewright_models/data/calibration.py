"""How far predicted distributions are those that targets come from.

    coverage    how many targets lie in central intervals of the levels 0.5, 0.8 and 0.95
    PIT         F(y) of each target, in ten bins: a tenth each where predictions are right; more at
                both ends where they are too narrow, more in the middle where they are too wide
    CRPS        integral of (F(x) - [x >= y])^2 over x, in the units of y: the mean absolute error
                of a prediction without spread, and lowest in expectation for the right F

Of a mixture of Gaussians with weights w, means mu and standard deviations sigma

    CRPS = sum_i w_i A(y - mu_i, sigma_i^2)
           - 1/2 sum_ij w_i w_j A(mu_i - mu_j, sigma_i^2 + sigma_j^2)
    A(m, s^2) = 2 s phi(m / s) + m (2 Phi(m / s) - 1)            E |m + s Z| of Z ~ N(0, 1)

Grimit, Gneiting, Berrocal and Johnson 2006, https://doi.org/10.1256/qj.05.235.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from fusewright.mixture_head import GaussianMixtureHead
from torch import Tensor

# Of central intervals: how many of the targets should lie in them.
LEVELS = (0.5, 0.8, 0.95)
# Of the histogram of F(y).
BINS = 10


def mixture_crps(head: GaussianMixtureHead, params: Tensor, y: Tensor) -> Tensor:
    """The CRPS of every target, fp64.

    Args:
        head: says what the parameters mean.
        params: ``[..., d_y, K, 3]``.
        y: ``[..., d_y]``.

    Returns:
        ``[..., d_y]``.
    """
    params, y = params.double(), y.double()
    weight = params[..., 0].softmax(-1)
    # A component is a mixture of one, whatever its weight was.
    single = F.pad(params[..., 1:], (1, 0)).unsqueeze(-2)
    mean, variance = head.mean(single), head.variance(single)
    distance = _absolute(y.unsqueeze(-1) - mean, variance)
    apart = _absolute(
        mean.unsqueeze(-1) - mean.unsqueeze(-2), variance.unsqueeze(-1) + variance.unsqueeze(-2)
    )
    spread = torch.einsum("...i,...j,...ij->...", weight, weight, apart)
    return (weight * distance).sum(-1) - 0.5 * spread


def _absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """E |X| of X ~ N(mean, variance)."""
    sigma = variance.sqrt()
    z = mean / sigma
    density = (-0.5 * z.square()).exp() / math.sqrt(2.0 * math.pi)
    return 2.0 * sigma * density + mean * torch.erf(z / math.sqrt(2.0))


def covered(position: Tensor) -> Tensor:
    """Of each level whether its central interval has the targets with F(y) = ``position [...]``,
    fp64 ``[levels, ...]``.
    """
    distance = (position - 0.5).abs()
    return torch.stack([(distance < level / 2).double() for level in LEVELS])


def binned(position: Tensor) -> Tensor:
    """Likewise which bin has F(y), ``[bins, ...]``; the last one has 1, too."""
    number = (position * BINS).floor().clamp(0, BINS - 1)
    return torch.stack([(number == each).double() for each in range(BINS)])
