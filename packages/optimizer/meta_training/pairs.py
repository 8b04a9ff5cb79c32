"""The trainings of a task in pairs, and the gradient that they give."""

from __future__ import annotations

from typing import NamedTuple

import torch
from fusewright.optimizer import UpdateMLP

from .parts import Task, spread
from .runs import LearnedSteps, Runs

Tensor = torch.Tensor


class Settings(NamedTuple):
    """The settings of a meta-training.

    Attributes:
        seed: of all random numbers.
        pairs: trainings of each task, twice as many networks.
        steps: of each training between two updates of the weights.
        horizon: the longest training's steps; the shortest's are a twentieth.
        sigma: standard deviation of e.
        lr, settled: of the weights: the rate of update n is lr / sqrt(1 + n / settled).
        averaged: how many updates the running mean remembers.
        exp_mult, step_mult: of ``UpdateMLP``.
    """

    seed: int = 0
    pairs: int = 128
    steps: int = 10
    horizon: int = 1000
    sigma: float = 0.01
    lr: float = 3e-3
    settled: float = 300.0
    averaged: float = 50.0
    exp_mult: float = 0.3
    step_mult: float = 0.01


class Pairs:
    """The trainings of one task, and their gradient for the weights."""

    def __init__(
        self, task: Task, mlp: UpdateMLP, learned: Tensor, settings: Settings, device: torch.device
    ) -> None:
        self.settings, self.learned = settings, learned
        n = settings.pairs
        self.noise = torch.zeros(n, learned.numel(), device=device)
        self.weights = torch.zeros(2 * n, learned.numel(), device=device)
        self.runs = Runs(task, LearnedSteps(mlp, self.weights), n, 2, device)
        self.length = torch.zeros(n, device=device)

    def prepare(self, flat: Tensor) -> None:
        """Restart trainings that have reached their length, and set all weights: w + e, w - e."""
        s, runs = self.settings, self.runs
        over = runs.age >= self.length
        runs.restart(over)
        length = spread(s.pairs, s.horizon / 20, s.horizon, runs.device)
        noise = s.sigma * self.learned * torch.randn_like(self.noise)
        self.length = torch.where(over, length, self.length)
        self.noise = torch.where(over[:, None], noise, self.noise)
        self.weights.copy_(torch.cat([flat + self.noise, flat - self.noise]))
        runs.total.zero_()

    def gradient(self) -> tuple[Tensor, Tensor]:
        """The gradient of the mean count of the losses, and that mean."""
        plus, minus = self.runs.total / self.settings.steps
        slopes = (plus - minus) / (2.0 * self.settings.sigma**2 * self.settings.pairs)
        return slopes @ self.noise, (plus + minus).mean() / 2.0
