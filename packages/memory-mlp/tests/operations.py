"""The package and its operations, as the conformance suite asks about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from fusewright.memory_mlp import MemoryWeights, memory_read, memory_scan, memory_update
from fusewright.memory_mlp.common.deep_weights import deep_shapes
from fusewright.memory_mlp.common.weights import pack, unpack, weight_shapes
from fusewright.memory_mlp.inputs import memory_input
from fusewright.memory_mlp.inputs import tokens as token_ops
from fusewright.memory_mlp.scan.deep_scan import deep_memory_scan
from fusewright_testkit.conformance import Operation, Package
from fusewright_testkit.yardstick import as_tuple

Tensor = torch.Tensor
F32, F64 = torch.float32, torch.float64

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

INTERNAL = dict.fromkeys(
    ("test_refused_input_touches_no_memory", "test_tensors_on_two_devices_are_refused"),
    "the layer that calls it has checked its operands",
)
PARTIAL = INTERNAL | {"test_transform_is_right": "the first output is not one of all operands"}
MANY = {"test_any_choice_of_inputs_may_require_gradients": "a few choices among its many are tests"}


def normal(dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    """Draws tensors of normal numbers, in fp64 beside fp64 operands, else in fp32."""
    state = F64 if dtype == F64 else F32

    def draw(*shape: int, spread: float = 1.0) -> Tensor:
        return spread * torch.randn(*shape, device=device, dtype=state)

    return draw


def drawn_memory(
    draw: Callable[..., Tensor], lead: tuple[int, ...], hidden: int, width: int
) -> list[Tensor]:
    """Weights whose outputs are of the size of their inputs."""
    spreads = width**-0.5, 0.1, hidden**-0.5, 0.1
    shapes = weight_shapes(lead, hidden, width)
    return [draw(*shape, spread=s) for shape, s in zip(shapes, spreads, strict=True)]


@dataclass(frozen=True)
class FlatOp(Operation):
    """An op on flat lists of tensors, with options of its own."""

    options: dict[str, Any] = field(default_factory=dict)
    form: str = ""

    low = torch.float16
    gpu_dtypes = (torch.bfloat16, torch.float32)
    function: ClassVar[str]

    @property
    def name(self) -> str:
        return self.function + self.form

    def having(self, **options: Any) -> Self:
        """The op with options of its own."""
        return replace(self, options=self.options | options)

    def sample(self, sizes: tuple, dtype: torch.dtype, device: str) -> list[Tensor]:
        return self.draw(*sizes, dtype, device)


class AnyStridesOp(FlatOp):
    """The kernels' outputs are contiguous, the reference's have any strides."""

    def reference(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        outputs = as_tuple(super().reference(*tensors, **options))
        return tuple(y.contiguous() for y in outputs)


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
class ScanOp(FlatOp):
    """memory_scan on flat lists of tensors: q, k, v, the memory, its momentum and the three gates.
    A start that all rows share is given without their axis.
    """

    function = "memory_scan"
    # Rows, tokens, heads, D, hidden units.
    small = (1, 2, 1, 2, 3)
    tiny = (1, 2, 1, 1, 2)
    several = (1, 3, 2, 3, 5)
    growing = ((1, 5, 1, 3, 4), (1, 7, 1, 3, 4), (1, 9, 1, 3, 4))
    empty = ((0, 3, 2, 4, 5), (2, 3, 0, 4, 5))
    gpu = ((2, 300, 3, 64, 128), (2, 300, 3, 64, 256))
    exempt: ClassVar = MANY | {
        "test_strides_change_no_bit_and_outputs_are_contiguous": (
            "weights and momentum are views of one tensor"
        )
    }

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """y, then weights and momentum after the last token."""
        q, k, v, *others = tensors
        start = [
            x.expand(len(q), *x.shape) if getattr(x, "ndim", 4) < axes else x
            for x, axes in zip(others[:8], (4, 3) * 4, strict=True)
        ]
        state = MemoryWeights(*start[:4]), MemoryWeights(*start[4:])
        done = memory_scan(q, k, v, *state, *others[8:], **self.options | options)
        return done.y, *done.weights, *done.momentum

    def autocast(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*(x.bfloat16() for x in tensors[:3]), *tensors[3:]]

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        rate: float | None = None,
    ) -> list[Tensor]:
        """Keys of length 1, gates of a memory that stays small, theta up to ``rate``, which is the
        lower the more tokens write.
        """
        rate = min(0.05, 0.6 / max(tokens, 1)) if rate is None else rate
        draw = normal(dtype, device)
        q, k, v = (draw(batch, tokens, heads, width) for _ in range(3))
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
        lead = batch, heads
        memory = drawn_memory(draw, lead, hidden, width)
        momentum = [draw(*shape, spread=0.01) for shape in weight_shapes(lead, hidden, width)]
        gates = [
            least + (most - least) * torch.rand(batch, tokens, heads, device=device, dtype=q.dtype)
            for least, most in ((0.0, 0.02), (0.85, 0.95), (0.0, rate))
        ]
        return [*(x.to(dtype) for x in (q, k, v)), *memory, *momentum, *gates]


@dataclass(frozen=True)
class DeepOp(FlatOp):
    """deep_memory_scan on flat lists of tensors: q, k, v, the memory of ``layers`` layers, its
    momentum, the three gates and, with ``rests``, what it forgets towards. Chunks are of 2 tokens
    where there are few; every third token is not written where it is ``masked``.
    """

    layers: int = 3
    rests: bool = False
    masked: bool = False

    function = "deep_scan"
    # Rows, tokens, heads, D, hidden units.
    small = (1, 2, 1, 2, 3)
    tiny = (1, 2, 1, 1, 2)
    several = (1, 3, 2, 3, 5)
    growing = ((1, 5, 1, 3, 4), (1, 7, 1, 3, 4), (1, 9, 1, 3, 4))
    empty = ((0, 3, 2, 4, 5), (2, 3, 0, 4, 5))
    gpu = ((2, 300, 3, 64, 128), (2, 300, 3, 64, 256))
    # The memory is packed first.
    saves = 0
    exempt: ClassVar = (
        MANY
        | INTERNAL
        | {
            "test_strides_change_no_bit_and_outputs_are_contiguous": (
                "weights and momentum are views of one tensor"
            )
        }
    )

    def having(self, **options: Any) -> DeepOp:
        """The op with fields or options of its own."""
        fields = {x: options.pop(x) for x in ("layers", "rests", "masked") if x in options}
        return replace(self, **fields, options=self.options | options)

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """y, then weights and momentum after the last token."""
        q, k, v, *others = tensors
        size = 2 * self.layers
        halves = [tuple(others[:size]), tuple(others[size : 2 * size])]
        gates, rest = others[2 * size :][:3], tuple(others[2 * size + 3 :])
        chunk = 2 if q.shape[1] < 64 else 64
        mask = None
        if self.masked:
            token = torch.arange(q.shape[1], device=q.device)
            mask = (token % 3 != 1).view(1, -1, 1).expand(q.shape[:3])
        y, weights, momentum, *_ = deep_memory_scan(
            *(q, k, v, *halves, *gates, mask),
            rest or None,
            **dict(chunk=chunk) | self.options | options,
        )
        return y, *weights, *momentum

    def autocast(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*(x.bfloat16() for x in tensors[:3]), *tensors[3:]]

    def kept(self, tensors: list[Tensor]) -> int:
        """Weights and momentum, packed: at the start, and at that of every chunk; and the rest."""
        chunks, size = -(-tensors[0].shape[1] // 2), 4 * self.layers
        memory, rest = tensors[3 : 3 + size], tensors[6 + size :]
        return sum(x.numel() for x in memory) * (1 + chunks) + sum(x.numel() for x in rest)

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        rate: float | None = None,
    ) -> list[Tensor]:
        """As those of the scan of two layers."""
        scan = ScanOp().draw(batch, tokens, heads, width, hidden, dtype, device, rate=rate)
        draw = normal(dtype, device)

        def memory(lead: tuple[int, ...], spread: float) -> list[Tensor]:
            # Weights whose outputs are of the size of their inputs.
            return [
                draw(*x, spread=spread * (0.1 if len(x) == len(lead) + 1 else x[-1] ** -0.5))
                for x in deep_shapes(lead, self.layers, hidden, width)
            ]

        weights, momentum = memory((batch, heads), 1.0), memory((batch, heads), 0.1)
        rest = memory((heads,), 1.0) if self.rests else []
        alpha, eta, theta = scan[11:]
        if self.rests:
            # Of few tokens most are forgotten, of many half.
            alpha = min(15.0, 600.0 / max(tokens, 1)) * alpha
        return [*scan[:3], *weights, *momentum, alpha, eta, theta, *rest]


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
class ShortChunksOp(ScanOp):
    """The scan in chunks of 2 tokens where there are few; every third token is not written where it
    is ``masked``.
    """

    masked: bool = False

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        q = tensors[0]
        if isinstance(q, Tensor):
            options["chunk"] = 2 if q.shape[1] < 64 else 64
            if self.masked:
                token = torch.arange(q.shape[1], device=q.device)
                options["write_mask"] = (token % 3 != 1).expand(q.shape[:2])
        return super().public(*tensors, **options)


@dataclass(frozen=True)
class RestOp(ShortChunksOp):
    """The scan with a rest, whose tensors stand last, and gates that forget enough to see it."""

    def public(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        *others, w1, b1, w2, b2 = tensors
        options["rest"] = MemoryWeights(w1, b1, w2, b2)
        return super().public(*others, **options)

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = F32,
        device: str = "cpu",
        *,
        rate: float | None = None,
    ) -> list[Tensor]:
        sizes = batch, tokens, heads, width, hidden
        *tensors, alpha, eta, theta = super().draw(*sizes, dtype, device, rate=rate)
        rest = drawn_memory(normal(dtype, device), (heads,), hidden, width)
        # Of few tokens most are forgotten, of many half.
        return [*tensors, min(15.0, 600.0 / max(tokens, 1)) * alpha, eta, theta, *rest]


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
            dict(read="before", activation="gelu", max_grad_norm=0.7), form="-clipped", masked=True
        ),
        RestOp(dict(residual_norm=True), form="-resting", masked=True),
        DeepOp(
            dict(read="before", activation="gelu", residual_norm=True),
            form="-resting",
            layers=4,
            rests=True,
            masked=True,
        ),
        StateOp(form="-of-a-state"),
        InputOp(form="-constant-theta", theta=0.1, taps=1, key_norm="rms"),
        InputOp(form="-without-taps", taps=0, key_norm=None),
        InputOp(form="-of-queries", queries=True),
    )
}
