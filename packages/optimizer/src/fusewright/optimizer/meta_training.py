r"""Meta-training: how the network of ``trained_update_mlp`` was trained, on one device in minutes.

    python -m fusewright.optimizer.meta_training --out weights.pt --minutes 6 --device cuda

Many small trainings run side by side, in pairs whose networks have weights w + e and w - e, e drawn
from N(0, sigma^2) anew for each training. Every few steps, without waiting for their ends,

    w <- AdamW(w, mean over pairs of e (L+ - L-) / (2 sigma^2)),

L the mean of log(loss / first loss + 0.01) over these steps: noise-reuse evolution strategies, Li
et al., arXiv 2304.12180, an unbiased gradient of the smoothed loss over whole trainings, whose
lengths are drawn up to a horizon. (Persistent evolution strategies, Vicol et al., arXiv 2112.13835,
draw e anew at every truncation, which costs variance.) What is written is a running mean of w, the
one with the lowest L of its time.

Time features whose scale is over a third of the horizon keep weights of zero: at the horizon the
others no longer change, and so a longer training does not meet inputs that the network never saw.

The seed decides everything on a device; the clock only decides when it ends.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector

from ._members import current
from ._meta_held_out import LearnedHeldOut, Row, adamw_rows
from ._meta_pairs import Pairs, Settings
from ._meta_parts import Task
from ._meta_runs import LOWEST, named, stepping
from ._meta_tasks import held_out_tasks, training_tasks
from .adamw import AdamW
from .learned_features import ELEMENT_FEATURES, TIMESCALES
from .update_mlp import UpdateMLP

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
        """One update of the weights; returns what the losses counted, 0-d."""
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
        # A copy, since a new one would draw numbers.
        mlp = copy.deepcopy(self.mlp)
        mlp.load_state_dict(named(mlp, self.flat))
        return mlp.cpu().requires_grad_(False)


def write_network(path: Path, mlp: UpdateMLP) -> None:
    """What ``trained_update_mlp`` reads; whole or not at all."""
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
        updates: how many at most.
        every: how many between two trials.
        problems: of every held-out task.
        held_out_steps: of each; the horizon unless given.
        training, held_out: tasks; those of ``_meta_tasks`` unless given.

    Returns:
        The rows.
    """
    end = time.monotonic() + 60.0 * minutes
    steps = held_out_steps or settings.horizon
    held_out = held_out_tasks() if held_out is None else held_out
    training = training_tasks() if training is None else training
    meta = MetaTraining(training, settings, device)
    judged = (problems, steps, device, settings.seed + 1)
    trial = LearnedHeldOut(held_out, meta.mlp, *judged)
    rows = adamw_rows(held_out, *judged)
    losses: list[Tensor] = []
    lowest = math.inf

    def tell() -> None:
        nonlocal lowest
        new = trial.rows(meta.updates, meta.flat)
        mean = 0.0
        if losses:
            counted = torch.stack([torch.stack(losses).mean(), losses[-1]])
            mean, last = counted.tolist()  # sync: once per trial
            left = [math.exp(x) - LOWEST for x in (mean, last)]
            new.append(Row(meta.updates, "meta-training", "learned", *left))
            losses.clear()
        rows.extend(new)
        write_rows(path.with_suffix(".csv"), rows)
        if mean < lowest:
            lowest = mean
            write_network(path, meta.trained())
        told = ", ".join(f"{row.task} {row.last_loss:.3f}" for row in new)
        clock = f"{(end - time.monotonic()) / 60:.1f} minutes left"
        print(f"{meta.updates} updates, {clock}: {told}", flush=True)

    tell()
    took = 0.0
    while (updates is None or meta.updates < updates) and time.monotonic() + took < end:
        losses.append(meta.update())
        if device.type == "cuda":
            # The host would run ahead of the clock.
            torch.cuda.synchronize()  # sync: once per update
        if meta.updates % every == 0:
            began = time.monotonic()
            tell()
            took = time.monotonic() - began
    if losses:
        tell()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--every", type=int, default=300, help="updates between two trials")
    parser.add_argument("--problems", type=int, default=16, help="of each held-out task")
    parser.add_argument("--held-out-steps", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in Settings._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args(arguments))
    if given["out"].suffix == ".csv":
        parser.error(f"--out must not end in .csv, where the rows go; got {given['out']}")
    if given["every"] < 1:
        parser.error(f"--every must be at least 1; got {given['every']}")
    settings = Settings(**{name: given.pop(name) for name in Settings._fields})
    path, device = given.pop("out"), torch.device(given.pop("device"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with current(device):
        run(path, settings, device, **given)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
