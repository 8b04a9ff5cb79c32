"""Gated DeltaNet: projections, short convolutions, the gated delta rule, a gated norm.

With x [B, T, C], for each head:

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x)),  q and k of length 1
    beta = sigmoid(W_b x),  g = -exp(A_log) softplus(W_a x + dt_bias)
    o = gated_delta_rule(q, k, v, g, beta)
    y = W_o (RMSNorm(o) silu(W_g x))

Parameters have the names and shapes of flash-linear-attention's layer of the same name, so that
state dicts interchange.

Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .._core.checks import check_cu_seqlens, check_option
from .._core.linears import linears_of
from .._core.precision import wide
from .._core.typed import called_as
from ..common.unit_length import unit_length
from ..convolution.short_convolution import ShortConvolution
from ..gated_norm.gated_norm import GatedRMSNorm
from ..rule.gated_delta_rule import BACKENDS, RESIDUALS, Backend, Residual, gated_delta_rule
from ..rule.gated_delta_rule_step import gated_delta_rule_step
from .checks import check_sizes, check_tokens
from .positions import place_in_sequence, rotary

Tensor = torch.Tensor

# Decays begin between exp(-16 * 0.1) and 1: softplus(dt_bias) lies log-uniformly between these.
LEAST_DT, MOST_DT = 1e-3, 1e-1
LEAST_A, MOST_A = 1e-4, 16.0


class DeltaNetCache(NamedTuple):
    """What :meth:`GatedDeltaNet.decode` passes from call to call.

    Attributes:
        state: ``[B, HV, K, V]`` in fp32.
        history: of q, k and v, ``[B, conv_size - 1, channels]`` each; empty without convolutions.
        tokens: how many tokens have been read.
    """

    state: Tensor
    history: tuple[Tensor, ...]
    tokens: int


class GatedDeltaNet(nn.Module):
    """The layer, over ``[B, T, hidden_size]``.

    Args:
        hidden_size: of x and y.
        expand_v: V = expand_v * head_dim, a whole number.
        head_dim: K, of q and k.
        num_heads: H, of q and k.
        num_v_heads: HV, a multiple of num_heads; as many where left out.
        use_gate: multiply the normed output by silu(W_g x).
        use_short_conv: convolve q, k and v; without it they only get the SiLU.
        allow_neg_eigval: beta up to 2.
        conv_size, conv_bias: of the convolutions.
        norm_eps: of the output's norm.
        rope_theta: rotary positions of q and k with this base; none where left out.
        d_residual: as in :func:`gated_delta_rule`; "qk" and "v" add a parameter D, ones.
        backend: as in :func:`gated_delta_rule`.

    ``A_log``, ``dt_bias``, ``D`` and the norm's weight carry ``_no_weight_decay = True``.

    Raises:
        ValueError: sizes do not fit together, or an option is unknown.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        *,
        rope_theta: float | None = None,
        d_residual: Residual = "none",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        check_option("backend", backend, BACKENDS)
        self.num_v_heads: int = num_heads if num_v_heads is None else num_v_heads
        sizes = dict(hidden_size=hidden_size, head_dim=head_dim, num_heads=num_heads)
        sizes |= dict(num_v_heads=self.num_v_heads, conv_size=conv_size)
        check_sizes(sizes, expand_v, rope_theta)
        check_option("d_residual", d_residual, RESIDUALS)
        self.hidden_size: int = hidden_size
        self.num_heads: int = num_heads
        self.head_dim: int = head_dim
        self.head_v_dim: int = round(head_dim * expand_v)
        self.allow_neg_eigval: bool = allow_neg_eigval
        self.rope_theta: float | None = rope_theta
        self.d_residual, self.backend = d_residual, backend
        keys, values = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        linear: dict[str, Any] = dict(bias=False, **factory)
        self.q_proj: nn.Linear = nn.Linear(hidden_size, keys, **linear)
        self.k_proj: nn.Linear = nn.Linear(hidden_size, keys, **linear)
        self.v_proj: nn.Linear = nn.Linear(hidden_size, values, **linear)
        self.a_proj: nn.Linear = nn.Linear(hidden_size, self.num_v_heads, **linear)
        self.b_proj: nn.Linear = nn.Linear(hidden_size, self.num_v_heads, **linear)
        # Decays stay in fp32, whatever the weights are in, unless they are in fp64.
        decay_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.A_log: nn.Parameter = nn.Parameter(
            torch.empty(self.num_v_heads, device=device, dtype=decay_dtype)
        )
        self.dt_bias: nn.Parameter = nn.Parameter(
            torch.empty(self.num_v_heads, device=device, dtype=decay_dtype)
        )
        if d_residual != "none":
            self.D: nn.Parameter = nn.Parameter(
                torch.empty(self.num_v_heads, device=device, dtype=decay_dtype)
            )
        own = "auto" if backend == "fla" else backend
        self.use_short_conv = use_short_conv
        if use_short_conv:
            conv: dict[str, Any] = dict(bias=conv_bias, backend=own, **factory)
            self.q_conv1d: ShortConvolution = ShortConvolution(
                keys, conv_size, heads=num_heads, **conv
            )
            self.k_conv1d: ShortConvolution = ShortConvolution(
                keys, conv_size, heads=num_heads, **conv
            )
            self.v_conv1d: ShortConvolution = ShortConvolution(values, conv_size, **conv)
        self.g_proj: nn.Linear | None = (
            nn.Linear(hidden_size, values, **linear) if use_gate else None
        )
        self.o_norm: GatedRMSNorm = GatedRMSNorm(self.head_v_dim, norm_eps, backend=own, **factory)
        self.o_proj: nn.Linear = nn.Linear(values, hidden_size, **linear)
        self.reset_decays()
        for parameter in (self.A_log, self.dt_bias, self.o_norm.weight, *self.residual_weight()):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def reset_decays(self) -> None:
        """Draw A_log and dt_bias as flash-linear-attention does: states decay slowly at first."""
        self.A_log.uniform_(LEAST_A, MOST_A).log_()
        dt = self.dt_bias.uniform_(math.log(LEAST_DT), math.log(MOST_DT)).exp_()
        # The inverse of softplus.
        dt.add_(torch.log(-torch.expm1(-dt)))
        for weight in self.residual_weight():
            weight.fill_(1.0)

    def residual_weight(self) -> list[nn.Parameter]:
        return [self.D] if self.d_residual != "none" else []

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """y, of x's shape.

        Args:
            x: ``[B, T, hidden_size]``.
            mask: ``[B, T]``, bool; a token where it is False is padding: it changes no state, other
                tokens see zeros in its place, and its y is 0.
            cu_seqlens: ``[N + 1]``, as in :func:`gated_delta_rule`: sequences in the only row that
                do not see one another.

        Raises:
            TypeError, ValueError: x, mask or cu_seqlens are not as above.
        """
        check_tokens(x, mask, self.hidden_size)
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x)
        return self.run(x, mask, cu_seqlens, None)[0]

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def decode(
        self, x: Tensor, cache: DeltaNetCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, DeltaNetCache]:
        """y of the tokens that follow what the cache has read, and the next cache: what forward
        gives for all tokens at once. A single token is one step of the recurrence.

        Padding may stand before a row's first token; behind its last one it would count as tokens
        of zeros for the convolutions that follow.

        Raises:
            TypeError, ValueError: x or mask are not as in forward, or the cache is of another
                number of rows.
        """
        check_tokens(x, mask, self.hidden_size)
        if cache is None:
            cache = self.empty_cache(x)
        elif cache.state.shape[0] != x.shape[0]:
            rows = cache.state.shape[0]
            raise ValueError(f"cache must be of x's {x.shape[0]} rows, got one of {rows}")
        return self.run(x, mask, None, cache)

    def empty_cache(self, x: Tensor) -> DeltaNetCache:
        """The cache before the first token, for rows like x's."""
        batch, dtype = x.shape[0], wide(self.A_log).dtype
        state = (batch, self.num_v_heads, self.head_dim, self.head_v_dim)
        history = tuple(
            x.new_zeros(batch, conv.kernel_size[0] - 1, conv.in_channels)
            for conv in self.convolutions()
        )
        return DeltaNetCache(x.new_zeros(state, dtype=dtype), history, 0)

    def convolutions(self) -> tuple[ShortConvolution, ...]:
        return (self.q_conv1d, self.k_conv1d, self.v_conv1d) if self.use_short_conv else ()

    def run(
        self,
        x: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: DeltaNetCache | None,
    ) -> tuple[Tensor, Any]:
        """y and, where there is a cache, the next one."""
        hidden = None if mask is None else ~mask.unsqueeze(-1)
        if hidden is not None:
            x = x.masked_fill(hidden, 0.0)
        place = None if cu_seqlens is None else place_in_sequence(x.shape[1], cu_seqlens)
        *projected, b, a, gate = self.projected(x)
        q, k, v, history = self.rows(tuple(projected), x.shape[1], place, cache)
        beta, g = self.gates(b, a)
        if hidden is not None:
            beta, g = beta.masked_fill(hidden, 0.0), g.masked_fill(hidden, 0.0)
        o, state = self.recurrence(q, k, v, g, beta, cu_seqlens, cache)
        gate = None if gate is None else gate.view(o.shape)
        y = self.o_proj(self.o_norm(o, gate).flatten(2))
        if hidden is not None:
            y = y.masked_fill(hidden, 0.0)
        if cache is None or state is None:
            return y, None
        return y, DeltaNetCache(state, history, cache.tokens + x.shape[1])

    def projected(self, x: Tensor) -> tuple[Any, ...]:
        """Of q, k, v, b, a and the gate, None without one."""
        layers = [self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.a_proj]
        if self.g_proj is None:
            return *linears_of(x, *layers), None
        return linears_of(x, *layers, self.g_proj)

    def rows(
        self,
        projected: tuple[Tensor, ...],
        tokens: int,
        place: Tensor | None,
        cache: DeltaNetCache | None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """q and k of length 1, v, and the next history of the convolutions."""
        history: tuple[Tensor, ...] = ()
        before: tuple[Tensor | None, ...]
        if self.use_short_conv:
            layers, before = self.convolutions(), (None,) * 3
            if cache is not None:
                history = tuple(
                    conv.next_history(z, last)
                    for conv, z, last in zip(layers, projected, cache.history, strict=True)
                )
                # A new cache has a history of zeros, which the kernel assumes.
                before = cache.history if cache.tokens else before
            projected = tuple(
                conv(z, last, place)
                for conv, z, last in zip(layers, projected, before, strict=True)
            )
        else:
            projected = tuple(F.silu(z) for z in projected)
        q, k, v = (
            z.unflatten(-1, (heads, -1)) for z, heads in zip(projected, self.heads(), strict=True)
        )
        if not self.use_short_conv:
            q, k = unit_length(q), unit_length(k)
        if self.rope_theta is not None:
            if place is None:
                start = 0 if cache is None else cache.tokens
                place = torch.arange(start, start + tokens, device=q.device)
            q, k = (rotary(z, place, self.rope_theta) for z in (q, k))
        return q, k, v, history

    def heads(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_heads, self.num_v_heads

    def gates(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """beta and g of their projections."""
        beta = wide(b).sigmoid()
        if self.allow_neg_eigval:
            beta = 2.0 * beta
        dt = F.softplus(wide(a) + self.dt_bias)
        return beta, -wide(self.A_log).exp() * dt

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None,
        cache: DeltaNetCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """o and, where there is a cache, the state after it."""
        if cache is not None and q.shape[1] == 1 and self.d_residual == "none":
            q, k, v, g, beta = (z.squeeze(1) for z in (q, k, v, g, beta))
            backend = "auto" if self.backend == "fla" else self.backend
            o, state = gated_delta_rule_step(q, k, v, g, beta, cache.state, backend=backend)
            return o.unsqueeze(1), state
        return gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            cu_seqlens=cu_seqlens,
            d_residual=self.d_residual,
            d_weight=self.D if self.d_residual != "none" else None,
            backend=self.backend,
        )
