"""The head that computes the parameters of Gaussian mixtures from a row, and evaluates them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._core.backends import Backend, check_backend
from .._core.checks import checked_count
from .._core.padding import (
    Padded,
    clear_padding_of,
    keep_padding_out,
    padded_width,
    padding_of,
)
from .._core.typed import called_as
from ..common.scale import EPS, LOG_SIGMA_RANGE, Scale, checked_scale
from ..heads.grouped_heads import check_recompute, grouped_heads
from ..mixture.distribution import (
    mixture_cdf,
    mixture_mean,
    mixture_quantiles,
    mixture_sample,
    mixture_variance,
)
from ..mixture.mixture_nll import mixture_log_likelihood, mixture_nll


class GaussianMixtureHead(nn.Module):
    """K networks SiLU(t A_k^T) C_k for each output: parameters (w, mu, s) of a mixture.

    Calling the head computes the parameters; its methods take them, so that one set serves many
    calls.

    A state dict holds ``[d_y * K * F, d]`` and ``[d_y * K, F, 3]``, copies without the padding; one
    with it loads too, if it is zero. Of another F it is a size mismatch. States of optimizers have
    the stored shapes, and so have sharded weights (DTensors), in a state dict too.

    Args:
        width: d, width of the input.
        hidden_width: F, width of each network.
        components: K.
        outputs: d_y, each with K components of its own.
        stored_width: S, rows that A_k and C_k have in storage; F rounded up to a multiple of 32
            where left out. Those beyond F are zero and stay zero under training.
        scale, log_sigma_range, eps: what s means, as in :func:`mixture_log_likelihood`.
        recompute: whether the hidden layer is computed again for the backward pass, as in
            :func:`grouped_heads`.
        backend: "auto", "triton" or "reference".
        device, dtype: of the weights.

    Attributes:
        hidden: ``nn.Linear(d, d_y * K * S, bias=False)``, all A_k.
        output: ``[d_y * K, S, 3]``, all C_k.

    Example:
        >>> head = GaussianMixtureHead(512, 1365, 10)
        >>> params = head(t)                              # [B, N, 512] to [B, N, 1, 10, 3]
        >>> head.loss(params, y).backward()               # y [B, N, 1]
        >>> low, high = head.quantiles(params, (0.05, 0.95)).unbind(-1)
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        components: int,
        *,
        outputs: int = 1,
        stored_width: int | None = None,
        scale: Scale = "log_sigma",
        log_sigma_range: Sequence[float] = LOG_SIGMA_RANGE,
        eps: float = EPS,
        recompute: bool = False,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments that the class names."""
        width = checked_count("width", width)
        hidden_width = checked_count("hidden_width", hidden_width)
        components = checked_count("components", components)
        outputs = checked_count("outputs", outputs)
        if stored_width is None:
            stored_width = padded_width(hidden_width)
        stored_width = checked_count("stored_width", stored_width)
        if stored_width < hidden_width:
            raise ValueError(
                f"stored_width must be at least hidden_width, {hidden_width}, got {stored_width}"
            )
        _, low, high, eps = checked_scale(scale, log_sigma_range, eps)
        check_recompute(recompute)
        check_backend(backend)
        super().__init__()
        self.hidden_width = hidden_width
        self.grid: tuple[int, int] = (outputs, components)
        self.scale_options: dict[str, Any] = dict(scale=scale, log_sigma_range=(low, high), eps=eps)
        self.recompute: bool = recompute
        self.backend: Backend = backend
        heads = outputs * components
        options: dict[str, Any] = dict(device=device, dtype=dtype)
        self.hidden: nn.Linear = nn.Linear(width, heads * stored_width, bias=False, **options)
        self.output: nn.Parameter = nn.Parameter(torch.empty(heads, stored_width, 3, **options))
        sizes = dict(width=hidden_width, stored=stored_width)
        self.padded: dict[str, Padded] = {
            "hidden.weight": Padded(axis=0, blocks=heads, **sizes),
            "output": Padded(axis=1, blocks=1, **sizes),
        }
        keep_padding_out(self)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights: uniform by fan-in, C_k a tenth of it, so that the first mixtures are
        near the standard normal; zeros beyond F.
        """
        bound = 1.0 / math.sqrt(self.hidden.in_features)
        nn.init.uniform_(self.hidden.weight, -bound, bound)
        bound = 0.1 / math.sqrt(self.hidden_width)
        nn.init.uniform_(self.output, -bound, bound)
        self.clear_padding()

    def clear_padding(self) -> None:
        """Set the stored weights beyond F to zero."""
        clear_padding_of(self)

    def padding(self) -> list[Tensor]:
        """Views of the stored weights that are not part of the model."""
        return padding_of(self)

    def forward(self, t: Tensor) -> Tensor:
        """``t [..., d]`` to raw parameters ``[..., d_y, K, 3]``, never narrower than fp32."""
        options: dict[str, Any] = dict(recompute=self.recompute, backend=self.backend)
        params = grouped_heads(t, self.hidden.weight, self.output, **options)
        return params.unflatten(-2, self.grid)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def loss(self, params: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Minus the mean log p(y) over the targets ``y [..., d_y]`` that count."""
        return mixture_nll(params, y, mask, **self.scale_options, backend=self.backend)

    def log_likelihood(self, params: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """log p(y) of every target, ``[..., d_y]``; 0 where mask is False."""
        return mixture_log_likelihood(params, y, mask, **self.scale_options, backend=self.backend)

    def sample(self, params: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One draw from every mixture, ``[..., d_y]``."""
        return mixture_sample(params, **self.scale_options, generator=generator)

    def mean(self, params: Tensor) -> Tensor:
        """E[y], ``[..., d_y]``."""
        return mixture_mean(params, **self.scale_options)

    def variance(self, params: Tensor) -> Tensor:
        """Var[y], ``[..., d_y]``."""
        return mixture_variance(params, **self.scale_options)

    def cdf(self, params: Tensor, y: Tensor) -> Tensor:
        """P(Y <= y); y broadcasts with ``[..., d_y]``."""
        return mixture_cdf(params, y, **self.scale_options)

    def quantiles(self, params: Tensor, levels: Tensor | Sequence[float]) -> Tensor:
        """Where P(Y <= y) reaches each of Q levels, ``[..., d_y, Q]``."""
        return mixture_quantiles(params, levels, **self.scale_options)

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        outputs, components = self.grid
        return (
            f"{self.hidden.in_features}, {self.hidden_width}, {components}, outputs={outputs}, "
            f"stored_width={self.output.shape[1]}, scale={self.scale_options['scale']!r}, "
            f"recompute={self.recompute}, backend={self.backend!r}"
        )
