"""Texts continued by TitanMAC and HybridLM: tokens a second, of prompts that are read and of what
follows them.

fusewright              token by token, all rows together
fusewright-speculative  by drafts, one row after the other; HybridLM alone

Everything is under bf16 autocast over fp32 weights, and eager but for HybridLM's tokens one by one,
which are replayed from a CUDA graph. Weights are drawn: how many drafts are accepted stands beside
the rates, and is that of no trained model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import peak_memory
from ..models.hybrid import Drafting, HybridLM, Reading
from ..text import Generated, generate, speculate
from .harness import FACTOR, SEED, ULPS, Line
from .results import gib, keep_beside, mib, table_of
from .text import TextHarness, TextShape, token_losses

# Of a file of its own: rates, and no times of a step.
COLUMNS = ["op", "case", "provider", "reading", "drawing", "acceptance", "mem_mib"]
PLAIN, SPECULATIVE = "fusewright", "fusewright-speculative"
# Before the clock runs, everything has been compiled and allocated once.
WARM_UP_TOKENS = 8
# Of each row, that what is stepped through is held against what is read at once.
CHECKED = 64


class Rates(NamedTuple):
    """Medians over rounds.

    Attributes:
        reading, drawing: tokens a second, of all rows together.
        acceptance: share of the drafts; None without.
        memory_mib: the peak, weights included; None on the CPU.
    """

    reading: float
    drawing: float
    acceptance: float | None
    memory_mib: float | None

    @classmethod
    def of(cls, rounds: list[Generated], memory_mib: float | None) -> Rates:
        drafted = sum(each.drafted for each in rounds)
        accepted = sum(each.accepted for each in rounds)
        return cls(
            statistics.median(each.reading_rate for each in rounds),
            statistics.median(each.drawing_rate for each in rounds),
            accepted / drafted if drafted else None,
            memory_mib,
        )


class GenerationHarness(NamedTuple):
    """Measures texts that are continued.

    Attributes:
        harness: of the model's training steps, for everything but these.
        tokens: that follow each prompt.
        temperature: of the draws.
    """

    harness: TextHarness
    tokens: int
    temperature: float

    def bench(self, shape: TextShape) -> bool:
        """Measure B prompts of T tokens, print a table, keep its rows; False where ours failed."""
        harness = self.harness
        case = f"{harness.case(shape)} tokens={self.tokens} temperature={self.temperature:g}"
        torch.manual_seed(SEED)
        model: Any = harness.build(PLAIN)[0].eval()
        complaint = self.complaint(model, shape) if harness.check else None

        def line_of(name: str, call: Callable[..., Generated]) -> Line:
            def measured() -> Rates:
                if complaint is not None:
                    raise ArithmeticError(complaint)
                return self.measure(call, shape)

            def told(found: Rates) -> list[str]:
                accepted = "" if found.acceptance is None else f"{found.acceptance:.4f}"
                kept = f"{found.reading:.1f}", f"{found.drawing:.1f}", accepted
                named = harness.op, case, name
                row = (*named, *kept, mib(found.memory_mib))
                keep_beside(harness.file, "generate", COLUMNS, row, named=3)
                cells = [f"{found.reading:,.0f}", f"{found.drawing:,.1f}"]
                share = "" if found.acceptance is None else f"{found.acceptance:.1%}"
                return [*cells, share, gib(found.memory_mib, 2)]

            return Line((name,), True, measured, told)

        lines = [line_of(PLAIN, partial(generate, as_read(model)))]
        if isinstance(model, HybridLM):
            lines.append(line_of(SPECULATIVE, partial(speculate, Drafting(model))))
        columns = ("reading", "drawing", "accepted", "GiB")
        return harness.tabulate(table_of(case, "tokens/s", ("provider",), columns), lines)

    def measure(self, call: Callable[..., Generated], shape: TextShape) -> Rates:
        """Rounds of the same prompts, for as long as the harness is asked to."""
        harness, device = self.harness, self.harness.device
        prompts = harness.text(shape).sample(shape.batch)[:, :-1]
        options: dict[str, Any] = {"temperature": self.temperature}
        options["generator"] = torch.Generator(device).manual_seed(SEED)
        rounds: list[Generated] = []
        with torch.autocast(device.type, torch.bfloat16):
            call(prompts, tokens=min(WARM_UP_TOKENS, self.tokens), **options)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            begun = time.perf_counter()
            while not rounds or time.perf_counter() - begun < harness.seconds:
                rounds.append(call(prompts, tokens=self.tokens, **options))
        peak = peak_memory(device) if device.type == "cuda" else None
        return Rates.of(rounds, None if peak is None else peak / 2**20)

    @torch.no_grad()
    def complaint(self, model: Any, shape: TextShape) -> str | None:
        """What is wrong with losses of tokens that are read one by one, under autocast: they may be
        off the reference's in fp32, read at once, by twice what that one's are under autocast.
        """
        harness = self.harness
        tokens = harness.text(TextShape(shape.batch, min(shape.length, CHECKED))).sample(
            shape.batch
        )
        reference = type(model)(model.config, backend="reference").to(harness.device).eval()
        reference.load_state_dict(model.state_dict())
        truth = whole_losses(reference, tokens)
        with torch.autocast(harness.device.type, torch.bfloat16):
            eager = whole_losses(reference, tokens)
            parts, state = [], None
            half = tokens.shape[1] // 2
            for piece in (tokens[:, :half], *tokens[:, half:-1].split(1, 1)):
                hidden, state = as_read(model)(piece, state)
                parts.append(hidden)
            ours = token_losses(model, torch.cat(parts, 1), tokens)
        found, allowed = ((x - truth).square().mean().sqrt() for x in (ours, eager))
        allowed = FACTOR * allowed + ULPS * torch.finfo(torch.float32).eps * truth.abs().max()
        if found <= allowed:
            return None
        return f"losses are off by {float(found):.1e}, and not within {float(allowed):.1e}"


def as_read(model: Any) -> Any:
    """As `generate` knows it."""
    return Reading(model) if isinstance(model, HybridLM) else model


def whole_losses(model: Any, tokens: Tensor) -> Tensor:
    hidden = model(tokens[:, :-1])
    return token_losses(model, hidden[0] if isinstance(hidden, tuple) else hidden, tokens)
