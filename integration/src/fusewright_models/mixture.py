"""Gaussian mixtures: the head that makes their parameters, log-likelihood, moments, sampling.

    log pi   = log_softmax(w)
    log p(y) = logsumexp_k [ log pi_k - ((y - mu_k) / sigma_k)^2 / 2 - log sigma_k - log(2 pi) / 2 ]

``params [..., K, 3]`` holds (w, mu, s) along its last axis, one mixture of K components per leading
index. s is log sigma, clamped to [-7, 5] ("log_sigma"), or sigma = softplus(s) + 1e-3 ("softplus").
Everything is computed in at least fp32, under autocast too: at sigma = 1e-3 the rounding of mu to
bf16 alone is many standard deviations.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Scale = Literal["log_sigma", "softplus"]
SCALES = get_args(Scale)

LOG_SIGMA_RANGE = (-7.0, 5.0)
SOFTPLUS_FLOOR = 1e-3
HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


def mixture_components(params: Tensor, *, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """Split raw parameters into log weights, means and log standard deviations.

    Args:
        params: ``[..., K, 3]``, floating point.
        scale: what the third parameter means, "log_sigma" or "softplus".

    Returns:
        ``(log pi, mu, log sigma)``, each ``[..., K]``, in fp32 or in fp64 as ``params``.

    Raises:
        ValueError: the last axis is not 3, K = 0, or ``scale`` is neither of the two.
    """
    if params.ndim < 2 or params.shape[-1] != 3 or params.shape[-2] == 0:
        raise ValueError(f"params must be [..., K, 3] with K >= 1; got {list(params.shape)}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {SCALES}; got {scale!r}")
    logits, mean, raw = params.to(torch.promote_types(params.dtype, torch.float32)).unbind(-1)
    if scale == "log_sigma":
        log_sigma = raw.clamp(*LOG_SIGMA_RANGE)
    else:
        log_sigma = (F.softplus(raw) + SOFTPLUS_FLOOR).log()
    return logits.log_softmax(-1), mean, log_sigma


def mixture_log_likelihood(params: Tensor, y: Tensor, *, scale: Scale = "log_sigma") -> Tensor:
    """log p(y) of every mixture.

    Args:
        params: ``[..., K, 3]`` raw parameters.
        y: ``[...]`` observations, one per mixture.
        scale: what the third parameter means, "log_sigma" or "softplus".

    Returns:
        ``[...]`` in nats, differentiable in ``params`` and ``y``. A NaN in ``y`` gives NaN there.

    Raises:
        ValueError: the leading shape of ``params`` is not the shape of ``y``.
    """
    if params.shape[:-2] != y.shape:
        raise ValueError(
            f"params must be [*y.shape, K, 3] with y {list(y.shape)}; got {list(params.shape)}"
        )
    with torch.autocast(params.device.type, enabled=False):
        log_weight, mean, log_sigma = mixture_components(params, scale=scale)
        z = (y.unsqueeze(-1) - mean) * (-log_sigma).exp()
        component = log_weight - 0.5 * z.square() - log_sigma - HALF_LOG_2_PI
        return component.logsumexp(-1)


def mixture_mean(params: Tensor, *, scale: Scale = "log_sigma") -> Tensor:
    """E[y] = sum_k pi_k mu_k, ``[...]``."""
    log_weight, mean, _ = mixture_components(params, scale=scale)
    return (log_weight.exp() * mean).sum(-1)


def mixture_variance(params: Tensor, *, scale: Scale = "log_sigma") -> Tensor:
    """Var[y] = sum_k pi_k (sigma_k^2 + (mu_k - E[y])^2), ``[...]``."""
    log_weight, mean, log_sigma = mixture_components(params, scale=scale)
    weight = log_weight.exp()
    centre = (weight * mean).sum(-1, keepdim=True)
    return (weight * ((2.0 * log_sigma).exp() + (mean - centre).square())).sum(-1)


def mixture_sample(
    params: Tensor, *, scale: Scale = "log_sigma", generator: torch.Generator | None = None
) -> Tensor:
    """One draw from every mixture, ``[...]``; no gradient flows through it.

    Args:
        params: ``[..., K, 3]`` raw parameters.
        scale: what the third parameter means, "log_sigma" or "softplus".
        generator: random numbers of the device of ``params``; torch's default one if None.
    """
    log_weight, mean, log_sigma = mixture_components(params.detach(), scale=scale)
    # The largest of log pi_k minus the log of an exponential draw falls on k with probability pi_k.
    race = log_weight - torch.empty_like(log_weight).exponential_(generator=generator).log()
    chosen = race.argmax(-1, keepdim=True)
    mean, log_sigma = (t.gather(-1, chosen).squeeze(-1) for t in (mean, log_sigma))
    noise = torch.empty_like(mean).normal_(generator=generator)
    return mean + log_sigma.exp() * noise


class MixtureHead(nn.Module):
    """K networks SiLU(t A_k) C_k per output: one dense product for all A_k, then one for each C_k.

    Args:
        width: d, width of the input.
        hidden_width: F, width of each network.
        components: K.
        outputs: d_y, each with K components of its own.
        stored_width: columns that A_k and rows that C_k have in storage, at least F; those beyond F
            are zero and stay zero under training.
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        components: int,
        *,
        outputs: int = 1,
        stored_width: int,
    ) -> None:
        super().__init__()
        self.hidden_width = hidden_width
        self.grid = (outputs, components)
        networks = outputs * components
        self.hidden = nn.Linear(width, networks * stored_width, bias=False)
        self.output = nn.Parameter(torch.empty(networks, stored_width, 3))

    def forward(self, t: Tensor) -> Tensor:
        """``t [B, N, d]`` to raw parameters ``[B, N, d_y, K, 3]``, never narrower than fp32."""
        hidden = F.silu(self.hidden(t)).unflatten(-1, self.output.shape[:2])
        with torch.autocast(t.device.type, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            params = torch.einsum("bnkf,kfp->bnkp", hidden.to(wide), self.output.to(wide))
        return params.unflatten(-2, self.grid)

    def padding(self) -> list[Tensor]:
        """Views of the stored weights that are not part of the model."""
        hidden = self.hidden.weight.unflatten(0, self.output.shape[:2])
        return [hidden[:, self.hidden_width :], self.output[:, self.hidden_width :]]
