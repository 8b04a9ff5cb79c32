"""Training steps of a Llama of ``transformers``: as it is, compiled, by Liger's patch and by ours.

torch                  eager
compile                the forward pass and the loss through torch.compile
liger                  Liger's patch
fusewright             `patch`: norms, rotary positions, gating, the loss over the vocabulary, AdamW
  -kept                that, and nothing computed again in the backward pass
  -attention           that with our attention in place of torch's
  -compile             that through torch.compile

Weights, gradients and states of the optimizer are in bf16. The first loss and all gradients of each
are held against fp32 before anything is timed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..extras import imported
from ..patching import PARTS, USUAL, patch
from .harness import FACTOR, SEED, ULPS, Expected
from .results import version_of
from .step import Measurement, Step
from .text import TextHarness, TextShape

ProviderName = Literal[
    "torch",
    "compile",
    "liger",
    "fusewright",
    "fusewright-kept",
    "fusewright-attention",
    "fusewright-compile",
]
PROVIDER_NAMES = get_args(ProviderName)
PEER = "liger"
EXTRA = "transformers"
SOURCE = "transformers.models.llama.modeling_llama"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class LlamaShape:
    """Of a Llama; embedding and head are one matrix."""

    layers: int
    dim: int
    heads: int
    key_heads: int
    hidden: int
    vocab_size: int

    def made(self) -> nn.Module:
        """A new one with weights in bf16, drawn."""
        kind = imported("transformers", extra=EXTRA, purpose="models of transformers")
        config = kind.LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.dim,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            intermediate_size=self.hidden,
            vocab_size=self.vocab_size,
            tie_word_embeddings=True,
            use_cache=False,
        )
        return kind.AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation="sdpa")


LLAMA = {
    "tiny": LlamaShape(layers=2, dim=64, heads=4, key_heads=2, hidden=96, vocab_size=256),
    # Of Llama 3.2.
    "1b": LlamaShape(layers=16, dim=2048, heads=32, key_heads=8, hidden=8192, vocab_size=128_256),
}
SHAPES = {"tiny": (TextShape(2, 32),), "1b": (TextShape(4, 4096),)}


class Error(NamedTuple):
    """Of a gradient: its largest one and its root-mean-square."""

    largest: float
    typical: float

    @classmethod
    def of(cls, found: Tensor, truth: Tensor) -> Error:
        error = (found.float() - truth).abs()
        return cls(float(error.max()), float(error.square().mean().sqrt()))

    def bound(self, truth: Tensor) -> Error:
        """Twice as much, and two units in the last place."""
        slack = ULPS * torch.finfo(BF16).eps
        largest, typical = float(truth.abs().max()), float(truth.square().mean().sqrt())
        return Error(
            FACTOR * self.largest + slack * largest, FACTOR * self.typical + slack * typical
        )


@dataclass
class Gradients:
    """Those of the first batch in fp32, and how far from them eager torch's in bf16 are.

    Attributes:
        truth: on the host, so that they take nothing of the memory that is measured.
        eager: the errors.
    """

    truth: dict[str, Tensor] = field(default_factory=dict)
    eager: dict[str, Error] = field(default_factory=dict)

    def take(self, truth: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
        self.truth = truth
        self.eager = {name: Error.of(eager[name], truth[name]) for name in truth}

    def held(self, model: nn.Module) -> tuple[float, list[str]]:
        """How many times eager torch's typical error the model's is, at most, and the names of the
        gradients that are not within twice it and two units in the last place.
        """
        most, wrong, gradients = 0.0, [], gradients_of(model)
        if gradients.keys() != self.truth.keys():
            return math.inf, sorted(gradients.keys() ^ self.truth.keys())
        for name, found in gradients.items():
            truth, allowed = self.truth[name], self.eager[name]
            error, bound = Error.of(found, truth), allowed.bound(truth)
            most = max(most, error.typical / max(allowed.typical, torch.finfo(BF16).tiny))
            # A NaN is within nothing.
            if not (error.largest <= bound.largest and error.typical <= bound.typical):
                wrong.append(name)
        return most, wrong


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, on the host."""
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Labels are shifted by the model: the last token is read, and nothing predicted for it."""
    return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss


@dataclass(frozen=True)
class LlamaHarness(TextHarness):
    """What is measured of a Llama.

    Attributes:
        gradients: of the first batch, against which those of each provider are held.
    """

    op: ClassVar[str] = "Llama"
    config: LlamaShape
    gradients: Gradients = field(default_factory=Gradients)

    def name(self, provider: ProviderName) -> str:
        return f"{PEER}-{version_of('liger-kernel')}" if provider == PEER else provider

    def timings(self, provider: ProviderName) -> tuple[str, ...]:
        return ("wall",)

    def model(self) -> nn.Module:
        """The same one at each call."""
        torch.manual_seed(SEED)
        with self.device:
            return self.config.made().train()

    def build(self, provider: ProviderName) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
        without_liger()
        model = self.model()
        if provider == PEER:
            with_liger(model)
        if provider.endswith("compile"):
            torch.compiler.reset()
            # Nothing is traced before the first call.
            model.compile(dynamic=False)
        return model, loss_of

    def step(self, shape: TextShape, provider: ProviderName) -> Step:
        step = super().step(shape, provider)
        step.autocast = False
        if self.is_ours(provider):
            parts = PARTS if provider.endswith("attention") else USUAL
            kept = provider.endswith("kept")
            patched = patch(step.model, step.optimizer, parts=parts, recompute=not kept)
            assert patched.optimizer is not None
            step.optimizer = patched.optimizer
        return step

    def expected(self, shape: TextShape) -> Expected:
        """Loss and gradients in fp32, row by row, and how far from them eager torch's are in bf16:
        of the loss what its tokens err by, root-mean-square.
        """
        without_liger()
        tokens = self.text(shape).sample(shape.batch)
        model = self.model()
        rounded = losses_of(model, tokens)
        loss_of(model, tokens).backward()
        eager = gradients_of(model)
        model.zero_grad()
        model.float()
        truth = losses_of(model, tokens)
        for row in tokens.split(1):
            (loss_of(model, row) / len(tokens)).backward()
        self.gradients.take(gradients_of(model), eager)
        return Expected.of(float(truth.mean()), float((rounded - truth).square().mean().sqrt()))

    def measure(
        self, shape: TextShape, provider: ProviderName, timing: str, expected: Expected | None
    ) -> Measurement:
        """As for every language model, but that gradients are held against those in fp32, too.

        Raises:
            ArithmeticError: loss or gradients of ours are not the expected ones.
        """
        step = self.step(shape, provider)
        loss = loss_of(step.model, step.sampler.sample(step.batch))
        loss.backward()
        first = float(loss.detach())
        del loss
        if expected is not None:
            most, wrong = self.gradients.held(step.model)
            complaint = expected.complaint(first)
            if wrong:
                complaint = f"gradients of {', '.join(wrong[:3])} err more than twice as much"
            if complaint and self.is_ours(provider):
                raise ArithmeticError(complaint)
            self.console.print(
                f"{self.name(provider)}: gradients err up to {most:.2f} times as much as eager "
                f"torch's in bf16; {complaint or 'all are within twice its error'}",
                highlight=False,
            )
        step.optimizer.zero_grad(set_to_none=True)
        step.timed()
        return step.measure(self.seconds, first, "")


def losses_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each next token, in fp64, row by row."""
    with torch.no_grad():
        return torch.stack([of_row(model, row) for row in tokens[:, :-1].split(1)])


def of_row(model: Any, row: Tensor) -> Tensor:
    logits = model(input_ids=row).logits[0, :-1].float()
    return F.cross_entropy(logits, row[0, 1:], reduction="none").double()


# Liger puts functions and classes of its own into the source of the models.
ORIGINAL: dict[str, Any] = {}


def without_liger() -> None:
    """What Liger has replaced is there again."""
    if ORIGINAL:
        vars(sys.modules[SOURCE]).update(ORIGINAL)


def with_liger(model: nn.Module) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    ORIGINAL.update(vars(sys.modules[SOURCE]))
    apply_liger_kernel_to_llama(model=model)
