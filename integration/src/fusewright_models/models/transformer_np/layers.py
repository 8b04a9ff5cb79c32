"""The shape of a TransformerNP, and its layers; the formulas stand with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from fusewright.attention import Backend, rectangular_attention
from fusewright.feed_forward import feed_forward, silu_linear
from fusewright.mixture_head import Scale
from fusewright.norm import LayerNorm, add_layer_norm
from torch import Tensor, nn

from ..._core.casts import for_products
from ..._core.padding import (
    Padded,
    clear_padding_of,
    keep_padding_out,
    padded_width,
    padding_of,
)
from ..._core.precision import without_autocast
from ..._core.typed import called_as
from ...choices import Checkpointing, Norm
from ..checks import autocast_dtype, check_config, check_head_width
from .projections import projected
from .sharing import of_all_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TransformerNPConfig:
    """The shape of a TransformerNP; the defaults are the 12-layer model of 36.7 million parameters.

    Attributes:
        x_width: coordinates of an input (d_x).
        y_width: outputs (d_y), each with a mixture of its own, independent given the prediction.
        width: d, divisible by ``heads``, each head as wide as the attention takes: a multiple of 8
            up to 256.
        layers: number of blocks, at least 1.
        heads: H.
        feed_forward_width: F of the blocks and of the mixture head.
        components: K, mixture components per output.
        norm: "pre" or "post".
        scale: standard deviations as "log_sigma" or "softplus".
        frequencies: sines and cosines of each coordinate as more inputs, so many of each, of
            1/8, 1/4, 1/2, 1 ... cycles per unit.
        indicator: one more input, 1 in context rows and 0 in target rows. Without it a context row
            with y = 0 and a target row at the same x start equal.
        checkpointing: "block" computes every block again in the backward pass instead of keeping
            what it needs there, "keep-attention" all of it but the attention. Changes no gradient.

    Raises:
        TypeError: a size is no int, or indicator no bool.
        ValueError: a size is below 1, frequencies below 0, the attention does not take heads of
            that width, or norm, scale or checkpointing is another name.
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
    frequencies: int = 0
    indicator: bool = False
    checkpointing: Checkpointing = "none"

    def __post_init__(self) -> None:
        check_config(self, from_zero=("frequencies",))
        if self.width % self.heads:
            raise ValueError(
                f"width must be divisible by heads; got width {self.width}, heads {self.heads}"
            )
        check_head_width(
            self, "width", lambda q: rectangular_attention(q, q, q, backend="reference")
        )

    @property
    def stored_width(self) -> int:
        """F rounded up to a multiple of 32."""
        return padded_width(self.feed_forward_width)


def norm_of_sum(norm: LayerNorm, h: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm of h + update, h + update) in the dtype of ``h``, statistics in fp32; ``h`` itself
    without an update.

    For where autocast is off. It would hand back fp32, as torch's layer norm does: twice the bytes,
    and the residual stream of the post-norm form would leave the compute dtype.
    """
    if update is None:
        return norm(h), h
    return add_layer_norm(update, h, norm.weight, norm.bias, eps=norm.eps, backend=norm.backend)


def within(rows: Tensor, lengths: Tensor) -> Tensor:
    """Which of ``rows [B, n, ...]`` are before each task's length, ``[B, n]``."""
    number = torch.arange(rows.shape[1], device=rows.device)
    return number < lengths.unsqueeze(-1)


def shown(rows: Tensor, lengths: Tensor | None) -> Tensor:
    """``rows [B, n, width]`` with zeros past each task's length: zero times NaN would be NaN."""
    if lengths is None:
        return rows
    return torch.where(within(rows, lengths).unsqueeze(-1), rows, 0.0)


# Of the slowest of an embedder's waves, in units of a coordinate; each next one is half as long.
WAVE_LENGTH = 8.0


class Embedder(nn.Module):
    """Two-layer SiLU embedding of context rows [x ; y] and target rows [x ; 0].

    With frequencies, x stands with its waves behind it.
    """

    cycles: Tensor

    def __init__(self, config: TransformerNPConfig, *, backend: Backend) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.indicator = config.indicator
        self.y_width = config.y_width
        cycles = 2.0 ** torch.arange(config.frequencies) / WAVE_LENGTH
        self.register_buffer("cycles", cycles, persistent=False)
        coordinates = config.x_width * (1 + 2 * config.frequencies)
        inputs = coordinates + config.y_width + config.indicator
        self.hidden = nn.Linear(inputs, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_context: Tensor, y_context: Tensor, x_target: Tensor) -> Tensor:
        x_context, x_target = self.waves(x_context), self.waves(x_target)
        context = torch.cat([x_context, y_context], dim=-1)
        if self.indicator:
            context = F.pad(context, (0, 1), value=1.0)
        target = F.pad(x_target, (0, self.y_width + self.indicator))
        weight = self.hidden.weight
        rows = torch.cat([context, target], dim=1).to(weight.dtype)
        # Inputs keep fp32 under autocast: bf16 cannot tell numbers closer than 2^-8 apart.
        dtype = None if rows.dtype == torch.float64 else autocast_dtype(rows.device)
        return self.output(silu_linear(rows, weight, dtype=dtype, backend=self.backend))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def waves(self, x: Tensor) -> Tensor:
        """``x [..., d_x]`` and behind it its sines and cosines, of all frequencies of a coordinate
        side by side.
        """
        if not len(self.cycles):
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        turns = x.to(wide).unsqueeze(-1) * self.cycles.to(wide)
        phases = (2.0 * math.pi * turns).flatten(-2)
        return torch.cat([x.to(wide), phases.sin(), phases.cos()], dim=-1)


class KeysValues(NamedTuple):
    """Those of a block's context rows, each ``[B, M, H, D]``."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Attention of rows from some on over the context rows."""

    def __init__(self, config: TransformerNPConfig, *, backend: Backend) -> None:
        super().__init__()
        self.heads = config.heads
        self.backend: Backend = backend
        d = config.width
        self.query = nn.Linear(d, d, bias=False)
        self.key_value = nn.Linear(d, 2 * d, bias=False)
        self.output = nn.Linear(d, d, bias=False)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query.weight, self.key_value.weight, self.output.weight

    def forward(
        self,
        rows: Tensor,
        matrices: Sequence[Tensor],
        context_rows: int,
        lengths: Tensor | None,
        *,
        first: int = 0,
        group: ProcessGroup | None = None,
        kept: list[KeysValues] | None = None,
    ) -> Tensor:
        """``matrices`` are the module's own, as products take them; keys and values are added to
        ``kept``.
        """
        query, key_value, output = matrices
        q, k, v = projected(rows, query, key_value, context_rows, heads=self.heads, first=first)
        if group is not None:
            k, v = of_all_rows(k, v, group)
        if kept is not None:
            kept.append(KeysValues(k, v))
        return self._attended(q, KeysValues(k, v), output, lengths)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def of_targets(
        self,
        rows: Tensor,
        matrices: Sequence[Tensor],
        context: KeysValues,
        lengths: Tensor | None,
    ) -> Tensor:
        """Of target rows alone, over a context that is known."""
        query, _, output = matrices
        q = F.linear(rows, query).unflatten(-1, (self.heads, -1))
        return self._attended(q, context, output, lengths)

    def keys_values(self, rows: Tensor, matrices: Sequence[Tensor]) -> KeysValues:
        """Of context rows alone."""
        both = F.linear(rows, matrices[1])
        return KeysValues(*(x.unflatten(-1, (self.heads, -1)) for x in both.chunk(2, -1)))

    def _attended(
        self, q: Tensor, context: KeysValues, output: Tensor, lengths: Tensor | None
    ) -> Tensor:
        o = rectangular_attention(q, *context, key_lengths=lengths, backend=self.backend)
        return F.linear(o.flatten(-2), output)


class FeedForward(nn.Module):
    """SiLU(b W1) W2 with F stored padded."""

    def __init__(self, config: TransformerNPConfig, *, backend: Backend) -> None:
        super().__init__()
        self.backend: Backend = backend
        d, stored = config.width, config.stored_width
        self.hidden = nn.Linear(d, stored, bias=False)
        self.output = nn.Linear(stored, d, bias=False)
        sizes = dict(blocks=1, width=config.feed_forward_width, stored=stored)
        self.padded = {
            "hidden.weight": Padded(axis=0, **sizes),
            "output.weight": Padded(axis=1, **sizes),
        }
        keep_padding_out(self)

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.hidden.weight, self.output.weight

    def forward(self, b: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """``matrices`` are the module's own, as products take them."""
        return feed_forward(b, *matrices, backend=self.backend)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def padding(self) -> list[Tensor]:
        """Views of the stored weights that are not part of the model."""
        return padding_of(self)

    def clear_padding(self) -> None:
        """Set the stored weights beyond F to zero."""
        clear_padding_of(self)


def rows_from(h: Tensor, first: int) -> Tensor:
    """``h [B, T, d]`` from a row on."""
    return h[:, first:] if first else h


class Block(nn.Module):
    """Attention and feed-forward, each with its norm before ("pre") or after ("post") the sum.

    A sum is computed by the norm that reads it, in one pass. In the pre-norm form that of the last
    sum belongs to the next block, so a block hands on both its summands.
    """

    def __init__(self, config: TransformerNPConfig, *, backend: Backend) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention_norm = LayerNorm(config.width, bias=False, backend=backend)
        self.attention = Attention(config, backend=backend)
        self.feed_forward_norm = LayerNorm(config.width, bias=False, backend=backend)
        self.feed_forward = FeedForward(config, backend=backend)

    def forward(
        self,
        h: Tensor,
        update: Tensor | None,
        context_rows: int,
        context_lengths: Tensor | None = None,
        *,
        targets_only: bool = False,
        group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``h`` and ``update [B, T, d]``, whose sum are the rows, context first, to the same, or to
        ``[B, N, d]`` of the targets; None for an update of nothing. Under autocast they are in its
        dtype, as the embedder's are. With ``group`` they are those of one of its processes.
        """
        first = context_rows if targets_only else 0
        matrices = for_products(*self.attention.matrices(), *self.feed_forward.matrices())
        # Everything is in the dtype of the products now. Entered once a block: it takes the host as
        # long as a small kernel.
        with without_autocast(h.device):
            attend = partial(
                self.attention,
                matrices=matrices[:3],
                context_rows=context_rows,
                lengths=context_lengths,
                first=first,
                group=group,
            )
            return self._summed(h, update, attend, matrices[3:], first)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def of_context(
        self,
        h: Tensor,
        update: Tensor | None,
        lengths: Tensor | None,
        kept: list[KeysValues],
        *,
        last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward` of context rows alone, whose keys and values are added to ``kept``; of
        the last block nothing else is computed.
        """
        matrices = for_products(*self.attention.matrices(), *self.feed_forward.matrices())
        with without_autocast(h.device):
            if last:
                a = norm_of_sum(self.attention_norm, h, update)[0] if self.pre_norm else h
                kept.append(self.attention.keys_values(a, matrices[:3]))
                return h, update
            attend = partial(
                self.attention,
                matrices=matrices[:3],
                context_rows=h.shape[1],
                lengths=lengths,
                kept=kept,
            )
            return self._summed(h, update, attend, matrices[3:], 0)

    def of_targets(
        self, h: Tensor, update: Tensor | None, context: KeysValues, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Likewise of target rows alone, over what :meth:`of_context` kept."""
        matrices = for_products(*self.attention.matrices(), *self.feed_forward.matrices())
        with without_autocast(h.device):
            attend = partial(
                self.attention.of_targets, matrices=matrices[:3], context=context, lengths=lengths
            )
            return self._summed(h, update, attend, matrices[3:], 0)

    def _summed(
        self,
        h: Tensor,
        update: Tensor | None,
        attend: Callable[[Tensor], Tensor],
        matrices: Sequence[Tensor],
        first: int,
    ) -> tuple[Tensor, Tensor | None]:
        """The two sums from row ``first`` on."""
        feed = partial(self.feed_forward, matrices=matrices)
        if self.pre_norm:
            a, h = norm_of_sum(self.attention_norm, h, update)
            b, h = norm_of_sum(self.feed_forward_norm, rows_from(h, first), attend(a))
            return h, feed(b)
        h, _ = norm_of_sum(self.attention_norm, rows_from(h, first), attend(h))
        h, _ = norm_of_sum(self.feed_forward_norm, h, feed(h))
        return h, None
