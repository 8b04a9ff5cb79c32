"""What a NeuralMemory does with the tokens of a call."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from .._core.precision import wide_dtype
from ..common.weights import MemoryWeights, Weights
from ..inputs.gates import Gates
from ..inputs.memory_input import memory_input
from ..inputs.projections import Projections
from ..inputs.tokens import counted_tokens, finite_tokens, gated_tokens
from .checks import check_mask, check_state, check_tokens
from .documents import Rotation, at_end, chunked_input
from .memory_state import MemoryState, MemoryStats, Reads, detached, stats_of
from .steps import Memory, Rules, run_steps

OuterGrad = Literal["full", "detach_state", "none"]


class WritingMemory(nn.Module):
    """The part of a NeuralMemory that writes and reads; it makes its layers and first states.

    Attributes:
        dim, heads, head_dim: of the input, number of memories side by side, and D.
        rules: how they are written and read.
        outer_grad: how far gradients pass.
        projections, gates, output: the layers around them.
        initial: their weights ``[heads, ...]`` at a row's start, ``w1 .. bn``.
    """

    dim: int
    heads: int
    head_dim: int
    rules: Rules
    outer_grad: OuterGrad
    projections: Projections
    gates: Gates
    output: nn.Linear
    initial: nn.ParameterDict

    def init_state(self, batch: int) -> MemoryState:
        """The state of ``batch`` rows before their first token."""
        raise NotImplementedError

    def write(
        self,
        x: Tensor,
        state: MemoryState | None,
        queries: Tensor | None,
        mask: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Reads, MemoryState, MemoryStats]:
        """:meth:`NeuralMemory.advance` of tokens that have been checked; documents are those of
        ``resets`` alone.
        """
        rotation = None
        if resets is not None and not resets.shape[1]:
            # Without tokens nothing begins.
            resets = None
        if state is None:
            if mask is not None and resets is None:
                rotation = Rotation.of(mask)
            state = self.init_state(len(x))
        backend = self.rules.backend
        gates = self.gates.linear
        x, present, logits = gated_tokens(x, gates.weight, gates.bias, mask, backend=backend)
        fine = None
        if queries is not None:
            queries, fine = finite_tokens(queries, present, backend=backend)
        joint, length = self.projections(x, queries), None
        options: dict[str, Any] = {
            "taps": self.projections.taps,
            "heads": self.heads,
            "key_norm": self.projections.key_norm,
            "largest": self.gates.largest,
            "theta": self.gates.constant_theta,
            "backend": backend,
        }
        if resets is None:
            before = state.convolution
            found = memory_input(joint, before, logits=logits, present=present, **options)
            q, writes, history = found
        else:
            reach = self.projections.reach
            q, writes = chunked_input(joint, logits, present, resets, reach, **options)
            history, length = at_end(joint, mask, resets, reach)
            history = history.to(state.convolution.dtype)
        rest = self.rest()
        own = writes
        if self.outer_grad == "none":
            state, own = detached(state), writes.map(Tensor.detach)
        memory = Memory(state.weights, state.momentum, rest)
        if rotation is not None:
            q, own = rotation.rotated(q), own.map(rotation.rotated)
        steps = run_steps(self.rules, q, own, memory, state.tail, resets)
        y, loss = steps.y, steps.loss
        if rotation is not None:
            y = rotation.back(y)
            loss = rotation.back(loss) if self.rules.granularity == "token" else loss
        kept = writes.written if fine is None else writes.written & fine.unsqueeze(-1)
        # Masked tokens are not written, and not counted as skipped.
        skipped, total, position = counted_tokens(
            writes, state.skipped, state.position, mask, steps.skipped, backend=backend
        )
        counters = total, position if length is None else length
        state = MemoryState(steps.weights, steps.momentum, steps.tail, history, *counters)
        if self.outer_grad != "full":
            state = detached(state)
        return Reads(y.flatten(2), kept, mask), state, stats_of(writes, skipped, loss)

    def rest(self) -> Weights | None:
        """What the memory forgets towards, ``[heads, ...]``; None for zero."""
        if self.rules.forget == "zero":
            return None
        own = [x.to(wide_dtype(x)) for x in self.initial.values()]
        if self.outer_grad == "none":
            own = [x.detach() for x in own]
        return MemoryWeights(*own) if len(own) == 4 else tuple(own)

    def check_own(self, state: MemoryState, batch: int) -> None:
        """The state must be of a memory like this one and have ``batch`` rows."""
        rows = 1 if self.rules.scope == "batch_pooled" else batch
        half = [(rows, *x.shape) for x in self.initial.values()]
        width = self.heads * self.head_dim
        others = {
            "convolution": (batch, self.projections.reach, 3 * width),
            "tail.k": (batch, None, self.heads, self.head_dim),
            "position": (batch,),
        }
        chunk = 1 if self.rules.granularity == "segment" else self.rules.chunk
        check_state(state, half, others, chunk, self.output.weight.device)

    def check_call(
        self,
        x: Tensor,
        state: MemoryState | None,
        queries: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        """Tokens, what stands beside them, and the state before them."""
        check_tokens("x", x, self.output.weight, (None, None), self.dim)
        batch, length, _ = x.shape
        if queries is not None:
            check_tokens("queries", queries, self.output.weight, (batch, length), self.dim)
        if mask is not None:
            check_mask("mask", mask, (batch, length), x.device)
        if state is not None:
            self.check_own(state, batch)
