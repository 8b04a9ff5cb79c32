"""Meta-training of an ``UpdateMLP``, with trials of held-out tasks and the files that it writes."""

from __future__ import annotations

import copy
import csv
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from fusewright.optimizer import AdamW, UpdateMLP
from fusewright.optimizer.learned.reference import ELEMENT_FEATURES, TIMESCALES
from torch.nn.utils import parameters_to_vector

from .held_out import LearnedHeldOut, Row, adamw_rows
from .pairs import Pairs, Settings
from .parts import Task
from .runs import LOWEST, named, stepping
from .tasks import held_out_tasks, training_tasks

Tensor = torch.Tensor


class MetaTraining:
    """Meta-training of an ``UpdateMLP`` on tasks.

    Args:
        tasks: what it is trained on.
        settings: of it.
        device: where all of it happens.

    Attributes:
        mlp: a network of the form that is trained.
        updates: how many the weights have had.
        flat: the weights' running mean, ``[numbers of the network]``.
    """

    def __init__(self, tasks: Sequence[Task], settings: Settings, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        self.settings: Settings = settings
        self.updates: int = 0
        self.mlp: UpdateMLP = UpdateMLP(
            exp_mult=settings.exp_mult, step_mult=settings.step_mult
        ).to(device)
        # At first no step is taken at all.
        torch.nn.init.zeros_(self.mlp.last.weight)
        learned = torch.ones_like(parameters_to_vector(self.mlp.parameters()).detach())
        slow = [x > settings.horizon / 3 for x in TIMESCALES]
        named(self.mlp, learned)["first.weight"][:, ELEMENT_FEATURES:][:, slow] = 0.0
        self._weights = torch.nn.Parameter(
            parameters_to_vector(self.mlp.parameters()).detach() * learned
        )
        self.flat: Tensor = self._weights.detach().clone()
        self._optimizer = AdamW([self._weights], settings.lr, (0.9, 0.99), weight_decay=0.0)
        self._pairs = [Pairs(task, self.mlp, learned, settings, device) for task in tasks]
        self._step = stepping([pairs.runs for pairs in self._pairs])

    def update(self) -> Tensor:
        """One update of the weights; returns the mean count of the losses, 0-d."""
        for pairs in self._pairs:
            pairs.prepare(self._weights.detach())
        for _ in range(self.settings.steps):
            self._step()
        gradients, losses = zip(*(pairs.gradient() for pairs in self._pairs), strict=True)
        self._weights.grad = torch.stack(gradients).mean(0)
        settled = 1.0 + self.updates / self.settings.settled
        self._optimizer.param_groups[0]["lr"] = self.settings.lr * settled**-0.5
        self._optimizer.step()
        self.updates += 1
        share = max(1.0 / self.updates, 1.0 / self.settings.averaged)
        self.flat.lerp_(self._weights.detach(), share)
        return torch.stack(losses).mean()

    def trained(self) -> UpdateMLP:
        """A network of the weights' running mean."""
        # A copy: a new network would draw random numbers.
        mlp = copy.deepcopy(self.mlp)
        mlp.load_state_dict(named(mlp, self.flat))
        return mlp.cpu().requires_grad_(False)


def write_network(path: Path, mlp: UpdateMLP) -> None:
    """The file that ``trained_update_mlp`` reads, written whole or not at all."""
    half = path.with_suffix(".half")
    multipliers = {"exp_mult": mlp.exp_mult, "step_mult": mlp.step_mult}
    torch.save({"weights": mlp.state_dict(), **multipliers}, half)
    os.replace(half, path)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    half = path.with_suffix(".half")
    with half.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(Row._fields)
        for row in rows:
            lines.writerow(f"{x:.4g}" if isinstance(x, float) else x for x in row)
    os.replace(half, path)


def run(
    path: Path,
    settings: Settings,
    device: torch.device,
    *,
    minutes: float = 6.0,
    updates: int | None = None,
    every: int = 300,
    problems: int = 16,
    held_out_steps: int | None = None,
    training: Sequence[Task] | None = None,
    held_out: Sequence[Task] | None = None,
) -> list[Row]:
    """Train until the time or the number of updates is reached. Whenever held-out tasks are tried,
    the rows are written to a CSV file beside ``path``, and the weights to ``path`` if the losses
    since the last trial are the lowest so far; held-out tasks decide nothing.

    Args:
        minutes: in all, the trials of held-out tasks included.
        updates: how many at most; None for as many as time allows.
        every: how many updates between two trials.
        problems: of every held-out task.
        held_out_steps: of each; the horizon unless given.
        training, held_out: tasks; those of ``tasks`` unless given.

    Returns:
        The rows.
    """
    end = time.monotonic() + 60.0 * minutes
    steps = held_out_steps or settings.horizon
    held_out = held_out_tasks() if held_out is None else held_out
    training = training_tasks() if training is None else training
    meta = MetaTraining(training, settings, device)
    options = (problems, steps, device, settings.seed + 1)
    trial = LearnedHeldOut(held_out, meta.mlp, *options)
    rows = adamw_rows(held_out, *options)
    losses: list[Tensor] = []
    lowest = math.inf

    def report() -> None:
        nonlocal lowest
        new = trial.rows(meta.updates, meta.flat)
        mean = 0.0
        if losses:
            counted = torch.stack([torch.stack(losses).mean(), losses[-1]])
            mean, last = counted.tolist()  # sync: once per trial
            ratios = [math.exp(x) - LOWEST for x in (mean, last)]
            new.append(Row(meta.updates, "meta-training", "learned", *ratios))
            losses.clear()
        rows.extend(new)
        write_rows(path.with_suffix(".csv"), rows)
        if mean < lowest:
            lowest = mean
            write_network(path, meta.trained())
        results = ", ".join(f"{row.task} {row.last_loss:.3f}" for row in new)
        clock = f"{(end - time.monotonic()) / 60:.1f} minutes left"
        print(f"{meta.updates} updates, {clock}: {results}", flush=True)

    report()
    trial_time = 0.0
    while (updates is None or meta.updates < updates) and time.monotonic() + trial_time < end:
        losses.append(meta.update())
        if device.type == "cuda":
            # The host would run ahead of the clock.
            torch.cuda.synchronize()  # sync: once per update
        if meta.updates % every == 0:
            began = time.monotonic()
            report()
            trial_time = time.monotonic() - began
    if losses:
        report()
    return rows
