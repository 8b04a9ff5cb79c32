"""Training steps of TransformerNP: ours and plain torch's, by stages."""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
from torch.optim import Optimizer

from ..data import LinearRegression, Size, Task
from ..models.transformer_np import TransformerNP, TransformerNPConfig
from ..training import TrainingConfig, adamw, torch_adamw
from .harness import SEED, Absent, Expected, Harness
from .providers import Provider, plain_log_likelihood
from .results import Row, gib, row
from .shapes import Shape, operations
from .step import STAGES, Measurement, Replayed, Step

# The errors of fewer targets may all be small by luck.
FEWEST_TARGETS = 64


class TransformerNPHarness(Harness):
    """What all measurements of TransformerNP have in common."""

    op: ClassVar[str] = "TransformerNP"
    caption: ClassVar[str] = "step and stages in ms"
    second: ClassVar[str] = "attention"
    columns: ClassVar = ("tokens/s", "step", *STAGES, "TFLOPS", "GiB", "steps", "loss")
    config: TransformerNPConfig

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
        return Expected.of(loss, error)

    def _loss_and_error(self, model: TransformerNP, task: Task) -> tuple[float, float]:
        """Plain torch's loss in fp32, and the error of its targets in bf16, root-mean-square."""
        truth = plain_log_likelihood(model, task, pruned=True).double()
        with torch.autocast(self.device.type, torch.bfloat16):
            eager = plain_log_likelihood(model, task, pruned=True)
        return float(-truth.mean()), float((eager - truth).square().mean().sqrt())

    def step(self, shape: Shape, provider: Provider) -> Step:
        model = self.model()
        options: dict[str, Any] = dict(lr=5e-4, weight_decay=0.01)
        optimizer: Optimizer
        if provider.captured:
            optimizer = adamw(model, **options, clip_norm=TrainingConfig.clip_norm)
        else:
            optimizer = torch_adamw(model, **options)
        return Step(model, self.sampler(shape), shape.batch, provider.loss_function(), optimizer)

    def timings(self, provider: Provider) -> tuple[str, ...]:
        """A graph is captured on a GPU."""
        if not provider.captured:
            return super().timings(provider)
        return ("graph",) if self.device.type == "cuda" else ()

    def measure(
        self, shape: Shape, provider: Provider, timing: str, expected: Expected | None
    ) -> Measurement:
        """As for every model; a peer that errs more is named and timed.

        Raises:
            Absent: what the provider needs is not here.
        """
        lacking = provider.absent(self.device, self.config.checkpointing)
        if lacking:
            raise Absent(lacking)
        step = self.step(shape, provider)
        taken = provider.backends_taken(cast(TransformerNP, step.model), shape)
        if warning := provider.warning(taken):
            self.console.print(warning)
        with provider.context():
            loss = step.timed().loss
            complaint = expected.complaint(loss) if expected else None
            if complaint and provider.ours:
                raise ArithmeticError(complaint)
            if complaint:
                self.console.print(f"{provider.name}: {complaint}")
            timed = Replayed.measured if timing == "graph" else Step.measure
            return timed(step, self.seconds, loss, provider.attention(taken))

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

    def line(self, shape: Shape, timing: str, measured: Measurement) -> list[str]:
        ms, count = measured.step.ms, operations(self.config, shape)["step"]
        return [
            measured.attention,
            f"{1e3 * shape.tokens / ms:,.0f}",
            f"{ms:,.1f}",
            *(f"{measured.stages[x].ms:,.1f}" if x in measured.stages else "" for x in STAGES),
            f"{count / ms / 1e9:.1f}",
            gib(measured.memory_mib, 1),
            str(measured.steps),
            f"{measured.loss:.5f}",
        ]

    def rows(
        self, shape: Shape, provider: Provider, timing: str, measured: Measurement
    ) -> list[Row]:
        """The stages, timed where the device is, of a replayed step none; and the whole step."""
        clock = "event" if self.device.type == "cuda" else "wall"
        count, name = operations(self.config, shape), provider.row_name(measured.attention)
        times = [(stage, clock, time) for stage, time in measured.stages.items()]
        return [
            row((self.op, shape.case, each, name), by, time, measured.memory_mib, count.get(each))
            for each, by, time in [*times, ("step", timing, measured.step)]
        ]
