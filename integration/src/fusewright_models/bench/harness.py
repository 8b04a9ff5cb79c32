"""Measures every provider at a shape, on the same weights and the same data."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console

from ..data import LinearRegression, Size, Task
from ..training import torch_adamw
from ..transformer_np import TransformerNP
from ..transformer_np_layers import TransformerNPConfig
from .providers import Provider, plain_log_likelihood
from .results import add, empty_table, merge, rows
from .shapes import Shape, operations
from .step import Measurement, Step

SEED = 0
FACTOR, ULPS = 2, 2
# The errors of fewer targets may all be small by luck.
FEWEST_TARGETS = 64

Result = TypeVar("Result")


class Expected(NamedTuple):
    """The loss of the first batch in fp32, and how far from it one in bf16 may be."""

    loss: float
    allowed: float

    def complaint(self, loss: float) -> str | None:
        """What is wrong with a provider's loss; None where nothing is."""
        if abs(loss - self.loss) <= self.allowed:
            return None
        return f"loss {loss:.6f} is not within {self.allowed:.1e} of {self.loss:.6f}"


class Failure(NamedTuple):
    """Why there is no result, in one line."""

    reason: str


@dataclass(frozen=True)
class Harness:
    """What all measurements have in common.

    Attributes:
        config: the shape of the model.
        device: where everything is.
        seconds: about how long the steps of one provider are timed.
        check: hold the first loss against one in fp32.
        file: the result file; None keeps nothing.
        console: where the tables go.
    """

    config: TransformerNPConfig
    device: torch.device
    seconds: float
    check: bool
    file: Path | None
    console: Console

    def bench(self, shape: Shape, providers: list[Provider]) -> bool:
        """Measure one shape, print its table, keep its rows; False where ours failed."""
        count = operations(self.config, shape)
        table = empty_table(shape)
        good = True
        expected = self._attempt(self.expected, shape) if self.check else None
        if isinstance(expected, Failure):
            self.console.print(f"{shape.case}: nothing to hold losses against: {expected.reason}")
            expected = None
        for provider in providers:
            measured = self._attempt(self.measure, shape, provider, expected)
            if isinstance(measured, Failure):
                good &= not provider.ours
                table.add_row(provider.name, measured.reason)
                continue
            add(table, shape, provider.name, measured, count)
            if self.file is not None:
                name = provider.row_name(measured.attention)
                merge(self.file, rows(shape, name, measured, count, self.device))
        self.console.print(table)
        return good

    @torch.no_grad()
    def expected(self, shape: Shape) -> Expected:
        """Plain torch says what the loss is, in fp32, and how much bf16 may change it.

        A loss is a mean over targets, and errs by no more than they do, root-mean-square. So twice
        what the targets' log-likelihoods err by in eager torch, and two units in the last place.
        Batches of few targets have their errors by luck, and the largest of several counts.
        """
        model, sampler = self.model(), self.sampler(shape)
        batches = math.ceil(FEWEST_TARGETS / (shape.batch * shape.targets))
        # Every provider's first loss is that of the first batch.
        loss, error = self._loss_and_error(model, sampler.sample(shape.batch))
        for _ in range(batches - 1):
            _, other = self._loss_and_error(model, sampler.sample(shape.batch))
            error = max(error, other)
        slack = ULPS * torch.finfo(torch.float32).eps * abs(loss)
        return Expected(loss, FACTOR * error + slack)

    def _loss_and_error(self, model: TransformerNP, task: Task) -> tuple[float, float]:
        """Plain torch's loss in fp32, and the error of its targets in bf16, root-mean-square."""
        truth = plain_log_likelihood(model, task, pruned=True).double()
        with torch.autocast(self.device.type, torch.bfloat16):
            eager = plain_log_likelihood(model, task, pruned=True)
        return float(-truth.mean()), float((eager - truth).square().mean().sqrt())

    def measure(self, shape: Shape, provider: Provider, expected: Expected | None) -> Measurement:
        """Check the first loss, then take the time. Raises for ours, names a peer that errs more.

        Raises:
            ArithmeticError: the loss of ours is not the expected one.
        """
        model = self.model()
        optimizer = torch_adamw(model, lr=5e-4, weight_decay=0.01)
        step = Step(model, self.sampler(shape), shape.batch, provider.loss_function(), optimizer)
        taken = provider.backends_taken(model, shape)
        if warning := provider.warning(taken):
            self.console.print(warning)
        with provider.context():
            loss = step.timed().loss
            complaint = expected.complaint(loss) if expected else None
            if complaint and provider.ours:
                raise ArithmeticError(complaint)
            if complaint:
                self.console.print(f"{provider.name}: {complaint}")
            return step.measure(self.seconds, loss, provider.attention(taken))

    def model(self) -> TransformerNP:
        """The same weights for every provider."""
        torch.manual_seed(SEED)
        return TransformerNP(self.config).to(self.device)

    def sampler(self, shape: Shape) -> LinearRegression:
        """The same tasks for every provider."""
        context, targets = (Size(n, n) for n in (shape.context, shape.targets))
        return LinearRegression(
            context_size=context, target_size=targets, device=self.device, seed=SEED
        )

    def _attempt(self, call: Callable[..., Result], *arguments: Any) -> Result | Failure:
        result = attempt(call, *arguments)
        # What a failed call held is let go with its traceback, and nothing of it may count next.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return result


def attempt(call: Callable[..., Result], *arguments: Any) -> Result | Failure:
    """What ``call`` returns, or why it did not."""
    try:
        return call(*arguments)
    except torch.OutOfMemoryError:
        return Failure("out of memory")
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return Failure(f"{type(error).__name__}: {first_line}")
