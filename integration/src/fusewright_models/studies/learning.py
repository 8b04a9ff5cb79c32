"""How close does a neural process come to what can be known, in minutes of one GPU?

    python -m fusewright_models.studies.learning --out runs

trains a TransformerNP of the preset `small` on each kind of data, by the recipe of the training
program that its flags give, and scores it as it goes on held-out tasks beside the data's oracle,
which knows the parameters of a task, and beside what any model can know, which has to find them.
Several trainings run at once, each in a thread and on a stream of its own: a small model's step
leaves most of a GPU idle. A step's time is that of one training alone, taken before the others
start; steps times that is the time that the training would have had to itself.

Regression of many rows goes on from the weights of fewer: 64, then 1,000, then 10,000 context rows.
All evaluations go to learning-ENVIRONMENT.csv, curves to a picture beside it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from fusewright.norm import warm_up
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from .. import figures
from ..bench.results import environment_name
from ..cli.commands import optimizer_of, usage_errors
from ..cli.transformer_np import TransformerNPRun, negative_log_likelihood
from ..data import Digits, HeldOut, Sampler, Task, attainable_log_likelihood
from ..devices import checked_device, wait_for
from ..training import Trainer
from .results import write

# Evaluations of a training.
POINTS = 8
FORMATS = {"step_ms": ".3f", "alone_s": ".1f", "shared_s": ".1f"}
FORMATS |= dict.fromkeys(
    ("log_likelihood", "oracle", "attainable", "behind", "behind_error"), ".4f"
)
FORMATS |= dict.fromkeys(("cover_50", "cover_80", "cover_95"), ".4f")


class Other(NamedTuple):
    """What a training is scored on at its end beside its own data: choices that differ from its
    run's, and of how many tasks.
    """

    choices: dict[str, Any]
    batches: int = 256
    tasks: int = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training.

    Attributes:
        name: of its rows.
        steps: where no share of them is asked for.
        flags: of ``fusewright-train transformer-np``, over those of `COMMON`.
        others: what it is scored on at the end, beside its own data.
        batches: of an evaluation.
        tasks: of each of them.
        after: the recipe whose weights it starts from.
        warm: steps that are taken alone, and how many more of them are timed.
    """

    name: str
    steps: int
    flags: dict[str, Any]
    others: tuple[Other, ...] = ()
    batches: int = 256
    tasks: int = 16
    after: str | None = None
    warm: tuple[int, int] = (12, 128)


COMMON: dict[str, Any] = {"preset": "small", "optimizer": "muon", "ahead": 64, "log_every": 200}


def process(kernel: str, steps: int, *others: Other, **more: Any) -> Recipe:
    """Of a Gaussian process: every task has a context size of its own, beside 32 targets."""
    flags = {"data": f"gp-{kernel}", "ragged": True, "target_size": "32", "frequencies": 8}
    return Recipe(name=kernel, steps=steps, flags=flags | more, others=others)


def regression(
    context: int, targets: int, batch: int, steps: int, lr: float, **more: Any
) -> Recipe:
    """Of linear regression on so many rows."""
    sizes = {"context_size": str(context), "target_size": str(targets), "batch_size": batch}
    flags = {"data": "blr", "lr": lr, **sizes}
    return Recipe(name=f"blr-{context}", steps=steps, flags=flags, **more)


RECIPES = (
    process(
        "rbf",
        24_000,
        Other({"data": "gp-matern"}),
        Other({"data": "gp-periodic"}),
        batch_size=256,
    ),
    process("matern", 32_000),
    process("periodic", 14_000),
    regression(64, 64, 128, 20_000, 2e-3),
    regression(1000, 256, 16, 3500, 1e-3, batches=16, after="blr-64"),
    regression(
        10_000,
        1000,
        4,
        1000,
        5e-4,
        batches=16,
        tasks=4,
        after="blr-1000",
        warm=(8, 24),
        others=(Other({"context_size": "200000"}, 4, 1),),
    ),
    Recipe(name="digits", steps=3000, flags={"data": "digits", "ragged": True}, batches=64),
)


@dataclass(frozen=True)
class Point:
    """One evaluation: a row of the result file.

    Attributes:
        trained: the recipe.
        data: what it was scored on.
        context: its context sizes.
        step: of ``steps``.
        step_ms: of this training alone, by the host's clock.
        alone_s: ``step`` times that.
        shared_s: since the trainings set out side by side, evaluations included.
        log_likelihood: nats per target.
        oracle: of the data's reference, on the same targets.
        attainable: of what can be known without a task's parameters; NaN where that is unknown.
        behind: the oracle's log-likelihood less the model's.
        behind_error: its standard error over tasks.
        cover_50: share of the targets in central intervals of 50 %; then of 80 and of 95.
    """

    trained: str
    data: str
    context: str
    step: int
    steps: int
    step_ms: float
    alone_s: float
    shared_s: float
    log_likelihood: float
    oracle: float
    attainable: float
    behind: float
    behind_error: float
    cover_50: float
    cover_80: float
    cover_95: float


class Kept:
    """Held-out tasks of a run's sizes, and what can be known of them, which the host finds out
    meanwhile.
    """

    def __init__(
        self, run: TransformerNPRun, batches: int, tasks: int, pool: ThreadPoolExecutor
    ) -> None:
        sampler = run.sampler(held_out=True)
        self.data, self.context = run.data, run.context_size or "as drawn"
        self.held_out = HeldOut(sampler, batches=batches, batch_size=tasks)
        self.known: list[Future[Tensor]] = []
        if not isinstance(sampler, Digits):
            find = partial(known_of, sampler)
            self.known = [pool.submit(find, task.to("cpu")) for task in self.held_out.drawn]

    @property
    def attainable(self) -> float:
        """Waits for the host."""
        known = [each.result() for each in self.known]
        return float(torch.cat(known).mean()) if known else nan


def known_of(sampler: Sampler, task: Task) -> Tensor:
    return task.mean_over_targets(attainable_log_likelihood(sampler, task))


def keeper(pool: ThreadPoolExecutor) -> Callable[[TransformerNPRun, int, int], Kept]:
    """Of held-out tasks, which trainings on the same data share; ``pool`` finds out what can be
    known of them.
    """
    every: dict[Hashable, Kept] = {}

    def keep(run: TransformerNPRun, batches: int, tasks: int) -> Kept:
        key = run.data, run.context_size, run.target_size, batches, tasks
        if key not in every:
            every[key] = Kept(run, batches, tasks, pool)
        return every[key]

    return keep


class Training:
    """One recipe, from its first step to its last.

    Args:
        recipe: what is trained.
        share: of the recipe's steps.
        device: where.
        note: is given every evaluation.
        keep: gives the held-out tasks of a run.
    """

    def __init__(
        self,
        recipe: Recipe,
        share: float,
        device: str,
        note: Callable[[Point], None],
        keep: Callable[[TransformerNPRun, int, int], Kept],
    ) -> None:
        self.recipe, self.note = recipe, note
        steps = max(sum(recipe.warm) + 1, round(share * recipe.steps))
        flags = COMMON | recipe.flags | {"device": device, "steps": steps}
        run = TransformerNPRun.from_flags(flags | {"eval_every": max(1, steps // POINTS)})
        # Scores are of the sizes that the data has by itself, but for a regression of many rows.
        scored = run if run.data == "blr" else replace(run, ragged=False, target_size=None)
        self.kept = [keep(scored, recipe.batches, recipe.tasks)]
        for other in recipe.others:
            self.kept.append(keep(replace(scored, **other.choices), other.batches, other.tasks))
        self.model = run.model(self.kept[0].held_out.task.x_context.shape[-1])
        self.source = run.source(padded=False)
        optimizer = optimizer_of(run, self.model)
        parts = self.source, negative_log_likelihood, optimizer, run.training()
        self.said = StringIO()
        console = Console(file=self.said)
        self.trainer = Trainer(self.model, *parts, None, console=console, evaluate=self.score)
        self.step_ms, self.scoring, self.start = nan, 0.0, time.perf_counter()

    def told(self) -> str:
        """What its trainer had to say of captures so far."""
        lines = self.said.getvalue().splitlines(keepends=True)
        return "".join(line for line in lines if "eager" in line)

    @property
    def ended(self) -> bool:
        return self.trainer.step == self.trainer.config.steps

    def warm_up(self) -> None:
        """Compile and capture, which bears no other work beside it."""
        state = self.source.state_dict()
        batch = self.source.sample(self.trainer.config.batch_size)
        with self.trainer.stepper.autocast():
            warm_up(
                self.model.loss,
                *(batch.x_context, batch.y_context, batch.x_target, batch.y_target),
                *(batch.context_lengths, batch.target_lengths),
            )
        self.source.load_state_dict(state)
        self.trainer.run(until=self.recipe.warm[0])
        self._wait()

    def take_time(self) -> None:
        """Of a step, nothing else beside it, and without the scores that are due meanwhile."""
        self._wait()
        timed, start, self.scoring = self.recipe.warm[1], time.perf_counter(), 0.0
        self.trainer.run(until=self.trainer.step + timed)
        self._wait()
        self.step_ms = 1e3 * (time.perf_counter() - start - self.scoring) / timed

    def train(self, start: float, late: Callable[[], bool], before: Training | None) -> None:
        """Up to the last step, or until it is late; ``before`` is the one that it goes on from."""
        self.start = start
        if before is not None:
            self.model.load_state_dict(before.model.state_dict())
            self.score()
        while not self.ended and not late():
            # Looks at the clock once a second.
            self.trainer.run(until=self.trainer.step + max(1, round(1e3 / self.step_ms)))
        if not self.ended:
            self.score(last=True)
        self._wait()

    def score(self, *, last: bool = False) -> dict[str, float]:
        """Note how the model does on the tasks that are kept, on other data at the end alone."""
        untimed = isnan(self.step_ms)
        if untimed:
            self._wait()
        begun = time.perf_counter()
        self.model.eval()
        for kept in self.kept if last or self.ended else self.kept[:1]:
            with self.trainer.stepper.autocast():
                found = kept.held_out.score(self.model)
            if not self.trainer.step:
                continue
            step = self.trainer.step
            point = Point(
                self.recipe.name,
                kept.data,
                kept.context,
                step,
                self.trainer.config.steps,
                self.step_ms,
                1e-3 * step * self.step_ms,
                time.perf_counter() - self.start,
                found.log_likelihood,
                found.log_likelihood + found.behind,
                kept.attainable,
                found.behind,
                found.behind_error,
                *found.coverage,
            )
            self.note(point)
        self.model.train()
        if untimed:
            self._wait()
            self.scoring += time.perf_counter() - begun
        return {"log likelihood": found.log_likelihood}

    def _wait(self) -> None:
        wait_for(self.trainer.device)


def train_all(
    trainings: Sequence[Training], late: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Each in a thread of its own, those that go on from another one in its thread after it."""
    start = time.perf_counter()
    by_name = {each.recipe.name: each for each in trainings}

    def chain(each: Training, before: Training | None) -> None:
        try:
            each.train(start, late, before)
            for following in trainings:
                if following.recipe.after == each.recipe.name:
                    chain(following, each)
        except Exception as error:
            say(f"{each.recipe.name}: {error!r}")
            raise

    first = [each for each in trainings if each.recipe.after not in by_name]
    with ThreadPoolExecutor(len(first)) as threads:
        for found in [threads.submit(chain, each, None) for each in first]:
            found.result()


def draw(points: list[Point]) -> Figure:
    """How far each is behind what can be known, over the steps that it had."""
    heading = "TransformerNP: nats behind what can be known, lower is better"
    figure, (axes,) = figures.panels([""], heading=heading, height=4.4)
    own = [point for point in points if point.step and isfinite(point.attainable)]
    names = dict.fromkeys(point.trained for point in own)
    for name, colour in zip(names, itertools.cycle(figures.CURVES), strict=False):
        mine = [point for point in own if point.trained == name]
        mine = [p for p in mine if (p.data, p.context) == (mine[0].data, mine[0].context)]
        behind = [point.attainable - point.log_likelihood for point in mine]
        seconds = [point.alone_s for point in mine]
        axes.plot(seconds, behind, marker=".", color=colour, label=name)
    axes.set_yscale("log")
    figures.dress(axes, x="seconds of this training alone", y="nats behind what can be known")
    figures.legend(figure)
    return figure


NAMES = ",".join(each.name for each in RECIPES)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    only: Annotated[str, typer.Option(help="Recipes, by name.")] = NAMES,
    share: Annotated[float, typer.Option(help="Of each one's steps, more than 1 too.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="Trainings end then, finished or not.")] = inf,
    device: Annotated[str, typer.Option()] = "cuda",
) -> None:
    """Train, score, and write all scores and their curves."""
    console, begun = Console(), time.perf_counter()
    with usage_errors():
        where, names = checked_device(device), only.split(",")
        known = {each.name: each for each in RECIPES}
        if unknown := set(names) - known.keys():
            raise ValueError(f"recipes are {tuple(known)}; got {', '.join(sorted(unknown))}")
        if not (isfinite(share) and share > 0.0):
            raise ValueError(f"--share wants a positive number; got {share}")
    file = out / f"learning-{environment_name(where)}.csv"
    points: list[Point] = []
    lock = threading.Lock()

    def note(point: Point) -> None:
        with lock:
            points.append(point)
            write(points, file, draw, formats=FORMATS)
        console.print(
            f"{point.trained} on {point.data}, {point.step} of {point.steps}: "
            f"{point.log_likelihood:.4f}, oracle {point.oracle:.4f}, known {point.attainable:.4f}",
            highlight=False,
        )

    # Threads that wait for the device should not wait for one another's turn as well.
    sys.setswitchinterval(1e-4)
    with ThreadPoolExecutor() as pool:
        keep = keeper(pool)
        trainings = [Training(known[name], share, device, note, keep) for name in names]
        for each in trainings:
            each.warm_up()
            console.print(each.told(), end="", highlight=False)
        # The host's clock wants a host without other work.
        pool.shutdown(wait=True)
        for each in trainings:
            each.take_time()
            console.print(f"{each.recipe.name}: {each.step_ms:.3f} ms a step", highlight=False)
        train_all(trainings, lambda: time.perf_counter() - begun > seconds, console.print)
    console.print(f"results in {file}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
