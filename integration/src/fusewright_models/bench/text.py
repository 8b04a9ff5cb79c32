"""Training steps of language models: eager, replayed from a CUDA graph, and of their peers.

A step is forward pass and loss under bf16 autocast over fp32 weights, backward pass and torch's
fused AdamW, on tokens that lie on the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import torch_adamw
from .harness import SEED, Expected, Harness
from .results import Row, gib, row
from .shapes import parsed
from .step import Measurement, Replayed, Step


class TextShape(NamedTuple):
    """B rows of T tokens, of each of which the next one is predicted."""

    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> TextShape:
        """Read "4,4096"."""
        return parsed(cls, text, "a shape is B,T such as 4,4096", "B and T")

    def case(self, config: Any) -> str:
        return f"dim={config.dim} layers={config.layers} B={self.batch} T={self.length}"

    @property
    def tokens(self) -> int:
        return self.batch * self.length


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


class TextHarness(Harness):
    """What all measurements of a language model have in common."""

    caption: ClassVar[str] = "milliseconds of a step"
    second: ClassVar[str] = "timing"
    columns: ClassVar = ("tokens/s", "step", "p20", "p80", "GiB", "steps", "loss")

    @abstractmethod
    def build(self, provider: Any) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
        """A new model on the device, and its loss."""

    def step(self, shape: TextShape, provider: Any) -> Step:
        torch.manual_seed(SEED)
        model, loss = self.build(provider)
        optimizer = torch_adamw(model, lr=4e-4, weight_decay=0.1)
        return Step(model, self.text(shape), shape.batch, loss, optimizer)

    def text(self, shape: TextShape) -> Text:
        return Text(self.config.vocab_size, shape.length, self.device)

    def case(self, shape: TextShape) -> str:
        return shape.case(self.config)

    def timings(self, provider: Any) -> tuple[str, ...]:
        """A graph is captured on a GPU, and of ours: a peer may wait for the device."""
        graph = self.device.type == "cuda" and self.is_ours(provider)
        return ("wall", "graph") if graph else ("wall",)

    def measure(
        self, shape: TextShape, provider: Any, timing: str, expected: Expected | None
    ) -> Measurement:
        """As for every model; only the loss of ours is checked."""
        step = self.step(shape, provider)
        loss = step.timed().loss
        complaint = expected.complaint(loss) if expected and self.is_ours(provider) else None
        if complaint:
            raise ArithmeticError(complaint)
        if timing == "wall":
            return step.measure(self.seconds, loss, "")
        return Replayed.measured(step, self.seconds, loss, "")

    def line(self, shape: TextShape, timing: str, measured: Measurement) -> list[str]:
        return [
            f"{1e3 * shape.tokens / measured.step.ms:,.0f}",
            *(f"{ms:,.2f}" for ms in measured.step),
            gib(measured.memory_mib, 2),
            str(measured.steps),
            f"{measured.loss:.5f}",
        ]

    def rows(
        self, shape: TextShape, provider: Any, timing: str, measured: Measurement
    ) -> list[Row]:
        named = (self.op, self.case(shape), "step", self.name(provider))
        return [row(named, timing, measured.step, measured.memory_mib)]


def token_losses(model: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Of each next token, in fp64; from all logits of one row after the other."""
    pairs = zip(hidden, tokens[:, 1:], strict=True)
    losses = [F.cross_entropy(model.logits(x).float(), t, reduction="none") for x, t in pairs]
    return torch.stack(losses).double()
