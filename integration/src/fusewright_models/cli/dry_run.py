"""``--dry-run``: what a run would take. Its model has no memory and its steps are not taken: one
forward pass of shapes alone is counted, and a backward pass for its memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from ..devices import peak_tflops, wait_for
from ..training import TrainingConfig
from ..training.source import told_of
from .run import Run
from .step_memory import BatchSize, LiveMemory, States, kept_on_gpu, states_of

# Of a step, as long as forward passes: a backward pass has two products for each of a forward one.
PASSES = 3
# A product takes so long to be measured, in seconds.
MEASURED = 0.1


class Counted(NamedTuple):
    """One forward pass of a batch.

    Attributes:
        parameters: of the model.
        rows: tokens that the batch has.
        operations: of the matrix products, by the formulas in plain torch.
        held: the most bytes that this pass and its backward pass hold at one time in plain torch,
            without the backward pass where there are no states.
        states: of the model and its optimizer, if they were asked for.
    """

    parameters: int
    rows: int
    operations: int
    held: int
    states: States | None = None


def step_operations(run: Run, forward: Callable[[], Counted]) -> float | None:
    """Of a token's share of a step, where it is known how many the device can do: in bf16, on some
    GPUs. ``forward`` counts a pass.
    """
    if run.precision != "bf16" or peak_tflops(torch.device(run.device)) is None:
        return None
    found = forward()
    return PASSES * found.operations / found.rows


def counted(
    model: nn.Module, loss: Callable[[], Any], rows: int, *, optimizer: Optimizer | None = None
) -> Counted:
    """Count a forward pass, and with an ``optimizer`` the memory of a step.

    Args:
        model: on the device "meta", as what ``loss`` computes.
        loss: of a batch.
        rows: of the batch.
        optimizer: over the model's parameters.
    """
    with LiveMemory() as memory:
        with FlopCounterMode(display=False) as counter:
            found = told_of(loss())
        if optimizer is not None:
            found.loss.backward()
    return Counted(
        parameters=sum(p.numel() for p in model.parameters()),
        rows=rows,
        operations=counter.get_total_flops(),
        held=memory.most,
        states=None if optimizer is None else states_of(model, optimizer),
    )


def tell(console: Console, run: Run, title: str, forward: Counted, size: BatchSize) -> None:
    """Print what the run of a model with that title would take.

    Args:
        console: where to.
        run: of these settings.
        title: of the model, for people.
        forward: pass of a batch, which may be smaller than the run's, with its states.
        size: of the run's batch.
    """
    training, device = run.training(), torch.device(run.device)
    batch = PASSES * size.rows / forward.rows * forward.operations
    step = batch * training.accumulation_steps
    whole = step * training.steps
    assert forward.states is not None
    states, kept = sum(forward.states), beside_states(run, forward, size)
    rate, has = product_rate(device, training), memory(device)
    units = size.units * training.accumulation_steps
    lines = [
        f"{title} ({run.label}), {forward.parameters:,} parameters, {run.device}, {run.precision}",
        f"{_scaled(batch / size.units)}FLOP a {size.unit}, {_scaled(step)}FLOP a step of {units:,} "
        f"{size.unit}s, {_scaled(whole)}FLOP in {training.steps:,} steps",
        f"memory: {_bytes(states)} for weights, gradients and {run.optimizer}, and about "
        f"{_bytes(kept)} that a backward pass needs; {run.device} has {_bytes(has)}",
        f"time: {_duration(whole / rate)} or more, at the {_scaled(rate)}FLOP/s of matrix products "
        "alone that were measured here now",
        "nothing was trained, and nothing was written",
    ]
    if states + kept > has:
        lines.insert(3, "which may be too much: a smaller --batch-size needs less")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def beside_states(run: Run, counted: Counted, size: BatchSize) -> float:
    """Bytes that a step needs at most beside its states."""
    if torch.device(run.device).type != "cpu":
        return kept_on_gpu(run, size)
    assert counted.states is not None
    # Gradients are among what a pass holds.
    return max(size.rows / counted.rows * counted.held - counted.states.gradients, 0.0)


def product_rate(device: torch.device, training: TrainingConfig) -> float:
    """Operations a second of a product of square matrices, in the precision of the training."""
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    size = 4096 if device.type == "cuda" else 512
    x = torch.ones(size, size, device=device, dtype=dtype)

    def seconds(times: int) -> float:
        wait_for(device)
        begun = time.perf_counter()
        for _ in range(times):
            x @ x
        wait_for(device)
        return time.perf_counter() - begun

    # The first one sets the library up.
    seconds(1)
    times = 1
    while (passed := seconds(times)) < MEASURED:
        times *= 2
    return times * 2 * size**3 / passed


def memory(device: torch.device) -> int:
    """Of the device, or of this machine, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _scaled(number: float) -> str:
    """Such as 1.32 G."""
    power = 0
    while number >= 1000.0 and power < 7:
        number, power = number / 1000.0, power + 1
    return f"{_short(number)} {' kMGTPEZ'[power].strip()}"


def _bytes(number: float) -> str:
    return f"{_short(number / 2**30)} GiB" if number >= 2**30 else f"{_short(number / 2**20)} MiB"


def _duration(seconds: float) -> str:
    for name, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{_short(seconds / length)} {name}"
    return f"{_short(seconds)} seconds"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000.0 else f"{number:.3g}"
