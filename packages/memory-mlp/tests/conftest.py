"""What the tests of this package share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from fusewright.memory_mlp import (
    MemoryWeights,
    NeuralMemory,
    memory_read,
    memory_scan,
    memory_update,
)
from fusewright.memory_mlp.common.weights import weight_shapes
from fusewright.memory_mlp.inputs import memory_input, tokens
from fusewright_testkit import Yardstick

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture
def memory_of(device: str) -> Callable[..., NeuralMemory]:
    """Makes small layers whose parameters are all drawn, so that no gate stands at its start."""

    @torch.no_grad()
    def make(**options: Any) -> NeuralMemory:
        sizes = dict(heads=2, head_dim=5, hidden=7, chunk=6, dtype=torch.float64, device=device)
        memory = NeuralMemory(9, **sizes | options)
        for parameter in memory.parameters():
            parameter.normal_(std=0.4)
        return memory

    return make


@dataclass(frozen=True)
class FlatOp:
    """An op on flat lists of tensors, with options of its own."""

    options: dict[str, Any] = field(default_factory=dict)

    def having(self, **options: Any) -> Self:
        """The op with options of its own."""
        return replace(self, options=self.options | options)

    def public(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """What gradients pass through."""
        raise NotImplementedError

    def kernels(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.public(*tensors, backend="triton")

    def reference(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.public(*tensors, backend="reference")

    def check(self, tensors: list[torch.Tensor]) -> None:
        """Hold the kernels' outputs and gradients against the yardstick."""
        Yardstick(self.reference, tensors).check(self.kernels)


def drawn_memory(
    normal: Callable[..., torch.Tensor], lead: tuple[int, ...], hidden: int, width: int
) -> list[torch.Tensor]:
    """Weights whose outputs are of the size of their inputs."""
    spreads = width**-0.5, 0.1, hidden**-0.5, 0.1
    shapes = weight_shapes(lead, hidden, width)
    return [normal(*shape, spread=s) for shape, s in zip(shapes, spreads, strict=True)]


@dataclass(frozen=True)
class UpdateOp(FlatOp):
    """memory_update on flat lists of tensors: k, v, the memory, its momentum, the three gates and,
    with ``row_weights``, those.
    """

    row_weights: bool = False

    def having(self, row_weights: bool = False, **options: Any) -> UpdateOp:
        """The op with options of its own."""
        return replace(self, row_weights=row_weights, options=self.options | options)

    def public(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """What gradients pass through: W', S' and the loss."""
        done = self.whole(*tensors, **options)
        return *done.weights, *done.momentum, done.loss

    def whole(self, k, v, *others, **options):
        state = MemoryWeights(*others[:4]), MemoryWeights(*others[4:8])
        return memory_update(k, v, *state, *others[8:], **self.options | options)

    def draw(
        self,
        lead: tuple[int, ...],
        rows: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> list[torch.Tensor]:
        """Rows and a memory of unit size, gates between 0 and 1."""
        state = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int, spread: float = 1.0) -> torch.Tensor:
            return spread * torch.randn(*shape, device=device, dtype=state)

        memory = drawn_memory(normal, lead, hidden, width)
        momentum = [normal(*shape, spread=0.1) for shape in weight_shapes(lead, hidden, width)]
        gates = [torch.rand(lead, device=device, dtype=state) for _ in range(3)]
        k, v = (normal(*lead, rows, width).to(dtype) for _ in range(2))
        others = [torch.rand(*lead, rows, device=device, dtype=state)] if self.row_weights else []
        return [k, v, *memory, *momentum, *gates, *others]


@dataclass(frozen=True)
class ScanOp(FlatOp):
    """memory_scan on flat lists of tensors: q, k, v, the memory, its momentum and the three gates.
    A start that all rows share is given without their axis.
    """

    def public(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """y, then weights and momentum after the last token."""
        q, k, v, *others = tensors
        rows = q.shape[0]
        start = [
            x if x.ndim == dimensions else x.expand(rows, *x.shape)
            for x, dimensions in zip(others[:8], (4, 3) * 4, strict=True)
        ]
        state = MemoryWeights(*start[:4]), MemoryWeights(*start[4:])
        done = memory_scan(q, k, v, *state, *others[8:], **self.options | options)
        return done.y, *done.weights, *done.momentum

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        rate: float = 0.05,
    ) -> list[torch.Tensor]:
        """Keys of length 1, gates of a memory that stays small, theta up to ``rate``."""
        state = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int, spread: float = 1.0) -> torch.Tensor:
            return spread * torch.randn(*shape, device=device, dtype=state)

        def gate(least: float, most: float) -> torch.Tensor:
            number = torch.rand(batch, tokens, heads, device=device, dtype=state)
            return least + (most - least) * number

        q, k, v = (normal(batch, tokens, heads, width) for _ in range(3))
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
        lead = batch, heads
        memory = drawn_memory(normal, lead, hidden, width)
        momentum = [normal(*shape, spread=0.01) for shape in weight_shapes(lead, hidden, width)]
        gates = gate(0.0, 0.02), gate(0.85, 0.95), gate(0.0, rate)
        return [*(x.to(dtype) for x in (q, k, v)), *memory, *momentum, *gates]


@dataclass(frozen=True)
class ReadOp(FlatOp):
    """memory_read on flat lists of tensors: q and the memory."""

    def public(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        q, *weights = tensors
        return (memory_read(q, MemoryWeights(*weights), **self.options | options),)

    def draw(
        self,
        batch: int,
        tokens: int,
        heads: int,
        width: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> list[torch.Tensor]:
        """Queries and a memory of unit size."""
        state = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int, spread: float = 1.0) -> torch.Tensor:
            return spread * torch.randn(*shape, device=device, dtype=state)

        memory = drawn_memory(normal, (batch, heads), hidden, width)
        return [normal(batch, tokens, heads, width).to(dtype), *memory]


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
    present: torch.Tensor | None = None

    def having(self, **options: Any) -> InputOp:
        """The op with options of its own."""
        return replace(self, **options)

    def public(self, *tensors: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, ...]:
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

    def draw(
        self,
        batch: int,
        tokens: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        history_dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """All of unit size."""
        state = torch.float64 if dtype == torch.float64 else torch.float32
        channels = (1 if self.queries else 3) * self.heads * width
        shapes = [(batch, tokens, channels), (batch, max(self.taps - 1, 0), channels)]
        dtypes = [dtype, history_dtype or dtype]
        if self.taps:
            shapes.append((channels, self.taps))
            dtypes.append(state)
        if not self.queries:
            shapes.append((batch, tokens, (2 if self.theta else 3) * self.heads))
            dtypes.append(state)
        return [
            torch.randn(shape, device=device, dtype=state).to(kind)
            for shape, kind in zip(shapes, dtypes, strict=True)
        ]


@dataclass(frozen=True)
class GatedOp(FlatOp):
    """gated_tokens on flat lists of tensors: x, the gates' weights and their biases."""

    mask: torch.Tensor | None = None

    def having(self, mask: torch.Tensor | None) -> GatedOp:
        """The op with a mask."""
        return replace(self, mask=mask)

    def public(self, *tensors: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, ...]:
        """The tokens that are left, and the logits."""
        y, _, logits = tokens.gated_tokens(*tensors, self.mask, backend=backend)
        return y, logits

    def draw(
        self,
        batch: int,
        tokens: int,
        width: int,
        logits: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        weight_dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """All of unit size."""
        state = torch.float64 if dtype == torch.float64 else torch.float32
        shapes = (batch, tokens, width), (logits, width), (logits,)
        dtypes = dtype, weight_dtype or state, weight_dtype or state
        return [
            torch.randn(shape, device=device, dtype=state).to(kind)
            for shape, kind in zip(shapes, dtypes, strict=True)
        ]


@pytest.fixture
def update_op() -> UpdateOp:
    return UpdateOp()


@pytest.fixture
def scan_op() -> ScanOp:
    return ScanOp()


@pytest.fixture
def read_op() -> ReadOp:
    return ReadOp()


@pytest.fixture
def input_op() -> InputOp:
    return InputOp()


@pytest.fixture
def gated_op() -> GatedOp:
    return GatedOp()


@pytest.fixture
def many_input_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that few tokens take several, and partial sums that are added in several
    rounds.
    """
    from fusewright.memory_mlp.inputs import launch, launch_tokens

    small = launch_tokens.TokensTile(size=64, num_warps=1)
    # A warp has 32 numbers, rows of up to 8 columns; some windows are longer than a run.
    runs = (launch.RunTile(run=2, numbers=1, num_warps=1),)
    parts = launch.PartsTile(numbers=16, parts=2, num_warps=1)
    plans = (
        *(launch.forward_plan, launch.backward_plan, launch_tokens.token_plan),
        *(launch_tokens.gated_plan, launch_tokens.gated_backward_plan, launch_tokens.count_plan),
    )
    for plan in plans:
        plan.cache_clear()
    monkeypatch.setattr(launch, "FORWARD", runs)
    monkeypatch.setattr(launch, "BACKWARD", runs)
    monkeypatch.setattr(launch, "ADD_PARTS", parts)
    monkeypatch.setattr(launch_tokens, "TOKENS", small)
    gated = launch_tokens.GatedTile(numbers=16, held=1, num_warps=1)
    monkeypatch.setattr(launch_tokens, "GATED_TOKENS", gated)
    monkeypatch.setattr(launch_tokens, "GATED_TOKENS_BACKWARD", gated)
    weights = launch_tokens.WeightsTile(columns=16, tokens=16)
    monkeypatch.setattr(launch_tokens, "GATE_WEIGHTS", weights)
    count = launch_tokens.CountTile(size=4, num_warps=1)
    monkeypatch.setattr(launch_tokens, "COUNTED_TOKENS", count)
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.fixture
def many_read_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that few numbers take several, and tokens that are split among programs."""
    from fusewright.memory_mlp.read import launch

    plans = launch.forward_plan, launch.backward_plan
    for plan in plans:
        plan.cache_clear()
    for name, tile in (("FORWARD", "ReadTile"), ("BACKWARD", "ReadBackwardTile")):
        small = dict(tokens=16, block_h=16, num_warps=2)
        if name == "BACKWARD":
            small |= dict(units=16, num_stages=1, split_tokens=32, fills=100)
        lines = [
            getattr(launch, tile)(precision, **small) for precision in ("narrow", "tf32", "tf32x3")
        ]
        monkeypatch.setattr(launch, name, tuple(lines))
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.fixture
def fresh_updates() -> Iterator[None]:
    """No update planned before the test, and none of its own kept: for tests that change tables."""
    from fusewright.memory_mlp.update.launch import update_plan
    from fusewright.memory_mlp.update.launch_backward import backward_plan

    for plan in (update_plan, backward_plan):
        plan.cache_clear()
    yield
    for plan in (update_plan, backward_plan):
        plan.cache_clear()


@pytest.fixture
def many_update_programs(fresh_updates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that few numbers take several in every direction, and rows that are split."""
    from fusewright.memory_mlp._core.backends import DeviceProperties
    from fusewright.memory_mlp.update import launch, launch_backward, problem

    lines = tuple(
        problem.UpdateTile(precision, 16, 16, 16, 1, 1, aligned=False)
        for precision in ("narrow", "tf32", "ieee")
    )
    tables = {
        launch: ("HIDDEN", "RESIDUAL", "SLOPE", "GRADIENTS"),
        launch_backward: ("P_BAR", "E_BAR", "Z_BAR", "DK", "DWEIGHTS"),
    }
    for module, names in tables.items():
        for name in names:
            monkeypatch.setattr(module, name, lines)
    block = problem.UpdateBlock(block=128, num_warps=1)
    monkeypatch.setattr(launch, "STEP", block)
    monkeypatch.setattr(problem, "TRANSPOSE", problem.UpdateBlock(block=16, num_warps=1))
    for name in ("INNER_PRODUCTS", "COTANGENTS"):
        monkeypatch.setattr(launch_backward, name, block)
    monkeypatch.setattr(problem, "ADD_SPLITS", block)
    gpu = DeviceProperties(multiprocessors=200, shared_bytes=99 << 10, capability=90)
    monkeypatch.setattr(problem, "device_properties", lambda device: gpu)
    monkeypatch.setattr(problem, "ROWS_OF_A_SPLIT", 16)


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
