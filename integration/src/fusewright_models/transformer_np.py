"""TransformerNP: a transformer neural process for regression from a context set.

    e  = SiLU([x ; y] E1) E2                  of M context rows, then of N target rows with y = 0
    h <- h + softmax(q k^T / sqrt(D)) v Wo    q of every row; k and v of the context rows alone
    h <- h + SiLU(LN(h) W1) W2                q, k, v, each a product of LN(h)     (pre-norm form)
    (w, mu, s)_k = SiLU(LN(h_target) A_k) C_k       k = 1 ... K mixture components

Post-norm form: h <- LN(h + attention(h)), h <- LN(h + feed_forward(h)), no norm after the last.

B tasks, M context rows, N target rows, T = M + N, d width, H heads of width D = d / H, F width of
the feed-forward, K components. There is no positional term, no bias and no dropout: a prediction
does not depend on the order of the context, follows that of the targets, and sees no other target.

Two savings are exact. Targets are never keys, so keys and values are projected for context rows
only; and only target rows reach the prediction, so the last block computes its context rows as far
as keys and values and no further.

F is stored rounded up to a multiple of 32, since rows of 1365 bf16 numbers are not 16-byte aligned.
The stored columns that are not used start at zero, get gradients of exactly zero, and stay zero.

Neural processes with attention: https://arxiv.org/abs/2207.04179.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from fusewright.norm import LayerNorm
from torch import Tensor, nn

from .mixture import (
    SCALES,
    MixtureHead,
    Scale,
    mixture_log_likelihood,
    mixture_mean,
    mixture_sample,
    mixture_variance,
)

Backend = Literal["auto", "triton", "reference"]
Norm = Literal["pre", "post"]
BACKENDS = get_args(Backend)
NORMS = get_args(Norm)

STORED_MULTIPLE = 32


@dataclass(frozen=True)
class TransformerNPConfig:
    """The shape of a TransformerNP; the defaults are the 12-layer model of 36.7 million parameters.

    Attributes:
        x_width: coordinates of an input (d_x).
        y_width: outputs (d_y), each with a mixture of its own, independent given the prediction.
        width: d, divisible by ``heads``.
        layers: number of blocks, at least 1.
        heads: H.
        feed_forward_width: F of the blocks and of the mixture head.
        components: K, mixture components per output.
        norm: "pre" or "post".
        scale: standard deviations as "log_sigma" or "softplus".
        indicator: one more input, 1 in context rows and 0 in target rows. Without it a context row
            with y = 0 and a target row at the same x start equal.
    """

    x_width: int = 10
    y_width: int = 1
    width: int = 512
    layers: int = 12
    heads: int = 8
    feed_forward_width: int = 1365
    components: int = 10
    norm: Norm = "pre"
    scale: Scale = "log_sigma"
    indicator: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1 and field.name != "indicator":
                raise ValueError(f"{field.name} must be at least 1; got {value}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be divisible by heads; got width {self.width}, heads {self.heads}"
            )
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {NORMS}; got {self.norm!r}")
        if self.scale not in SCALES:
            raise ValueError(f"scale must be one of {SCALES}; got {self.scale!r}")

    @property
    def stored_width(self) -> int:
        """F rounded up to a multiple of 32."""
        return math.ceil(self.feed_forward_width / STORED_MULTIPLE) * STORED_MULTIPLE


class Prediction(NamedTuple):
    """What the model says of every target, each ``[B, N, d_y]`` in fp32.

    Attributes:
        mean: mean of the mixture.
        variance: variance of the mixture, noise of the observation included.
        sample: one draw, each target on its own.
    """

    mean: Tensor
    variance: Tensor
    sample: Tensor


def rectangular_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v per head, q ``[B, Nq, H, D]``, k and v ``[B, M, H, D]``."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _uniform_(weight: Tensor, fan_in: int, gain: float = 1.0) -> None:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)) times ``gain``; torch's own for a linear layer at 1."""
    nn.init.uniform_(weight, -gain / math.sqrt(fan_in), gain / math.sqrt(fan_in))


def layer_norm(norm: LayerNorm, h: Tensor) -> Tensor:
    """Norm in the dtype of ``h``, statistics in fp32.

    Autocast would hand back fp32, as torch's layer norm does: twice the bytes, and the residual
    stream of the post-norm form would leave the compute dtype.
    """
    with torch.autocast(h.device.type, enabled=False):
        return norm(h)


class Embedder(nn.Module):
    """Two-layer SiLU embedding of context rows [x ; y] and target rows [x ; 0]."""

    def __init__(self, config: TransformerNPConfig) -> None:
        super().__init__()
        self.indicator = config.indicator
        self.y_width = config.y_width
        inputs = config.x_width + config.y_width + config.indicator
        self.hidden = nn.Linear(inputs, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_context: Tensor, y_context: Tensor, x_target: Tensor) -> Tensor:
        context = torch.cat([x_context, y_context], dim=-1)
        if self.indicator:
            context = F.pad(context, (0, 1), value=1.0)
        target = F.pad(x_target, (0, self.y_width + self.indicator))
        rows = torch.cat([context, target], dim=1).to(self.hidden.weight.dtype)
        # Inputs keep fp32 under autocast: bf16 cannot tell numbers closer than 2^-8 apart.
        with torch.autocast(rows.device.type, enabled=False):
            hidden = F.silu(self.hidden(rows))
        return self.output(hidden)


class Attention(nn.Module):
    """Attention of any rows over the context rows."""

    def __init__(self, config: TransformerNPConfig) -> None:
        super().__init__()
        self.heads = config.heads
        d = config.width
        self.query = nn.Linear(d, d, bias=False)
        self.key_value = nn.Linear(d, 2 * d, bias=False)
        self.output = nn.Linear(d, d, bias=False)

    def forward(self, rows: Tensor, context: Tensor) -> Tensor:
        q = self.query(rows).unflatten(-1, (self.heads, -1))
        k, v = self.key_value(context).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        return self.output(rectangular_attention(q, k, v).flatten(-2))


class FeedForward(nn.Module):
    """SiLU(b W1) W2 with F stored padded."""

    def __init__(self, config: TransformerNPConfig) -> None:
        super().__init__()
        self.used = config.feed_forward_width
        d, stored = config.width, config.stored_width
        self.hidden = nn.Linear(d, stored, bias=False)
        self.output = nn.Linear(stored, d, bias=False)

    def forward(self, b: Tensor) -> Tensor:
        return self.output(F.silu(self.hidden(b)))

    def padding(self) -> list[Tensor]:
        """Views of the stored weights that are not part of the model."""
        return [self.hidden.weight[self.used :], self.output.weight[:, self.used :]]


class Block(nn.Module):
    """Attention and feed-forward, each with its norm before ("pre") or after ("post") the sum."""

    def __init__(self, config: TransformerNPConfig, *, backend: Backend) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention_norm = LayerNorm(config.width, bias=False, backend=backend)
        self.attention = Attention(config)
        self.feed_forward_norm = LayerNorm(config.width, bias=False, backend=backend)
        self.feed_forward = FeedForward(config)

    def forward(self, h: Tensor, context_rows: int, *, targets_only: bool = False) -> Tensor:
        """``h [B, T, d]``, context rows first, to the same, or to ``[B, N, d]`` of the targets."""
        first = context_rows if targets_only else 0
        if self.pre_norm:
            a = layer_norm(self.attention_norm, h)
            h = h[:, first:] + self.attention(a[:, first:], a[:, :context_rows])
            return h + self.feed_forward(layer_norm(self.feed_forward_norm, h))
        mixed = self.attention(h[:, first:], h[:, :context_rows])
        h = layer_norm(self.attention_norm, h[:, first:] + mixed)
        return layer_norm(self.feed_forward_norm, h + self.feed_forward(h))


class TransformerNP(nn.Module):
    """Transformer neural process with a Gaussian mixture for every target.

    Args:
        config: the shape of the model.
        backend: who computes the norms: "auto" (Triton for CUDA tensors, plain torch for CPU ones),
            "triton" or "reference".

    Parameters are fp32 on the default device; train them as they are, under autocast for bf16.

    Example:
        >>> model = TransformerNP(TransformerNPConfig(x_width=1))
        >>> params = model(x_context, y_context, x_target)        # [B, N, 1, 10, 3]
        >>> mean, variance, sample = model.predict(x_context, y_context, x_target)
    """

    def __init__(self, config: TransformerNPConfig, *, backend: Backend = "auto") -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}; got {backend!r}")
        self.config = config
        self.embedder = Embedder(config)
        self.blocks = nn.ModuleList(Block(config, backend=backend) for _ in range(config.layers))
        self.final_norm = None
        if config.norm == "pre":
            self.final_norm = LayerNorm(config.width, bias=False, backend=backend)
        self.head = MixtureHead(
            config.width,
            config.feed_forward_width,
            config.components,
            outputs=config.y_width,
            stored_width=config.stored_width,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights.

        Uniform by fan-in; in the pre-norm form the two products that write to the residual stream
        are scaled by 1 / sqrt(2 L), so that its variance does not grow with depth; the last product
        of the head by 0.1, so that the first mixtures are near the standard normal.
        """
        config = self.config
        residual_gain = 1.0 / math.sqrt(2 * config.layers) if config.norm == "pre" else 1.0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _uniform_(module.weight, module.in_features)
            elif isinstance(module, LayerNorm):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Attention):
                _uniform_(module.output.weight, config.width, residual_gain)
            elif isinstance(module, FeedForward):
                _uniform_(module.output.weight, config.feed_forward_width, residual_gain)
        _uniform_(self.head.output, config.feed_forward_width, 0.1)
        for unused in self.padding():
            unused.zero_()

    def padding(self) -> list[Tensor]:
        """Views of every stored weight that is not part of the model: zero, and zero for ever."""
        padded = [m for m in self.modules() if isinstance(m, FeedForward | MixtureHead)]
        return [unused for module in padded for unused in module.padding()]

    def parameter_count(self) -> int:
        """Parameters of the model, the padding of its storage left out."""
        stored = sum(parameter.numel() for parameter in self.parameters())
        return stored - sum(unused.numel() for unused in self.padding())

    def forward(self, x_context: Tensor, y_context: Tensor, x_target: Tensor) -> Tensor:
        """Mixture parameters of every target.

        Args:
            x_context: ``[B, M, d_x]``, floating point, M >= 1.
            y_context: ``[B, M, d_y]``.
            x_target: ``[B, N, d_x]``, N >= 1.

        Returns:
            ``[B, N, d_y, K, 3]`` raw parameters (w, mu, s) in fp32, under autocast too, or in fp64
            from a model in fp64. The order of the context does not matter beyond rounding.

        Raises:
            TypeError: an input is not floating point.
            ValueError: a shape is not as above, M = 0 (the softmax has no keys) or N = 0.
        """
        self._check(x_context, y_context, x_target)
        context_rows = x_context.shape[1]
        h = self.embedder(x_context, y_context, x_target)
        *blocks, last = self.blocks
        for block in blocks:
            h = block(h, context_rows)
        t = last(h, context_rows, targets_only=True)
        return self.head(t if self.final_norm is None else layer_norm(self.final_norm, t))

    def log_likelihood(
        self, x_context: Tensor, y_context: Tensor, x_target: Tensor, y_target: Tensor
    ) -> Tensor:
        """log p(y_target | x_target, context) in nats, ``[B, N, d_y]``, each target on its own."""
        params = self(x_context, y_context, x_target)
        return mixture_log_likelihood(params, y_target, scale=self.config.scale)

    @torch.no_grad()
    def predict(
        self,
        x_context: Tensor,
        y_context: Tensor,
        x_target: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Mean, variance and one draw of every target; shapes and errors as in ``forward``."""
        params = self(x_context, y_context, x_target)
        scale = self.config.scale
        return Prediction(
            mixture_mean(params, scale=scale),
            mixture_variance(params, scale=scale),
            mixture_sample(params, scale=scale, generator=generator),
        )

    def _check(self, *inputs: Tensor) -> None:
        d_x, d_y = self.config.x_width, self.config.y_width
        if not all(rows.is_floating_point() for rows in inputs):
            raise TypeError(f"wanted floating-point inputs; got {[rows.dtype for rows in inputs]}")
        came = [list(rows.shape) for rows in inputs]
        if all(len(shape) == 3 for shape in came):
            batch, context, targets = *came[0][:2], came[2][1]
            wanted = [[batch, context, d_x], [batch, context, d_y], [batch, targets, d_x]]
            if came == wanted and context > 0 and targets > 0:
                return
        raise ValueError(
            f"wanted x_context [B, M, {d_x}], y_context [B, M, {d_y}], x_target [B, N, {d_x}] "
            f"with M >= 1 and N >= 1; got {came[0]}, {came[1]}, {came[2]}"
        )
