r"""The layer: an indexer chooses the keys of each query, attention goes to these, and two gates
weigh values and outputs.

    v   = W_v x * sigmoid(W_gv x)                    gate on the values
    S_t = indexer_topk(W_qi x, W_ki x, W_w x, b)     one selection for all heads
    o_t = softmax over S_t of (rotated q_t . rotated k_s / sqrt(D)) v_s
    y   = W_o (o * sigmoid(W_go x))                  gate on the output

The indexer learns by :func:`indexer_kl_loss` alone, from x as it is: neither the selection nor that
loss sends a gradient to x, q, k or v.

Gated Sparse Attention, arXiv 2601.15305; Su et al., RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .._core.backends import Backend, check_backend, uses_triton
from .._core.checks import check_option, checked_count, checked_number
from .._core.linears import linears_of
from .._core.typed import called_as
from ..common.checks import (
    FORMS,
    HIGHEST_SCALE,
    LOWEST_SCALE,
    MAX_WIDTH,
    PATHS,
    Form,
    Law,
    Path,
    check_law,
)
from ..loss.indexer_kl_loss import indexer_kl_loss
from ..selection.indexer_topk import indexer_topk
from ..sparse.sparse_attention import causal_selection, sparse_attention_with_lse
from .key_cache import KeyCache
from .packed import sequences_of, tokens_of
from .positions import rotated
from .tokens import check_tokens, places_of, ranges_of_tokens

Tensor = torch.Tensor
INIT_STD = 0.02
# Of the norm of the indexer's keys, as in the public code of DeepSeek-V3.2-Exp.
INDEX_EPS = 1e-6
# On a GPU up to so many tokens are decoded over all of the cache's memory, of which each sees its
# own keys: every call has the same shapes, and so the same launches, which a CUDA graph replays.
FEW_TOKENS = 8


class Selection(NamedTuple):
    """The keys that each query has selected, as :func:`indexer_topk` returns them. A caller who
    recomputes a pass passes the first pass's selection: a difference in the last
    place could select another key.
    """

    indices: Tensor
    # A tuple's own count is of no use here.
    count: Tensor  # type: ignore[assignment]


def all_keys(
    batches: int,
    tokens: int,
    device: torch.device | str,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Selection:
    """Of each query all keys that it sees: given to a :class:`GatedSparseAttention` it makes its
    attention dense, and its indexer learn from all keys, as in the first steps of a training. All
    queries share the memory of one; with ``mask`` or ``cu_seqlens`` each has its own.

    Args:
        batches, tokens: of the sequences.
        device: theirs.
        mask, cu_seqlens: as in :meth:`GatedSparseAttention.forward`.
        max_seqlen: at least the tokens of the longest document; None takes ``tokens``. It bounds
            the memory of the indices, and a query attends to no more keys of its document.

    Returns:
        indices ``[batches, tokens, max_seqlen]`` and count ``[batches, tokens]``, in int32.

    Raises:
        TypeError, ValueError: mask, cu_seqlens or max_seqlen is not as above.
    """
    slots = tokens if max_seqlen is None else checked_count("max_seqlen", max_seqlen)
    check_tokens(torch.empty(batches, tokens, 0, device=device), 0, mask, cu_seqlens)
    ranges = ranges_of_tokens(batches, tokens, mask, cu_seqlens)
    if ranges is None:
        indices, count = causal_selection(batches, tokens, tokens, device)
        return Selection(indices[..., :slots], count.clamp(max=slots) if slots < tokens else count)
    place, hidden = places_of(tokens, ranges)
    indices = ranges[..., :1] + torch.arange(slots, dtype=torch.int32, device=device)
    count = (place + 1).clamp(max=slots).masked_fill(hidden, 0)
    return Selection(indices, count.int())


class GatedSparseAttention(nn.Module):
    """Causal self-attention of ``[B, T, width]`` to the keys that an indexer selects.

    Args:
        width: of the input and the output.
        heads, key_heads: query heads, and the heads of keys that they share in groups (None: as
            many).
        head_width: None takes width / heads, which must be whole; even, up to 256.
        index_heads, index_width: the indexer's; the width is up to 256.
        k_base, k_min, k_max, law, sinks, window: how many keys a query selects, and which in any
            case, see :func:`indexer_topk`.
        rope_base: base of the rotary frequencies.
        form: of the indexer's scores, see :func:`gated_indexer`. With "relu" they are those of
            DeepSeek-V3.2-Exp: there is no bias, and ``index_norm`` norms the indexer's keys.
        index_rotary: how many of the first columns of the indexer's queries and keys are rotated
            by their positions, even; DeepSeek-V3.2-Exp rotates 64 of 128.
        temperature: where the indexer's learned temperature starts, about the logarithm of the
            number of tokens.
        ema_decay: of the running average of the scores' variance, which follows what is selected in
            training mode. It stays in fp32 whatever the parameters are converted to.
        path: as in :func:`sparse_attention`, of whole sequences: "tiles" where neighbouring tokens
            select alike, as a trained indexer's often do. Decoding chooses by itself.
        backend: as in :func:`sparse_attention`.

    Raises:
        TypeError: a number is of a wrong kind.
        ValueError: a number is out of its range; law, path or backend is unknown.
    """

    variance_ema: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_heads: int | None = None,
        head_width: int | None = None,
        index_heads: int = 4,
        index_width: int = 64,
        k_base: int = 512,
        k_min: int = 32,
        k_max: int = 1024,
        law: Law = "inverse",
        sinks: int = 4,
        window: int = 0,
        rope_base: float = 10_000.0,
        form: Form = "gated",
        index_rotary: int = 0,
        temperature: float = 8.0,
        ema_decay: float = 0.99,
        path: Path = "auto",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        check_backend(backend)
        check_option("path", path, PATHS)
        check_option("form", form, FORMS)
        check_law(law, k_base, k_min, k_max, sinks, window)
        for name, number in (("width", width), ("heads", heads), ("index_heads", index_heads)):
            checked_count(name, number)
        self.heads = heads
        self.key_heads: int = checked_count("key_heads", heads if key_heads is None else key_heads)
        if heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of key_heads, got {heads}, {key_heads}")
        if head_width is None and width % heads:
            raise ValueError(
                f"width must be a multiple of heads without a head_width, got {width}, {heads}"
            )
        self.width = width
        self.head_width: int = checked_count(
            "head_width", width // heads if head_width is None else head_width
        )
        if self.head_width % 2:
            raise ValueError(f"head_width must be even, got {self.head_width}")
        self.index_heads = index_heads
        self.index_width: int = checked_count("index_width", index_width)
        checked_number("head_width", self.head_width, 1, MAX_WIDTH)
        checked_number("index_width", index_width, 1, MAX_WIDTH)
        checked_count("index_rotary", index_rotary, lowest=0)
        if index_rotary % 2 or index_rotary > index_width:
            raise ValueError(
                f"index_rotary must be even, up to index_width {index_width}, got {index_rotary}"
            )
        checked_number("ema_decay", ema_decay, 0.0, 1.0)
        checked_number("rope_base", rope_base, LOWEST_SCALE, HIGHEST_SCALE)
        checked_number("temperature", temperature, -HIGHEST_SCALE, HIGHEST_SCALE)
        self.counts: dict[str, Any] = dict(
            k_base=k_base, k_min=k_min, k_max=k_max, law=law, sinks=sinks, window=window
        )
        self.rope_base: float = rope_base
        self.ema_decay: float = ema_decay
        self.path, self.backend = path, backend
        self.form: Form = form
        self.index_rotary: int = index_rotary

        place: dict[str, Any] = dict(device=device, dtype=dtype)
        inner, shared = self.heads * self.head_width, self.key_heads * self.head_width
        self.q_proj: nn.Linear = nn.Linear(width, inner, bias=False, **place)
        self.k_proj: nn.Linear = nn.Linear(width, shared, bias=False, **place)
        self.v_proj: nn.Linear = nn.Linear(width, shared, bias=False, **place)
        self.value_gate: nn.Linear = nn.Linear(width, shared, bias=False, **place)
        self.output_gate: nn.Linear = nn.Linear(width, inner, bias=False, **place)
        self.o_proj: nn.Linear = nn.Linear(inner, width, bias=False, **place)
        self.index_q: nn.Linear = nn.Linear(width, index_heads * index_width, bias=False, **place)
        self.index_k: nn.Linear = nn.Linear(width, index_width, bias=False, **place)
        self.index_w: nn.Linear = nn.Linear(width, index_heads, bias=False, **place)
        self.index_bias: nn.Parameter | None = None
        self.index_norm: nn.LayerNorm | None = None
        if form == "gated":
            self.index_bias = nn.Parameter(torch.zeros(index_heads, **place))
        else:
            self.index_norm = nn.LayerNorm(index_width, eps=INDEX_EPS, **place)
        # Not a scalar: FSDP shards the first dimension.
        self.index_temperature: nn.Parameter = nn.Parameter(torch.full((1,), temperature, **place))
        self.register_load_state_dict_pre_hook(_as_vector)
        # Zero: there is no average yet.
        self.register_buffer("variance_ema", torch.zeros((), device=device, dtype=torch.float32))
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(
        self,
        x: Tensor,
        selection: Selection | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Selection]:
        """Attention within ``[B, T, width]``.

        Args:
            x: the tokens of whole sequences.
            selection: that of an earlier pass over the same tokens, which is then used again, or
                :func:`all_keys`; None: select. In training mode selecting updates the average of
                the variance.
            mask: ``[B, T]``, bool; a token where it is False is padding, before the first token of
                a row or document or behind its last one: it sees and is seen by none, and its y is
                0. Between tokens it counts as one.
            cu_seqlens: ``[N + 1]``, as in :func:`gated_indexer`: documents in the only row that do
                not see one another. Positions, sinks and window are those of each document.

        Returns:
            ``(y, selection)``: y like x, and what was selected.

        Raises:
            TypeError, ValueError: x, mask or cu_seqlens are not as above.
        """
        return self._attend(x, selection, mask, cu_seqlens)[:2]

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def forward_with_loss(
        self,
        x: Tensor,
        selection: Selection | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Selection, Tensor]:
        """:meth:`forward` and the loss that the indexer learns by, over the selected keys, a mean
        over the tokens but for padding. It differentiates to the indexer's parameters alone.
        """
        y, selection, (index, q, k, lse), ranges = self._attend(x, selection, mask, cu_seqlens)
        loss = indexer_kl_loss(
            *(*index, self._bias(index[0]), q, k, lse, *selection),
            temperature=self.index_temperature,
            key_ranges=ranges,
            form=self.form,
            backend=self.backend,
        )
        return y, selection, loss

    def new_cache(self, batches: int, capacity: int) -> KeyCache:
        """Memory for the keys of up to ``capacity`` tokens of ``batches`` sequences. On a GPU
        the indexer scores all of it for a few tokens: longer memory than is needed costs time.
        """
        weight = self.k_proj.weight
        rows = (batches, capacity)
        heads = weight.new_zeros((*rows, self.key_heads, self.head_width))
        return KeyCache(heads, torch.zeros_like(heads), weight.new_zeros((*rows, self.index_width)))

    @torch.no_grad()
    def decode(
        self,
        x: Tensor,
        cache: KeyCache,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """What :meth:`forward` in evaluation mode gives for the next tokens of sequences whose
        first tokens are in the cache, to which these are added. No gradients.

        Args:
            x: ``[B, t, width]``, or ``[1, tokens, width]`` with ``cu_seqlens``.
            cache: of the B sequences.
            mask: ``[B, t]`` as in :meth:`forward`: sequences get different numbers of tokens.
            cu_seqlens: ``[B + 1]``, in place of a mask: the next tokens of all sequences lie one
                after the other in the only row. Each sequence gets some, or none.
            max_seqlen: with cu_seqlens, at least the tokens that one sequence gets; None takes all
                tokens.

        Returns:
            y like x, 0 for padding.

        Raises:
            TypeError, ValueError: x, mask, cu_seqlens or max_seqlen are not as above, or the cache
                has no room for t, or max_seqlen, tokens more; it is unchanged then.
        """
        check_tokens(x, self.width, mask, cu_seqlens)
        if cu_seqlens is not None:
            if mask is not None:
                raise ValueError("one of mask and cu_seqlens must be given to decode, got both")
            most = x.shape[1]
            if max_seqlen is not None:
                most = min(most, checked_count("max_seqlen", max_seqlen))
            rows, mask = sequences_of(x, cu_seqlens, most, cache)
            y = self.decode(rows, cache, mask)
            return tokens_of(y, cu_seqlens, x.shape[1])
        position: int | Tensor = cache.length
        places, ranges, tokens = None, None, x.shape[1]
        few = tokens <= FEW_TOKENS and (x.is_cuda or uses_triton(x, self.backend))
        uneven = mask is not None or cache.lengths is not None
        if few or uneven:
            places = cache.places(x, mask)
            position, ranges = places.position, places.key_ranges()
            if places.hidden is not None:
                x = x.masked_fill(places.hidden.unsqueeze(-1), 0.0)
        q, k, v, gate = self._heads(x, position)
        q_index, k_index, w = self._index(x, position)
        kept = places if uneven else None
        k, v, k_index = cache.extend(k, v, k_index, places=kept, whole=few)
        # The ranges say what is seen of a whole memory.
        selection = self._select((q_index, k_index, w), k.shape[1] - tokens, ranges)[0]
        o, _ = sparse_attention_with_lse(q, k, v, *selection, backend=self.backend)
        return self._output(o, gate)

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        counts = ", ".join(f"{name}={value}" for name, value in self.counts.items())
        return f"heads={self.heads}, key_heads={self.key_heads}, {counts}"

    def _apply(self, fn, recurse=True):
        average = self.variance_ema
        super()._apply(fn, recurse)
        if self.variance_ema.dtype != average.dtype:
            # In bf16 an average that changes by a hundredth would stay as it is.
            self.variance_ema = average.to(self.variance_ema.device)
        return self

    def _attend(self, x, selection, mask, cu_seqlens):
        check_tokens(x, self.width, mask, cu_seqlens)
        ranges = ranges_of_tokens(x.shape[0], x.shape[1], mask, cu_seqlens)
        position: int | Tensor = 0
        hidden = None
        if ranges is not None:
            position, hidden = places_of(x.shape[1], ranges)
            x = x.masked_fill(hidden.unsqueeze(-1), 0.0)
        q, k, v, gate = self._heads(x, position)
        index = self._index(x, position)
        if selection is None:
            selection, variance = self._select(index, 0, ranges)
            if self.training:
                self._follow(variance, hidden)
        o, lse = sparse_attention_with_lse(
            q, k, v, *selection, path=self.path, backend=self.backend
        )
        return self._output(o, gate), selection, (index, q, k, lse), ranges

    def _heads(self, x: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and gated values of tokens from ``position`` on, or at these
        ``[B, T]``; and what gates the output.
        """
        layers = self.q_proj, self.k_proj, self.v_proj, self.value_gate, self.output_gate
        q, k, v, value_gate, output_gate = linears_of(x, *layers)
        v = v * value_gate.sigmoid()
        q, k, v = (rows.unflatten(-1, (-1, self.head_width)) for rows in (q, k, v))
        q, k = rotated(positions_of(x, position), self.rope_base, q, k)
        return q, k, v, output_gate

    def _index(self, x: Tensor, position: int | Tensor = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's queries, keys and gates of tokens at their positions."""
        q, k, w = linears_of(x.detach(), self.index_q, self.index_k, self.index_w)
        q = q.unflatten(-1, (self.index_heads, self.index_width))
        if self.index_norm is not None:
            k = self.index_norm(k).to(q.dtype)
        if self.index_rotary:
            widths = (self.index_rotary, self.index_width - self.index_rotary)
            (q, rest_q), (k, rest_k) = q.split(widths, -1), k.unsqueeze(2).split(widths, -1)
            q, k = rotated(positions_of(x, position), self.rope_base, q, k)
            q, k = torch.cat([q, rest_q], -1), torch.cat([k, rest_k], -1).squeeze(2)
        return q, k, w

    def _bias(self, q: Tensor) -> Tensor:
        """The indexer's bias: zeros of the form that has none."""
        return q.new_zeros(self.index_heads) if self.index_bias is None else self.index_bias

    def _select(
        self, index: tuple[Tensor, Tensor, Tensor], position: int, ranges: Tensor | None = None
    ) -> tuple[Selection, Tensor]:
        """The selection of tokens from ``position`` on, of which none sees more than its range, and
        the variance of their scores.
        """
        q, k, w = index
        indices, count, stats = indexer_topk(
            *(q, k, w, self._bias(q)),
            **self.counts,
            form=self.form,
            variance_ema=self.variance_ema,
            q_offset=position,
            key_ranges=ranges,
            backend=self.backend,
        )
        return Selection(indices, count), stats.variance

    @torch.no_grad()
    def _follow(self, variance: Tensor, hidden: Tensor | None) -> None:
        """Update the average of the variance, which starts as the first one; padding has none."""
        mean = variance.mean() if hidden is None else variance.sum() / (~hidden).sum()
        mean = mean.to(self.variance_ema.dtype)
        average = torch.lerp(mean, self.variance_ema, self.ema_decay)
        average = torch.where(self.variance_ema > 0.0, average, mean)
        self.variance_ema.copy_(torch.where(average.isfinite(), average, self.variance_ema))

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2) * gate.sigmoid())


def positions_of(x: Tensor, position: int | Tensor) -> Tensor:
    """Positions ``[T]`` of tokens from ``position`` on, or these ``[B, T]``."""
    if isinstance(position, int):
        return position + torch.arange(x.shape[1], device=x.device)
    return position


def _as_vector(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """State dicts of 0.1 have the temperature as a scalar."""
    name = f"{prefix}index_temperature"
    if isinstance(state.get(name), Tensor) and not state[name].ndim:
        state[name] = state[name].reshape(1)
