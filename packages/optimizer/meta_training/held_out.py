"""The learned optimizer and AdamW on problems that meta-training does not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fusewright.optimizer import UpdateMLP

from .parts import Task
from .runs import LOWEST, AdamWSteps, LearnedSteps, Runs, Stepper, stepping

Tensor = torch.Tensor
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


class Row(NamedTuple):
    """A line of the result file.

    Attributes:
        update: how many updates the network has had.
        task: its name.
        optimizer: "learned", or AdamW with its rate.
        mean_loss, last_loss: geometric means over problems and steps, all of them or the last
            tenth, of the loss over the first one.
    """

    update: int
    task: str
    optimizer: str
    mean_loss: float
    last_loss: float


class HeldOut:
    """Trainings of ``problems`` problems of every task over ``steps`` steps; the same problems and
    batches in each call, whatever random numbers were drawn before.
    """

    def __init__(
        self, tasks: Sequence[Task], stepper: Stepper, problems: int, copies: int, steps: int,
        device: torch.device, seed: int,
    ) -> None:  # fmt: skip
        self.steps, self.device, self.seed = steps, device, seed
        self.gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self.gpus):
            self.runs = [Runs(task, stepper, problems, copies, device) for task in tasks]
            self.step = stepping(self.runs)

    def losses(self) -> tuple[Tensor, Tensor]:
        """``[tasks, copies]`` of the mean and of the last loss."""
        all_runs = torch.ones(self.runs[0].n, dtype=torch.bool, device=self.device)
        with torch.random.fork_rng(self.gpus):
            torch.manual_seed(self.seed)
            for runs in self.runs:
                runs.restart(all_runs)
                runs.total.zero_()
            last = max(1, self.steps // 10)
            for _ in range(self.steps - last):
                self.step()
            early = self._totals()
            for _ in range(last):
                self.step()
            total = self._totals()
        means = total / self.steps, (total - early) / last
        mean, final = (x.exp().sub(LOWEST).cpu() for x in means)
        return mean, final

    def _totals(self) -> Tensor:
        return torch.stack([runs.total.mean(-1) for runs in self.runs])


def adamw_rows(
    tasks: Sequence[Task], problems: int, steps: int, device: torch.device, seed: int
) -> list[Row]:
    """The rows of AdamW with each rate of ``RATES``."""
    rates = torch.tensor(RATES, device=device).repeat_interleave(problems)
    options = (problems, len(RATES), steps, device, seed)
    means, finals = HeldOut(tasks, AdamWSteps(rates), *options).losses()
    return [
        Row(0, task.name, f"AdamW lr={rate:g}", float(mean), float(final))
        for task, *losses in zip(tasks, means, finals, strict=True)
        for rate, mean, final in zip(RATES, *losses, strict=True)
    ]


class LearnedHeldOut:
    """The learned optimizer with weights that change."""

    def __init__(
        self, tasks: Sequence[Task], mlp: UpdateMLP, problems: int, steps: int,
        device: torch.device, seed: int,
    ) -> None:  # fmt: skip
        numbers = sum(x.numel() for x in mlp.parameters())
        self.tasks, self.weights = tasks, torch.zeros(problems, numbers, device=device)
        stepper = LearnedSteps(mlp, self.weights)
        self.trainings = HeldOut(tasks, stepper, problems, 1, steps, device, seed)

    def rows(self, update: int, flat: Tensor) -> list[Row]:
        """The rows of weights ``[numbers of the network]``."""
        self.weights.copy_(flat.expand_as(self.weights))
        losses = zip(self.tasks, *self.trainings.losses(), strict=True)
        return [
            Row(update, task.name, "learned", float(mean), float(final))
            for task, mean, final in losses
        ]
