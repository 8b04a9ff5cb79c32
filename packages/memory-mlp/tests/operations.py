"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from fusewright.memory_mlp import MemoryWeights, memory_read, memory_update
from fusewright.memory_mlp.common.weights import pack, unpack, weight_shapes
from fusewright.memory_mlp.inputs import memory_input
from fusewright.memory_mlp.inputs import tokens as token_ops
from fusewright_testkit.conformance import Package

from .drawn import (
    F32,
    INTERNAL,
    MANY,
    PARTIAL,
    AnyStridesOp,
    FlatOp,
    drawn_memory,
    normal,
)
from .operations_scan import DeepOp, RestOp, ShortChunksOp

Tensor = torch.Tensor

PACKAGE = Package(
    "fusewright.memory_mlp",
    names=(
        "MemoryScan MemoryState MemoryStats MemoryUpdate MemoryWeights NeuralMemory Reads "
        "memory_read memory_scan memory_update"
    ),
    registered=(
        "memory_update memory_update_backward memory_scan memory_scan_backward clipped_scan "
        "clipped_scan_backward deep_scan deep_scan_backward memory_read "
        "memory_read_backward memory_input memory_queries memory_input_backward finite_tokens "
        "kept_tokens gated_tokens gated_tokens_backward count_tokens"
    ),
    without_triton=(
        "memory = NeuralMemory(6, heads=2, hidden=4)\n"
        "memory(torch.randn(2, 5, 6))[0].square().sum().backward()\n"
        "assert all(x.grad.isfinite().all() for x in memory.parameters())\n"
    ),
)


@dataclass(frozen=True)
class UpdateOp(FlatOp):
    """memory_update on flat lists of tensors: k, v, the memory, its momentum, the three gates and,
    with ``row_weights``, those.
    """

    row_weights: bool = False

    function = "memory_update"
    # Leading axes, rows, D, hidden units.
    small = ((), 3, 2, 3)
    tiny = ((), 2, 1, 2)
    several = ((2,), 5, 4, 6)
    growing = (((), 5, 4, 6), ((), 7, 4, 6), ((), 9, 4, 6))
    empty = (((0,), 3, 4, 5),)
    strided = ((2, 3), 5, 4, 6)
    gpu = (((), 2048, 512, 512), ((2, 3), 300, 64, 256), ((), 20000, 64, 128))
    exempt: ClassVar = MANY

    def having(self, row_weights: bool = False, **options: Any) -> UpdateOp:
        """The op with options of its own."""
        return replace(self, row_weights=row_weights, options=self.options | options)

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """What gradients pass through: W', S' and the loss."""
        done = self.whole(*tensors, **options)
        return *done.weights, *done.momentum, done.loss

    def whole(self, k, v, *others, **options):
        state = MemoryWeights(*others[:4]), MemoryWeights(*others[4:8])
        return memory_update(k, v, *state, *others[8:], **self.options | options)

    def autocast(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*(x.bfloat16() for x in tensors[:2]), *tensors[2:]]

    def draw(
        self,
        lead: tuple[int, ...],
        rows: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
    ) -> list[Tensor]:
        """Rows and a memory of unit size, gates between 0 and 1."""
        draw = normal(dtype, device)
        memory = drawn_memory(draw, lead, hidden, width)
        momentum = [draw(*shape, spread=0.1) for shape in weight_shapes(lead, hidden, width)]
        shapes = [lead] * 3 + [(*lead, rows)] * self.row_weights
        numbers = [torch.rand(shape, device=device, dtype=memory[0].dtype) for shape in shapes]
        k, v = (draw(*lead, rows, width).to(dtype) for _ in range(2))
        return [k, v, *memory, *momentum, *numbers]


@dataclass(frozen=True)
class ReadOp(AnyStridesOp):
    """memory_read on flat lists of tensors: q and the memory."""

    function = "memory_read"
    # Rows, tokens, heads, D, hidden units.
    small = (1, 2, 2, 2, 3)
    tiny = (1, 2, 1, 2, 2)
    several = (1, 35, 2, 5, 7)
    growing = ((1, 5, 2, 3, 4), (1, 7, 2, 3, 4), (1, 9, 2, 3, 4))
    empty = ((2, 0, 3, 4, 5), (0, 3, 2, 4, 5), (2, 3, 0, 4, 5))
    strided = (2, 5, 3, 4, 6)
    gpu = ((4, 512, 5, 64, 128), (1, 3000, 2, 64, 128))
    # The weights are packed first.
    saves = 0

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        q, *weights = tensors
        return (memory_read(q, MemoryWeights(*weights), **self.options | options),)

    def autocast(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].bfloat16(), *tensors[1:]]

    def kept(self, tensors: list[Tensor]) -> int:
        """The weights, packed."""
        return sum(x.numel() for x in tensors[1:])

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
    ) -> list[Tensor]:
        """Queries and a memory of unit size."""
        draw = normal(dtype, device)
        memory = drawn_memory(draw, (batch, heads), hidden, width)
        return [draw(batch, tokens, heads, width).to(dtype), *memory]


@dataclass(frozen=True)
class InputOp(FlatOp):
    """memory_input on flat lists of tensors: joint, history, taps where there are any, logits;
    without logits memory_queries.
    """

    heads: int = 2
    key_norm: str | None = "l2"
    largest: float = 0.25
    theta: float | None = None
    taps: int = 4
    queries: bool = False
    present: Tensor | None = None

    function = "memory_input"
    # Rows, tokens, D.
    small = (1, 3, 2)
    tiny = (1, 2, 1)
    several = (1, 9, 5)
    growing = ((1, 5, 3), (1, 7, 3), (1, 9, 3))
    # Without tokens the history's gradient passes on.
    empty = ((0, 3, 5), (0, 0, 5))
    gpu = ((4, 515, 64),)
    exempt: ClassVar = PARTIAL

    def having(self, **options: Any) -> InputOp:
        """The op with options of its own."""
        return replace(self, **options)

    def public(self, *tensors: Tensor, backend: str = "auto") -> tuple[Tensor, ...]:
        """q, k, v, alpha, eta, theta and the next history; of queries, q."""
        whole = self.whole(*tensors, backend=backend)
        if self.queries:
            return (whole,)
        k, v, alpha, eta, theta, _ = whole.writes
        # A constant has no gradient.
        gates = (alpha, eta) if self.theta else (alpha, eta, theta)
        return whole.q, k, v, *gates, whole.history

    def whole(self, joint, history, *others, backend="auto"):
        taps, *logits = others if self.taps else (None, *others)
        options = dict(heads=self.heads, key_norm=self.key_norm, backend=backend)
        if self.queries:
            return memory_input.memory_queries(joint, history, taps, **options)
        return memory_input.memory_input(
            *(joint, history, taps, *logits, self.present),
            **dict(largest=self.largest, theta=self.theta),
            **options,
        )

    def kept(self, tensors: list[Tensor]) -> int:
        return 0

    def draw(
        self,
        batch: int,
        tokens: int,
        width: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        history_dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """All of unit size."""
        draw = normal(dtype, device)
        channels = (1 if self.queries else 3) * self.heads * width
        history = draw(batch, max(self.taps - 1, 0), channels).to(history_dtype or dtype)
        taps = [draw(channels, self.taps)] if self.taps else []
        gates = 0 if self.queries else 2 if self.theta else 3
        logits = [draw(batch, tokens, gates * self.heads)] if gates else []
        return [draw(batch, tokens, channels).to(dtype), history, *taps, *logits]


@dataclass(frozen=True)
class GatedOp(AnyStridesOp):
    """gated_tokens on flat lists of tensors: x, the gates' weights and their biases."""

    mask: Tensor | None = None

    function = "gated_tokens"
    # Rows, tokens, columns, logits.
    small = (1, 3, 4, 2)
    tiny = (1, 2, 2, 1)
    several = (2, 9, 7, 6)
    growing = ((1, 5, 4, 3), (1, 7, 4, 3), (1, 9, 4, 3))
    empty = ((0, 3, 5, 3), (2, 0, 5, 3))
    gpu = ((3, 515, 320, 15),)
    saves = 1
    saves_outputs = True
    exempt: ClassVar = PARTIAL

    def having(self, mask: Tensor | None) -> GatedOp:
        """The op with a mask."""
        return replace(self, mask=mask)

    def public(self, *tensors: Tensor, backend: str = "auto") -> tuple[Tensor, ...]:
        """The tokens that are left, and the logits."""
        y, _, logits = token_ops.gated_tokens(*tensors, self.mask, backend=backend)
        return y, logits

    def draw(
        self,
        batch: int,
        tokens: int,
        width: int,
        logits: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        weight_dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """All of unit size."""
        draw = normal(dtype, device)
        weights = draw(logits, width), draw(logits)
        if weight_dtype is not None:
            weights = tuple(x.to(weight_dtype) for x in weights)
        return [draw(batch, tokens, width).to(dtype), *weights]


@dataclass(frozen=True)
class TokensOp(AnyStridesOp):
    """x of tokens that are finite, then of those that are kept: of every three tokens the second is
    masked, of every four the third is not kept in one head.
    """

    function = "kept_tokens"
    # Rows, tokens, columns.
    small = (1, 3, 4)
    tiny = (1, 2, 2)
    several = (2, 9, 7)
    growing = ((1, 5, 4), (1, 7, 4), (1, 9, 4))
    empty = ((0, 3, 5), (2, 0, 5))
    gpu = ((3, 515, 320),)
    exempt: ClassVar = INTERNAL | {
        "test_input_changed_after_the_forward_pass_is_noticed": "x is no operand of the derivative",
        "test_traced_graph_calls_the_op_and_its_backward": "it is its own derivative",
        "test_inductor_compiles_forward_and_backward": "a sine of torch stands between both ops",
    }

    def public(self, x: Tensor, backend: str = "auto") -> Tensor:
        token = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        mask, kept = token % 3 != 1, torch.stack([token >= 0, token % 4 != 2], -1)
        y, _ = token_ops.finite_tokens(x, mask, backend=backend)
        return token_ops.kept_tokens(y.sin(), kept, mask, 3.0, backend=backend)

    def draw(
        self, batch: int, tokens: int, width: int, dtype: torch.dtype = F32, device: str = "cpu"
    ) -> list[Tensor]:
        return [normal(dtype, device)(batch, tokens, width).to(dtype)]


@dataclass(frozen=True)
class StateOp(ReadOp):
    """The read of weights that lie in one tensor with a momentum, as a scan hands them on."""

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        q, *weights = tensors
        half = MemoryWeights(*weights)
        state, _ = unpack(pack(half, half), half.b1.shape[-1], q.shape[-1])
        return super().public(q, *state, **options)


UPDATE = UpdateOp(dict(max_grad_norm=0.5), row_weights=True)
SCAN = ShortChunksOp()
OPERATIONS = {
    op.name: op for op in (UPDATE, SCAN, DeepOp(), ReadOp(), InputOp(), GatedOp(), TokensOp())
}
FORMS = {
    op.name: op
    for op in (
        UpdateOp(form="-plain"),
        ShortChunksOp(
            dict(read="before", activation="gelu", max_grad_norm=0.7),
            form="-clipped",
            masked=True,
            packed=True,
        ),
        RestOp(dict(residual_norm=True), form="-resting", masked=True, packed=True),
        DeepOp(
            dict(read="before", activation="gelu", residual_norm=True),
            form="-resting",
            layers=4,
            rests=True,
            masked=True,
            packed=True,
        ),
        StateOp(form="-of-a-state"),
        InputOp(form="-constant-theta", theta=0.1, taps=1, key_norm="rms"),
        InputOp(form="-without-taps", taps=0, key_norm=None),
        InputOp(form="-of-queries", queries=True),
    )
}
