"""One optimizer step: batches, losses, gradients, clipping, and what is told of it at a log point.

Nothing in it waits for the device: losses and gradient norms are summed where they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .config import TrainingConfig
from .optimizer_traits import rate_dtype, take_step
from .processes import ALONE, Processes, local, running_averages, saved_buffers
from .source import Batch, Told, told_of


class Means(NamedTuple):
    """Of the steps since the last log point that were taken; NaN where none was.

    Attributes:
        loss: of a step.
        gradient_norm: before clipping.
        taken: how many they are.
        skipped: how many others the optimizer skipped, for a loss or gradients that are not finite.
        skipped_in_a_row: how many the last step ends, those before the last log point included.
        padding: how many tokens stood for nothing, over all steps, since the clock was started.
        means: of what else the loss function told, by name.
        counts: likewise, sums over all steps.
    """

    loss: float
    gradient_norm: float
    taken: int
    skipped: int
    skipped_in_a_row: int
    padding: int
    means: dict[str, float]
    counts: dict[str, float]


class Stepper:
    """Takes steps as Python comes to them.

    Args:
        model: on the device that trains.
        loss_function: ``(model, batch)`` to a scalar loss, or to all that is `Told`.
        optimizer: over the model's parameters; its rates are the schedule's peaks. On a GPU an
            optimizer that can be captured gets them as tensors, captured or not: the same bits.
        config: how to train.
        processes: that take the same steps, each on its rows.

    Attributes:
        loss: of the last step, or of what there is of it so far.
        rate: that the first group of the last step had.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: Callable[[Any, Any], Tensor | Told],
        optimizer: Optimizer,
        config: TrainingConfig,
        processes: Processes = ALONE,
    ) -> None:
        self.processes = processes
        self.model = self.joined(model)
        # Running averages follow the rows of all processes.
        self.buffers = saved_buffers(model)
        self.averages = running_averages(model) if processes.several else []
        self.loss_function = torch.compile(loss_function) if config.compile else loss_function
        self.optimizer, self.config = optimizer, config
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.peak_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.rate = self.peak_rates[0]
        dtype = rate_dtype(optimizer)
        self.rates: list[Tensor] | None = None
        if dtype is not None:
            self.rates = [torch.tensor(x, dtype=dtype, device=self.device) for x in self.peak_rates]
        wide = torch.promote_types(self.parameters[0].dtype, torch.float32)
        self.loss = torch.zeros((), dtype=wide, device=self.device)
        # [loss, gradient norm, steps taken, steps skipped], summed since the last log point
        self.sums = torch.zeros(4, dtype=wide, device=self.device)
        # Tokens that stand for nothing, counted as long as tokens are.
        self.padding = torch.zeros((), dtype=torch.int64, device=self.device)
        # Goes on over log points.
        self.skipped_in_a_row = torch.zeros_like(self.loss)
        self.one, self.zero = torch.ones_like(self.loss), torch.zeros_like(self.loss)
        self.of_skipped = torch.stack([self.zero, self.zero, self.zero, self.one])
        # What else is told: means of the last step so far, their sums, and sums of counts.
        self.names: tuple[list[str], list[str]] = [], []
        self.told = self.told_sums = self.counts = self.sums[:0]
        # Before the step that is being taken, and whether its optimizer has begun to move.
        self.kept: list[Tensor] = []
        self.moving = False

    def take(self, factor: float, sample: Callable[[], Batch]) -> None:
        """One step with ``factor`` times the peak rates."""
        self._keep()
        self._schedule(factor)
        count = self.config.accumulation_steps
        for number in range(count):
            self.add(sample(), first=number == 0, last=number == count - 1)
            self.processes.average_(*self.averages)
        self.processes.average_(self.loss, self.told)
        self.moving = True
        self.update()
        self.moving = False

    @torch.no_grad()
    def _keep(self) -> None:
        """What batches change before the optimizer moves."""
        changing = [*self.buffers, self.counts]
        if [x.shape for x in changing] != [x.shape for x in self.kept]:
            self.kept = [x.clone() for x in changing]
        elif self.buffers or len(self.counts):
            torch._foreach_copy_(self.kept, changing)

    @torch.no_grad()
    def undo(self) -> None:
        """Take back what the batches of a step have changed that did not come to its end."""
        for x, kept in zip([*self.buffers, self.counts], self.kept, strict=True):
            # In the first step of all what is counted is not known before its batch.
            if x.shape == kept.shape:
                x.copy_(kept)
            else:
                x.zero_()

    def joined(self, model: nn.Module) -> nn.Module:
        """What is called in the place of the model, where there are other processes."""
        return self.processes.wrapped(model)

    def add(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Add a batch's share to the gradients, which are those of all processes after the ``last``
        batch of a step.
        """
        with self.processes.adding(self.model, last=last):
            self.backward(batch, first=first)

    def backward(self, batch: Batch, *, first: bool) -> None:
        """Add a batch's share to the gradients, of which the first finds none."""
        with self.autocast():
            told = told_of(self.loss_function(self.model, batch))
            share = told.loss / self.config.accumulation_steps
        share.backward()
        if first:
            self.loss.copy_(share.detach())
        else:
            self.loss.add_(share.detach())
        padding: Tensor | None = getattr(batch, "padding", None)
        if padding is not None:
            self.padding.add_(padding)
        self._note(told, first)

    @torch.no_grad()
    def _note(self, told: Told, first: bool) -> None:
        """Add up what else a batch has to say."""
        names = [*told.means], [*told.counts]
        if names != self.names:
            if any(self.names):
                raise ValueError(f"wanted a loss function that tells {self.names}; got {names}")
            # At the first batch of all, which is no captured one.
            self.names = names
            self.told, self.told_sums, self.counts = (
                self.sums.new_zeros(len(some)) for some in (names[0], names[0], names[1])
            )
        if told.means:
            fresh = torch.stack([x.to(self.told) for x in told.means.values()])
            fresh = fresh / self.config.accumulation_steps
            if first:
                self.told.copy_(fresh)
            else:
                self.told.add_(fresh)
        if told.counts:
            self.counts.add_(torch.stack([x.to(self.counts) for x in told.counts.values()]))

    def update(self) -> None:
        """Have the optimizer take the step, and the gradients gone."""
        self.move()
        self.optimizer.zero_grad(set_to_none=True)

    def move(self) -> None:
        taken = take_step(self.optimizer, self.loss, self.parameters, self.config.clip_norm)
        numbers = torch.stack([self.loss, taken.norm.to(self.loss.dtype), self.one, self.zero])
        told = self.told
        if taken.skipped is not None:
            # Selected: what is not finite has no place in a sum.
            numbers = torch.where(taken.skipped, self.of_skipped, numbers)
            told = torch.where(taken.skipped, self.zero, told)
            self.skipped_in_a_row.add_(1.0).mul_(taken.skipped)
        self.sums.add_(numbers)
        self.told_sums.add_(told)

    def scored(self, work: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """What ``work`` makes of a batch of an evaluation; every time the same function of batches
        of one shape, which waits for nothing, without gradients.
        """
        return work(batch)

    def autocast(self, *, cached: bool = True) -> torch.autocast:
        """The precision of the training; parameters that are cast stay cast within it where that is
        ``cached``.
        """
        bf16 = self.config.precision == "bf16"
        options: dict[str, Any] = {"dtype": torch.bfloat16, "cache_enabled": cached}
        return torch.autocast(self.device.type, enabled=bf16, **options)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around everything between the first step of a run and its last."""
        yield

    def means(self) -> Means:
        """Since the last log point, which is now; waits for the device."""
        of_steps = torch.cat([self.sums[:2], self.told_sums]) / self.sums[2]
        of_rows = torch.cat([self.padding.to(self.sums).view(1), self.counts])
        parts = [of_steps, self.sums[2:], self.skipped_in_a_row.view(1)]
        parts.append(self.processes.add_(of_rows))
        loss, norm, *numbers = torch.cat(parts).tolist()  # sync: once per log point
        self._zero_sums()
        told, numbers = numbers[: len(self.told)], numbers[len(self.told) :]
        taken, skipped, in_a_row, padding, *counted = numbers
        means = dict(zip(self.names[0], told, strict=True))
        counts = dict(zip(self.names[1], counted, strict=True))
        steps = int(taken), int(skipped), int(in_a_row)
        return Means(loss, norm, *steps, int(padding), means, counts)

    def _zero_sums(self) -> None:
        for sums in (self.sums, self.told_sums, self.counts, self.padding):
            sums.zero_()

    def since_log(self) -> dict[str, Any]:
        """For a checkpoint: what has been summed since the last log point, by all processes."""
        names = [list(some) for some in self.names]
        counts = self.processes.add_(self.counts.clone())
        sums = {"sums": self.sums, "told_sums": self.told_sums, "counts": counts}
        return {"names": names, **sums}

    def load_since_log(self, state: dict[str, Any]) -> None:
        """Take up what ``since_log`` gave."""
        means, counts = state["names"]
        self.names = means, counts
        self.told = self.sums.new_zeros(len(means))
        self.told_sums = state["told_sums"].to(self.sums)
        # Those of all processes are added up.
        counted = state["counts"].to(self.sums)
        self.counts = counted if self.processes.is_main else torch.zeros_like(counted)
        self.sums.copy_(state["sums"])

    def sums_are_sound(self) -> bool:
        """Whether what has been summed since the last log point is finite; waits for the device."""
        return bool(self.sums.isfinite().all())  # sync: once per checkpoint

    def is_sound(self) -> bool:
        """Whether all parameters are finite; waits for the device."""
        finite = torch.stack([local(p.detach()).isfinite().all() for p in self.parameters])
        unsound = self.processes.add_((~finite.all()).to(torch.int32))
        return not unsound  # sync: once per checkpoint

    def optimizer_state(self) -> dict[str, Any]:
        """For a checkpoint: rates are the schedule's, of which the peaks are told."""
        state = self.processes.whole(self.optimizer.state_dict())
        for group, peak in zip(state["param_groups"], self.peak_rates, strict=True):
            group["lr"] = peak
        return state

    def forget(self) -> None:
        """What there is of earlier steps, where model and optimizer have been loaded."""
        self._zero_sums()
        self.skipped_in_a_row.zero_()

    def _schedule(self, factor: float) -> None:
        self.rate = factor * self.peak_rates[0]
        for place, group in enumerate(self.optimizer.param_groups):
            rate = factor * self.peak_rates[place]
            group["lr"] = rate if self.rates is None else self.rates[place].fill_(rate)
