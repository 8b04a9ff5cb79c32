"""The learned optimizer and AdamW on problems that meta-training does not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._meta_parts import Task
from ._meta_runs import LOWEST, AdamWSteps, LearnedSteps, Runs, Stepper, stepping
from .update_mlp import UpdateMLP

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
    batches at every call, whatever else draws numbers.
    """

    def __init__(
        self, tasks: Sequence[Task], stepper: Stepper, problems: int, copies: int, steps: int,
        device: torch.device, seed: int,
    ) -> None:  # fmt: skip
        self.steps, self.device, self.seed = steps, device, seed
        self.cards = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self.cards):
            self.runs = [Runs(task, stepper, problems, copies, device) for task in tasks]
            self.step = stepping(self.runs)

    def losses(self) -> tuple[Tensor, Tensor]:
        """``[tasks, copies]`` of the mean and of the last loss."""
        everything = torch.ones(self.runs[0].n, dtype=torch.bool, device=self.device)
        with torch.random.fork_rng(self.cards):
            torch.manual_seed(self.seed)
            for runs in self.runs:
                runs.restart(everything)
                runs.total.zero_()
            last = max(1, self.steps // 10)
            for _ in range(self.steps - last):
                self.step()
            early = self._totals()
            for _ in range(last):
                self.step()
            whole = self._totals()
        means = whole / self.steps, (whole - early) / last
        mean, final = (x.exp().sub(LOWEST).cpu() for x in means)
        return mean, final

    def _totals(self) -> Tensor:
        return torch.stack([runs.total.mean(-1) for runs in self.runs])


def adamw_rows(
    tasks: Sequence[Task], problems: int, steps: int, device: torch.device, seed: int
) -> list[Row]:
    """AdamW's with every rate of ``RATES``."""
    rates = torch.tensor(RATES, device=device).repeat_interleave(problems)
    given = (problems, len(RATES), steps, device, seed)
    means, finals = HeldOut(tasks, AdamWSteps(rates), *given).losses()
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
        """Those of weights ``[numbers of the network]``."""
        self.weights.copy_(flat.expand_as(self.weights))
        found = zip(self.tasks, *self.trainings.losses(), strict=True)
        return [
            Row(update, task.name, "learned", float(mean), float(final))
            for task, mean, final in found
        ]
