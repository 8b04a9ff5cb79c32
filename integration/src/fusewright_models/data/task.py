"""What every source of regression tasks has in common."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.transformer_np.layers import shown, within
from .sizes import Capacity, Size, capacities_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Where and how the tasks of a sampler are made, and which of them.
NOT_OF_TASKS = ("padded", "device", "seed")


@dataclass(frozen=True)
class Task:
    """A batch of B regression tasks with M context and N target points each.

    Attributes:
        x_context: ``[B, M, d_x]``, fp32.
        y_context: ``[B, M, d_y]``.
        x_target: ``[B, N, d_x]``.
        y_target: ``[B, N, d_y]``.
        truth: what the sampler knows and the model does not (kernel parameters, noise), each with
            leading axis B and none of points; the reference log-likelihood reads it.
        context_lengths: ``[B]``, int64: task b has only its first ``context_lengths[b]`` context
            points; None means M.
        target_lengths: likewise its targets; None means N.
        group: the processes that have the other rows of the same tasks; None where all are here.
    """

    x_context: Tensor
    y_context: Tensor
    x_target: Tensor
    y_target: Tensor
    truth: dict[str, Tensor] = field(default_factory=dict)
    context_lengths: Tensor | None = None
    target_lengths: Tensor | None = None
    group: ProcessGroup | None = None

    @property
    def tokens(self) -> int:
        """B (M + N), the rows that the model reads, those past a task's lengths included."""
        return self.x_context.shape[0] * (self.x_context.shape[1] + self.x_target.shape[1])

    @property
    def padding(self) -> Tensor | None:
        """How many of them are past a task's lengths, 0-d; None where there are no lengths."""
        given = (self.x_context, self.context_lengths), (self.x_target, self.target_lengths)
        parts = [(~within(rows, lengths)).sum() for rows, lengths in given if lengths is not None]
        return sum(parts[1:], parts[0]) if parts else None

    def shown(self, rows: Tensor) -> Tensor:
        """``rows [B, M, ...]``, one for each context point, with zeros where a task has none."""
        return shown(rows, self.context_lengths)

    def part(self, first: int, last: int) -> Task:
        """The tasks from number ``first`` to before ``last``, views of these."""
        return self._changed(lambda rows: rows[first:last])

    def part_of_rows(self, rank: int, group: ProcessGroup) -> Task:
        """All tasks, of each the rows that the process of this number in the group trains on, views
        of these.

        Raises:
            ValueError: tasks have lengths, or there are not as many rows for every process.
        """
        if not (self.context_lengths is None and self.target_lengths is None):
            raise ValueError("wanted tasks of one size, whose rows processes share; got lengths")
        count, sizes = group.size(), (self.x_context.shape[1], self.x_target.shape[1])
        if any(size % count for size in sizes):
            raise ValueError(
                f"wanted as many context points and targets for each of {count} processes; got "
                f"{sizes[0]} and {sizes[1]}"
            )
        names = "x_context", "y_context", "x_target", "y_target"
        parts = {name: getattr(self, name).chunk(count, dim=1)[rank] for name in names}
        return replace(self, **parts, group=group)

    def to(self, device: torch.device | str) -> Task:
        """The same tasks there."""
        return self._changed(lambda rows: rows.to(device))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Task:
        """With another in the place of each tensor."""
        parts: dict[str, Any] = {
            name: change(rows) for name, rows in vars(self).items() if isinstance(rows, Tensor)
        }
        return Task(**parts, truth={name: change(rows) for name, rows in self.truth.items()})

    @classmethod
    def joined(cls, tasks: Sequence[Task]) -> Task:
        """All tasks of some batches without lengths as one batch, padded to the largest of them
        where their sizes differ.
        """
        sizes = [(each.x_context.shape[1], each.x_target.shape[1]) for each in tasks]
        contexts, targets = (Size(min(some), max(some)) for some in zip(*sizes, strict=True))
        padded = [each.padded(Capacity(contexts, targets)) for each in tasks]
        parts: dict[str, Any] = {}
        for each_field in fields(cls):
            found = [getattr(each, each_field.name) for each in padded]
            if isinstance(found[0], Tensor):
                parts[each_field.name] = torch.cat(found)
        names = tasks[0].truth
        truth = {name: torch.cat([each.truth[name] for each in padded]) for name in names}
        return cls(**parts, truth=truth)

    def mean_over_targets(self, scores: Tensor) -> Tensor:
        """``scores [B, N, d_y]`` to ``[B]``: of the targets that each task has; 0 of none."""
        if self.target_lengths is None:
            return scores.mean((1, 2))
        count = within(scores, self.target_lengths).sum(1).clamp(min=1) * scores.shape[2]
        return shown(scores, self.target_lengths).sum((1, 2)) / count

    def padded(self, capacity: Capacity) -> Task:
        """The same tasks in tensors of the most points of a capacity, with the lengths that they
        have; without, of what has one size in it.
        """
        contexts, targets = capacity
        padded = self
        if not contexts.is_one:
            x, y = (_padded(rows, contexts.high) for rows in (self.x_context, self.y_context))
            lengths = self.context_lengths
            if lengths is None:
                lengths = _full_lengths(self.x_context)
            padded = replace(padded, x_context=x, y_context=y, context_lengths=lengths)
        if not targets.is_one:
            x, y = (_padded(rows, targets.high) for rows in (self.x_target, self.y_target))
            lengths = _full_lengths(self.x_target)
            padded = replace(padded, x_target=x, y_target=y, target_lengths=lengths)
        return padded


def _padded(rows: Tensor, length: int) -> Tensor:
    """``rows [B, n, width]`` with zeros behind them, ``[B, length, width]``."""
    return F.pad(rows, (0, 0, 0, length - rows.shape[1]))


def _full_lengths(rows: Tensor) -> Tensor:
    """Of ``rows [B, n, ...]``: n for each task."""
    batch, length = rows.shape[:2]
    return torch.full((batch,), length, dtype=torch.int64, device=rows.device)


@dataclass(eq=False, kw_only=True)
class Sampler(ABC):
    """Endless batches of tasks, made on the device that trains, the same ones for the same seed.

    Two generators: tensors come from one of the device, so that nothing is copied to it; sizes come
    from one of the host, since a shape that depended on the device would have to be waited for.

    Args:
        context_size: M; None takes ``default_context``.
        target_size: N; None takes what ``default_targets`` says.
        ragged: every task draws a context size of its own, on the device, and the batch is padded
            to the largest beside its N, so that all batches have one shape where N is one number;
            otherwise the tasks of a batch have one M, drawn again for each batch.
        padded: batches are padded to one of a few capacities, those of ``capacities``, with lengths
            that tell of their sizes. The tasks are those of the same sampler without.
        device: where the tasks are made.
        seed: of both generators.

    Attributes:
        x_width: d_x.
        y_width: d_y.
        default_context: M where nothing else is asked for.
        reference: what ``reference_log_likelihood`` is the likelihood of, in words.
    """

    x_width: ClassVar[int]
    y_width: ClassVar[int] = 1
    default_context: ClassVar[Size]
    reference: ClassVar[str]

    context_size: Size | None = None
    target_size: Size | None = None
    ragged: bool = False
    padded: bool = False
    device: torch.device | str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        self.context_size, self.device = self.contexts, torch.device(self.device)
        self.reset()

    @property
    def contexts(self) -> Size:
        """M, whether given or not."""
        return self.context_size or self.default_context

    def reset(self) -> None:
        """Start again from the seed."""
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.host_generator = random.Random(self.seed)

    def sample(self, batch: int) -> Task:
        """The next ``batch`` tasks in tensors of the same M and N.

        They are the same under autocast as without it.
        """
        context, targets = self.draw_sizes()
        with torch.autocast(self.generator.device.type, enabled=False):
            task = self.sample_sized(batch, context, targets)
            if self.ragged:
                task = replace(task, context_lengths=self.draw_lengths(batch, context))
            task = self.finished(task)
        return task.padded(self.capacity_of(context, targets)) if self.padded else task

    @cached_property
    def capacities(self) -> list[Capacity]:
        """What a batch may be padded to."""
        return capacities_of(self.sizes())

    def capacity_of(self, context: int, targets: int) -> Capacity:
        """The one that serves batches of M = ``context`` and N = ``targets``.

        Raises:
            ValueError: ``sizes`` does not have them.
        """
        for capacity in self.capacities:
            if context in capacity.contexts and targets in capacity.targets:
                return capacity
        raise ValueError(
            f"wanted a batch of {type(self).__name__}'s sizes, which tell what it may be padded "
            f"to; got M = {context} and N = {targets}"
        )

    def sizes(self) -> dict[int, Size]:
        """Every M that ``draw_sizes`` may give, and the N that it may give beside it."""
        lowest = self.contexts.high if self.ragged else self.contexts.low
        numbers = range(lowest, self.contexts.high + 1)
        return {number: self.target_size or self.default_targets(number) for number in numbers}

    def draw_sizes(self) -> tuple[int, int]:
        """M and N of the next batch; M is that of its largest task where it is ragged."""
        context = self.contexts.high if self.ragged else self.contexts.draw(self.host_generator)
        targets = self.target_size or self.default_targets(context)
        return context, targets.draw(self.host_generator)

    def draw_lengths(self, batch: int, context: int) -> Tensor:
        """The context size of each task of a ragged batch, ``context`` at most, ``[B]``."""
        low = self.contexts.low
        return torch.randint(
            low, context + 1, (batch,), generator=self.generator, device=self.device
        )

    @abstractmethod
    def default_targets(self, context: int) -> Size:
        """N beside a context of that size, where no other was asked for."""

    @abstractmethod
    def sample_sized(self, batch: int, context: int, targets: int) -> Task:
        """The next ``batch`` tasks with M = ``context`` and N = ``targets``."""

    def finished(self, task: Task) -> Task:
        """The tasks as a model sees them, where that depends on how many points each one has."""
        return task

    @abstractmethod
    def reference_log_likelihood(self, task: Task) -> Tensor:
        """log p of every target, ``[B, N, d_y]``, under the reference of this data."""

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """U[low, high) on the device, fp32."""
        draws = torch.rand(shape, generator=self.generator, device=self.device)
        return low + (high - low) * draws

    def normal(self, *shape: int) -> Tensor:
        """N(0, 1) on the device, fp32."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def state_dict(self) -> dict[str, Any]:
        """The state of both generators, and whose it is."""
        generators = {"device": self.generator.get_state(), "host": self.host_generator.getstate()}
        return generators | {"tasks": self._tasks()}

    def _tasks(self) -> dict[str, str]:
        """What tells these tasks from others, but for the seed: it is in the generators' states."""
        names = [each.name for each in fields(self) if each.name not in NOT_OF_TASKS]
        return {"kind": type(self).__name__} | {name: str(getattr(self, name)) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: it was taken of other tasks.
        """
        # States of before do not tell.
        own = self._tasks()
        other = state.get("tasks", own)
        if other != own:
            names = sorted(name for name in own | other if own.get(name) != other.get(name))
            wanted, got = (
                ", ".join(f"{name} {each.get(name, 'absent')}" for name in names)
                for each in (other, own)
            )
            raise ValueError(
                f"wanted the tasks that the run was begun with, of {wanted}; got {got}"
            )
        self.generator.set_state(state["device"])
        self.host_generator.setstate(state["host"])


def normal_log_likelihood(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), elementwise."""
    return -0.5 * ((y - mean).square() / variance + (2.0 * math.pi * variance).log())
