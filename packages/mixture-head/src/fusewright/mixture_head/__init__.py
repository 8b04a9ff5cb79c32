"""Gaussian mixture heads in Triton: the log-likelihood with its gradients in one kernel, grouped
heads over a shared input, and moments, distribution function, quantiles and samples of mixtures.
"""

from __future__ import annotations

from ._core.backends import Backend, available_backends
from ._core.version import installed_version
from ._core.warming import warm_up
from .common.scale import Scale
from .grouped.grouped_linear import grouped_linear
from .heads.grouped_heads import grouped_heads
from .layer.gaussian_mixture_head import GaussianMixtureHead
from .mixture.distribution import (
    mixture_cdf,
    mixture_mean,
    mixture_quantiles,
    mixture_sample,
    mixture_variance,
)
from .mixture.mixture_nll import mixture_log_likelihood, mixture_nll

__version__ = installed_version(__name__)

__all__ = [
    "Backend",
    "GaussianMixtureHead",
    "Scale",
    "__version__",
    "available_backends",
    "grouped_heads",
    "grouped_linear",
    "mixture_cdf",
    "mixture_log_likelihood",
    "mixture_mean",
    "mixture_nll",
    "mixture_quantiles",
    "mixture_sample",
    "mixture_variance",
    "warm_up",
]
