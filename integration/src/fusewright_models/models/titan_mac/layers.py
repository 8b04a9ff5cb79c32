"""The layers of a TitanMAC; the formulas stand with the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from fusewright.attention import Backend, sliding_window_attention
from fusewright.feed_forward import SwiGLU
from fusewright.memory_mlp import MemoryState, NeuralMemory, Reads
from fusewright.norm import RMSNorm, add_rms_norm
from torch import Tensor, nn

from ..._core.documents import rows_before
from ..._core.typed import called_as
from .config import TitanMACConfig
from .packed import Packed
from .rotation import Rotation

# One step for a segment, as the code has it in which TitanMAC was first published. Its memory was
# one for all rows of a batch, and the tokens of a segment read it after they had all been learned.
ORIGIN_MEMORY = {
    "granularity": "chunk",
    "reduction": "mean_all",
    "key_norm": None,
    "theta": 0.01,
    "max_grad_norm": 1.0,
}


class LayerState(NamedTuple):
    """What a layer carries from one piece of a sequence to the next.

    Attributes:
        memory: of the memory, up to the last token.
        earlier: of the memory, as the segments before the running one left it ("mac").
        seen: ``[B, n, 2, H, D]``, keys and values that later tokens attend to, oldest first.
        normed: ``[B, convolution - 1, d]``, the last rows of which the memory was asked ("mac").
    """

    memory: MemoryState | None = None
    earlier: MemoryState | None = None
    seen: Tensor | None = None
    normed: Tensor | None = None

    def seeing(self, rows: Tensor, count: int) -> LayerState:
        """With the last ``count`` of these keys and values."""
        return self._replace(seen=last(None, rows, count))


class Attention(nn.Module):
    """Causal attention to P persistent rows and a window of rows, without a last projection."""

    def __init__(self, config: TitanMACConfig, *, backend: Backend) -> None:
        super().__init__()
        self.heads = config.heads
        self.prefix = config.persistent
        self.backend: Backend = backend
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key_value = nn.Linear(config.dim, 2 * config.dim, bias=False)
        # They stand among the normed rows of the tokens, and pass no block.
        self.persistent = (
            nn.Parameter(torch.empty(self.prefix, config.dim)) if self.prefix else None
        )

    def queries(self, n: Tensor, rotation: Rotation) -> Tensor:
        """Of ``n [B, T, d]``: ``[B, T, H, D]``, rotated."""
        rows = self.query(n).unflatten(-1, (1, self.heads, -1))
        return rotation.of(rows, backend=self.backend).squeeze(2)

    def keys_values(self, n: Tensor) -> Tensor:
        """Of ``n [.., T, d]``: ``[.., T, 2, H, D]``, not rotated."""
        return self.key_value(n).unflatten(-1, (2, self.heads, -1))

    def persistent_rows(self) -> Tensor | None:
        """Keys and values of the persistent rows, which have no position: ``[P, 2, H, D]``."""
        return None if self.persistent is None else self.keys_values(self.persistent)

    def rows(
        self,
        rotation: Rotation,
        own: Tensor,
        beside: Tensor | None,
        persistent: Tensor | None,
        past: Tensor | None,
    ) -> Tensor:
        """Keys and values in the order in which they are seen, ``[B, n, 2, H, D]``: persistent
        ones, those of the past, which are rotated already, and those of the tokens, rotated,
        each before the one ``beside`` it.
        """
        prefix = persistent
        if past is not None:
            # The state may come from a call in another dtype.
            past = past.to(own.dtype)
            prefix = past
            if persistent is not None:
                shared = persistent.expand(len(past), *persistent.shape)
                prefix = torch.cat([shared, past], 1)
        return rotation.of(own, beside=beside, prefix=prefix, backend=self.backend)

    def forward(
        self, q: Tensor, rows: Tensor, window: int, every: int = 1, packed: Packed | None = None
    ) -> Tensor:
        """Outputs of queries ``[B, n, H, D]``: ``[B, n, d]``.

        The last rows are theirs, ``every`` for each. A query sees them, the persistent rows, which
        are the first, and as many before its last as make ``window`` with it, of its own document
        if they are ``packed``. All rows are keys and values ``[B, .., 2, H, D]``.
        """
        k, v = rows.unbind(2)
        options: dict[str, Any] = {"every": every, "backend": self.backend}
        if packed is not None:
            options |= packed.for_attention
        return sliding_window_attention(q, k, v, window, self.prefix, **options).flatten(-2)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


class SigmoidGate(nn.Module):
    """y * sigmoid(r W + b): what the attention says, gated by what the memory reads."""

    def __init__(self, dim: int, *, backend: Backend) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, y: Tensor, r: Tensor) -> Tensor:
        return y * torch.sigmoid(self.linear(r))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


class NormalizedGate(nn.Module):
    """N(y) * SiLU(N(r)), each N with a learned vector of its own."""

    def __init__(self, dim: int, *, backend: Backend) -> None:
        super().__init__()
        self.output_norm = RMSNorm(dim, backend=backend)
        self.memory_norm = RMSNorm(dim, backend=backend)

    def forward(self, y: Tensor, r: Tensor) -> Tensor:
        return self.output_norm(y) * F.silu(self.memory_norm(r))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


GATE_LAYERS = {"sigmoid": SigmoidGate, "normalized": NormalizedGate}


class MemoryLayer(nn.Module):
    """The memory by itself: M learns n_t, then reads n_t."""

    def __init__(self, config: TitanMACConfig, *, backend: Backend) -> None:
        super().__init__()
        self.memory = make_memory(config, backend)

    @property
    def writer(self) -> nn.Linear:
        """The product that writes to the stream."""
        return self.memory.output

    def init_state(self, batch: int) -> LayerState:
        """The state before the first token."""
        return LayerState(memory=first_state(self.memory, batch))

    def forward(
        self,
        n: Tensor,
        rotation: Rotation | None,
        state: LayerState,
        position: int,
        packed: Packed | None = None,
    ) -> tuple[Tensor, LayerState]:
        """``n [B, T, d]``, the tokens from ``position`` on, to what the stream gets of them."""
        read, memory = read_and_learned(self.memory, n, state, packed)
        return read, state._replace(memory=memory)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


class AttentionLayer(nn.Module):
    """What the two layers with attention have in common; ``gated``: a memory and its gate too."""

    def __init__(self, config: TitanMACConfig, *, backend: Backend, gated: bool) -> None:
        super().__init__()
        self.segment = config.segment
        self.attention = Attention(config, backend=backend)
        self.output = nn.Linear(config.dim, config.dim, bias=False)
        self.memory = make_memory(config, backend) if gated else None
        self.gate = GATE_LAYERS[config.gate](config.dim, backend=backend) if gated else None

    @property
    def writer(self) -> nn.Linear:
        """The product that writes to the stream."""
        return self.output

    def init_state(self, batch: int) -> LayerState:
        """The state before the first token."""
        return LayerState(None if self.memory is None else first_state(self.memory, batch))


class WindowAttention(AttentionLayer):
    """Attention over a window of the sequence; gated, the memory learns and reads n beside it."""

    def forward(
        self,
        n: Tensor,
        rotation: Rotation,
        state: LayerState,
        position: int,
        packed: Packed | None = None,
    ) -> tuple[Tensor, LayerState]:
        """``n [B, T, d]``, the tokens from ``position`` on, to what the stream gets of them."""
        attention = self.attention
        own, persistent = attention.keys_values(n), attention.persistent_rows()
        rows = attention.rows(rotation, own, None, persistent, state.seen)
        y = attention(attention.queries(n, rotation), rows, self.segment, packed=packed)
        state = state.seeing(rows[:, attention.prefix :], self.segment - 1)
        if self.memory is not None and self.gate is not None:
            read, memory = read_and_learned(self.memory, n, state, packed)
            y, state = self.gate(y, read), state._replace(memory=memory)
        return self.output(y), state

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


class SegmentAttention(AttentionLayer):
    """Attention within each segment, and to what the memory of those before it says."""

    def __init__(self, config: TitanMACConfig, *, backend: Backend, gated: bool) -> None:
        super().__init__(config, backend=backend, gated=gated)
        # A call of the model calls the memory once for each segment: it ends the gradient itself.
        self.detaches_state = self.memory is not None and self.memory.outer_grad == "detach_state"
        if self.memory is not None and self.detaches_state:
            self.memory.outer_grad = "full"

    def init_state(self, batch: int) -> LayerState:
        """The state before the first token."""
        state = super().init_state(batch)
        if self.memory is None:
            return state
        shape = (batch, self.memory.projections.reach, self.memory.dim)
        return state._replace(earlier=state.memory, normed=self.output.weight.new_zeros(shape))

    def forward(
        self,
        n: Tensor,
        rotation: Rotation,
        state: LayerState,
        position: int,
        packed: Packed | None = None,
    ) -> tuple[Tensor, LayerState]:
        """``n [B, T, d]``, the tokens from ``position`` on, to what the stream gets of them.

        Only what waits for the memory is in the loop: projections of all tokens come before it,
        what the memory says of them, the gate and what follows it after.
        """
        attention = self.attention
        persistent = attention.persistent_rows()
        sizes = list(segment_sizes(n.shape[1], position, self.segment))
        # Split once: the gradient of a slice would be as long as the whole.
        asking = attention.queries(n, rotation).split(sizes, 1)
        parts, turns = attention.keys_values(n).split(sizes, 1), rotation.split(sizes)
        own = n.split(sizes, 1)
        queries: Sequence[Tensor | None] = [None] * len(sizes)
        if self.memory is not None:
            projections = self.memory.projections
            before = cast(Tensor, state.normed).to(n.dtype)
            queries = self._queries(n, before, packed).split(sizes, 1)
            state = state._replace(normed=last(before, n, projections.reach))
        mixed, reads = [], []
        for token, q, part, turn, query in zip(own, asking, parts, turns, queries, strict=True):
            masks: dict[str, Any] = {}
            if packed is not None and self.memory is not None:
                # A document begins with a segment.
                number, end = position // self.segment, position + part.shape[1]
                memory = begun_again(self.memory, state, packed.layout.begins[:, number])
                state = state._replace(memory=memory, earlier=memory)
                masks["mask"] = packed.layout.filled[:, position:end]
            position += part.shape[1]
            recalled, beside, every = None, None, 1
            if query is not None:
                # h_t stands just before its token, and being causal is all that the order needs.
                recalled = self._recalled(query, state)
                part, beside, every = attention.keys_values(recalled), part, 2
            rows = attention.rows(turn, part, beside, persistent, state.seen)
            window = every * self.segment
            y = attention(q, rows, window, every)
            if self.memory is not None and recalled is not None:
                y = y + recalled
                read, memory, _ = self.memory.advance(y + token, state.memory, **masks)
                state = state._replace(memory=memory)
                reads.append(read)
            state = state.seeing(rows[:, attention.prefix :], window)
            if position % self.segment == 0:
                state = state._replace(earlier=state.memory, seen=None)
            mixed.append(y)
        if self.memory is not None and self.detaches_state:
            state = detached(state, self.memory)
        y = torch.cat(mixed, 1)
        if self.memory is not None and self.gate is not None:
            y = self.gate(y, self.memory.outputs(Reads.joined(reads)))
        return self.output(y), state

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def _queries(self, n: Tensor, before: Tensor, packed: Packed | None) -> Tensor:
        """Of ``n [B, T, d]`` what the memory is asked, ``[B, T, heads, D]``; the convolution sees
        the rows ``before``, or those of its own document.
        """
        projections = cast(NeuralMemory, self.memory).projections
        if packed is None:
            return projections.queries_of(n, before)
        segments = n.unflatten(1, (-1, self.segment)).flatten(0, 1)
        before = rows_before(n, packed.layout.begins, projections.reach).flatten(0, 1)
        return projections.queries_of(segments, before).unflatten(0, (len(n), -1)).flatten(1, 2)

    def _recalled(self, queries: Tensor, state: LayerState) -> Tensor:
        """h ``[B, n, d]``, what the memory of earlier segments says to a segment's queries."""
        memory, earlier = cast(NeuralMemory, self.memory), cast(MemoryState, state.earlier)
        # A segment ends with a chunk, so that the weights are those after its last token.
        return memory.output(memory.read(queries, earlier.weights).flatten(2))


class Block(nn.Module):
    """The layers of the variant and a SwiGLU, each added to the stream after a norm of its own."""

    def __init__(self, config: TitanMACConfig, *, backend: Backend) -> None:
        super().__init__()
        self.backend: Backend = backend
        gated = config.memory and config.variant in ("mac", "mag")
        layers: list[nn.Module] = []
        if config.memory and config.variant in ("mal", "lmm"):
            layers.append(MemoryLayer(config, backend=backend))
        if config.attends:
            kind = SegmentAttention if config.variant == "mac" else WindowAttention
            layers.append(kind(config, backend=backend, gated=gated))
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(
            RMSNorm(config.dim, backend=backend) for _ in range(len(layers) + 1)
        )
        self.feed_forward = SwiGLU(config.dim, config.hidden_width, backend=backend)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        state: tuple[LayerState, ...] | None,
        position: int,
        packed: Packed | None = None,
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """``x [B, T, d]``, the tokens from ``position`` on, to the same; T at least 1. Without a
        state they are the first; those of several documents may be ``packed``.
        """
        state = self.init_state(len(x)) if state is None else state
        first, *later = cast(list[RMSNorm], self.norms)
        n, after = first(x), []
        for layer, before, norm in zip(self.layers, state, later, strict=True):
            added, carried = layer(n, rotation, before, position, packed)
            n, x = add_rms_norm(x, added, norm.weight, eps=norm.eps, backend=self.backend)
            after.append(carried)
        return x + self.feed_forward(n), tuple(after)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def writers(self) -> list[nn.Linear]:
        """The products that write to the stream."""
        layers = cast(list[MemoryLayer | AttentionLayer], self.layers)
        return [*(layer.writer for layer in layers), self.feed_forward.output]

    def init_state(self, batch: int) -> tuple[LayerState, ...]:
        """The state before the first token."""
        layers = cast(list[MemoryLayer | AttentionLayer], self.layers)
        return tuple(layer.init_state(batch) for layer in layers)


def read_and_learned(
    memory: NeuralMemory, n: Tensor, state: LayerState, packed: Packed | None
) -> tuple[Tensor, MemoryState]:
    """What a memory says of ``n [B, T, d]``, which it learns on the way, and its state behind."""
    if packed is None:
        read, after, _ = memory(n, state.memory)
    else:
        read, after, _ = memory(n, **packed.for_memory)
    return read, after


def begun_again(memory: NeuralMemory, state: LayerState, rows: Tensor) -> MemoryState:
    """The memory's state, at its beginning in the rows that ``rows [B]`` names."""
    begun = memory.reset(cast(MemoryState, state.memory), rows)
    return memory.detach_state(begun) if memory.outer_grad == "none" else begun


def detached(state: LayerState, memory: NeuralMemory) -> LayerState:
    """The state with its memories cut from the graph."""
    last, earlier = cast(MemoryState, state.memory), cast(MemoryState, state.earlier)
    cut = memory.detach_state(last)
    return state._replace(
        memory=cut, earlier=cut if earlier is last else memory.detach_state(earlier)
    )


def segment_sizes(length: int, position: int, segment: int) -> Iterator[int]:
    """Of ``length`` tokens, the first of them at ``position``, how many each segment has."""
    while length > 0:
        size = min(length, segment - position % segment)
        yield size
        position, length = position + size, length - size


def last(past: Tensor | None, rows: Tensor, count: int) -> Tensor:
    """The last ``count`` rows of those of the past and the new ones."""
    if past is not None and rows.shape[1] < count:
        rows = torch.cat([past, rows], 1)
    dropped = max(0, rows.shape[1] - count)
    # A view would hold the memory of the whole call.
    return rows[:, dropped:].clone() if dropped else rows


def make_memory(config: TitanMACConfig, backend: Backend) -> NeuralMemory:
    """The memory of one block."""
    options: dict[str, Any] = {"chunk": config.memory_chunk, "convolution": config.convolution}
    if config.memory_rule != "normed":
        options |= {"forget": "zero", "residual_norm": False}
    if config.memory_rule == "origin":
        options |= {"chunk": config.segment, "convolution": 0} | ORIGIN_MEMORY
    return NeuralMemory(
        config.dim,
        heads=config.number_of_memories,
        hidden=config.memory_hidden,
        layers=config.memory_layers,
        memory_length=config.memory_length,
        outer_grad=config.outer_grad,
        backend=backend,
        **options,
    )


def first_state(memory: NeuralMemory, batch: int) -> MemoryState:
    """The memory before the first token; no gradient reaches it where none reaches later ones."""
    state = memory.init_state(batch)
    return memory.detach_state(state) if memory.outer_grad == "none" else state
