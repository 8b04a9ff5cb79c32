"""Training steps of TitanMAC: eager, compiled, replayed from a CUDA graph, and a peer's.

A step is forward pass and loss under bf16 autocast over fp32 weights, backward pass and torch's
fused AdamW, on tokens that lie on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..titan_mac import TitanMAC
from ..titan_mac_layers import TitanMACConfig
from ..training import torch_adamw
from .harness import FACTOR, SEED, ULPS, Expected, Failure, attempt
from .results import COLUMNS, Row, merge
from .step import Measurement, Step, Taken, Time

ProviderName = Literal["fusewright", "fusewright-compile", "titans-pytorch"]
PROVIDER_NAMES = get_args(ProviderName)
PEER = "titans-pytorch"
# Before a graph is captured, everything has been compiled, tuned and allocated once.
WARM_UP_STEPS = 3


class TextShape(NamedTuple):
    """B rows of T tokens, of each of which the next one is predicted."""

    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> TextShape:
        """Read "4,4096"."""
        try:
            shape = cls(*map(int, text.split(",")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a shape is B,T such as 4,4096; got {text!r}") from error
        if min(shape) < 1:
            raise ValueError(f"B and T must be at least 1; got {text!r}")
        return shape

    def case(self, config: TitanMACConfig) -> str:
        return f"dim={config.dim} layers={config.layers} B={self.batch} T={self.length}"

    @property
    def tokens(self) -> int:
        return self.batch * self.length


# The benchmark of dim 320 at its three sizes, and the profiled model's one.
SHAPES = {
    "tiny": (TextShape(4, 256),),
    "l4": (TextShape(4, 4096), TextShape(4, 2048), TextShape(2, 4096)),
    "profile": (TextShape(4, 512),),
    "170m": (TextShape(4, 4096),),
}


class Text:
    """The same random tokens for every step: ``[B, T + 1]``."""

    def __init__(self, vocab_size: int, length: int, device: torch.device) -> None:
        self.device = device
        self.drawn = (vocab_size, length)
        self.tokens: dict[int, Tensor] = {}

    def sample(self, batch: int) -> Tensor:
        if batch not in self.tokens:
            vocab_size, length = self.drawn
            generator = torch.Generator().manual_seed(SEED)
            drawn = torch.randint(vocab_size, (batch, length + 1), generator=generator)
            self.tokens[batch] = drawn.to(self.device)
        return self.tokens[batch]


class Unclocked:
    """No marks: a graph that is captured has no times inside."""

    def mark(self) -> None:
        pass


def our_loss(model: TitanMAC, tokens: Tensor) -> Tensor:
    return model.loss(tokens)


def peer_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, return_loss=True)


def peer_model(config: TitanMACConfig) -> nn.Module:
    """titans-pytorch's memory as context, with its own defaults beside these sizes."""
    from titans_pytorch import MemoryAsContextTransformer

    return MemoryAsContextTransformer(
        num_tokens=config.vocab_size,
        dim=config.dim,
        depth=config.layers,
        heads=config.heads,
        segment_len=config.segment,
    )


class Replayed:
    """A step captured in a CUDA graph, all of it: one launch, nothing of Python in between."""

    def __init__(self, step: Step) -> None:
        for group in step.optimizer.param_groups:
            group["capturable"] = True
        stream = torch.cuda.Stream(step.device)
        stream.wait_stream(torch.cuda.current_stream(step.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                step.run(Unclocked())
        torch.cuda.current_stream(step.device).wait_stream(stream)
        torch.cuda.synchronize(step.device)
        self.device = step.device
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss = step.run(Unclocked())

    def timed(self) -> Taken:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize(self.device)
        return Taken(start.elapsed_time(end), [], float(self.loss))


@dataclass(frozen=True)
class TitanMACHarness:
    """What all measurements have in common.

    Attributes:
        config: the shape of the model.
        device: where everything is.
        seconds: about how long the steps of one provider are timed.
        check: hold the first loss of ours against one in fp32.
        file: the result file; None keeps nothing.
        console: where the tables go.
    """

    config: TitanMACConfig
    device: torch.device
    seconds: float
    check: bool
    file: Path | None
    console: Console

    def bench(self, shape: TextShape, providers: list[ProviderName]) -> bool:
        """Measure one shape, print its table, keep its rows; False where ours failed."""
        table = empty_table(f"{shape.case(self.config)}, {self.config.variant}")
        good = True
        expected = self.expected(shape) if self.check else None
        for provider in providers:
            for timing in self.timings(provider):
                measured = attempt(self.measure, shape, provider, timing, expected)
                self.let_go()
                name = self.row_name(provider)
                if isinstance(measured, Failure):
                    good &= provider == PEER
                    table.add_row(name, timing, measured.reason)
                    continue
                add(table, shape, name, timing, measured)
                if self.file is not None:
                    merge(self.file, [row(self.config, shape, name, timing, measured)])
        self.console.print(table)
        return good

    def timings(self, provider: ProviderName) -> tuple[str, ...]:
        """A graph is captured on a card, and of ours: a peer may wait for the device."""
        graph = self.device.type == "cuda" and provider != PEER
        return ("wall", "graph") if graph else ("wall",)

    def row_name(self, provider: ProviderName) -> str:
        """The provider with what is not in the case: a peer's version, a variant of ours."""
        if provider == PEER:
            return f"{PEER}-{version_of(PEER)}"
        left_out = "" if self.config.memory else "-without-memory"
        again = "-checkpointed" if self.config.checkpointing else ""
        variant = "" if self.config.variant == "mac" else f"-{self.config.variant}"
        return f"fusewright{variant}{left_out}{again}{provider.removeprefix('fusewright')}"

    def measure(
        self, shape: TextShape, provider: ProviderName, timing: str, expected: Expected | None
    ) -> Measurement:
        """Check the first loss of ours, then take the time.

        Raises:
            ArithmeticError: the loss of ours is not the expected one.
        """
        step = self.step(shape, provider)
        loss = step.timed().loss
        complaint = expected.complaint(loss) if expected and provider != PEER else None
        if complaint:
            raise ArithmeticError(complaint)
        if timing == "wall":
            return step.measure(self.seconds, loss, "")
        torch.cuda.reset_peak_memory_stats(self.device)
        replayed = Replayed(step)
        first = replayed.timed()
        wanted = max(10, min(100, round(1e3 * self.seconds / first.wall)))
        walls = [replayed.timed().wall for _ in range(wanted)]
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        return Measurement(loss, "", {}, Time.of(walls), wanted, peak)

    def step(self, shape: TextShape, provider: ProviderName) -> Step:
        """One training step of a new model, the same weights for all of ours."""
        torch.manual_seed(SEED)
        ours = provider != PEER
        model: nn.Module = TitanMAC(self.config) if ours else peer_model(self.config)
        model = model.to(self.device)
        if provider == "fusewright-compile":
            torch.compiler.reset()
            for block in cast(TitanMAC, model).blocks:
                block.compile(fullgraph=True, dynamic=False)
        optimizer = torch_adamw(model, lr=4e-4, weight_decay=0.1)
        text = Text(self.config.vocab_size, shape.length, self.device)
        loss: Callable[[Any, Tensor], Tensor] = our_loss if ours else peer_loss
        return Step(model, text, shape.batch, loss, optimizer)

    @torch.no_grad()
    def expected(self, shape: TextShape) -> Expected:
        """The reference's first loss in fp32, and how far from it bf16 may be: twice what the
        reference's tokens err by under autocast, root-mean-square.
        """
        torch.manual_seed(SEED)
        model = TitanMAC(self.config, backend="reference").to(self.device)
        tokens = Text(self.config.vocab_size, shape.length, self.device).sample(shape.batch)
        truth = token_losses(model, tokens)
        with torch.autocast(self.device.type, torch.bfloat16):
            eager = token_losses(model, tokens)
        loss, error = float(truth.mean()), float((eager - truth).square().mean().sqrt())
        return Expected(loss, FACTOR * error + ULPS * torch.finfo(torch.float32).eps * loss)

    def let_go(self) -> None:
        """What a call held is let go, that nothing of it counts next."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def token_losses(model: TitanMAC, tokens: Tensor) -> Tensor:
    """Of each token, in fp64; from all logits of one row after the other."""
    hidden, _ = model(tokens[:, :-1])
    pairs = zip(hidden, tokens[:, 1:], strict=True)
    losses = [F.cross_entropy(model.logits(x).float(), t, reduction="none") for x, t in pairs]
    return torch.stack(losses).double()


def version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def row(
    config: TitanMACConfig, shape: TextShape, provider: str, timing: str, measured: Measurement
) -> Row:
    """The step as a row of a result file."""
    values = [
        *("TitanMAC", shape.case(config), "step", provider, "bf16", timing),
        *(f"{ms:.4f}" for ms in measured.step),
        *("", ""),
        "" if measured.memory_mib is None else f"{measured.memory_mib:.1f}",
    ]
    return dict(zip(COLUMNS, values, strict=True))


def empty_table(title: str) -> Table:
    table = Table(title=title, caption="milliseconds of a step")
    table.add_column("provider")
    table.add_column("timing")
    for name in ("tokens/s", "step", "p20", "p80", "GiB", "steps", "loss"):
        table.add_column(name, justify="right")
    return table


def add(table: Table, shape: TextShape, provider: str, timing: str, measured: Measurement) -> None:
    """A line of the table."""
    memory = measured.memory_mib
    table.add_row(
        provider,
        timing,
        f"{1e3 * shape.tokens / measured.step.ms:,.0f}",
        *(f"{ms:,.2f}" for ms in measured.step),
        "" if memory is None else f"{memory / 1024:.2f}",
        str(measured.steps),
        f"{measured.loss:.5f}",
    )
