"""Memory of a training step of HybridLM by its number of layers: is it flat?

exact       states are recomputed from the last two
stored      states are kept, and what is inside a layer is recomputed
plain       ordinary autograd, which keeps everything

One eager step each, after a first one that compiles, tunes and makes the optimizer's state. What
lies there before it (weights, optimizer, tokens) is no part of its peak, which is that of forward
and backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from fusewright.reversible import Mode
from torch import Tensor, nn

from ..models.hybrid import MODES, HybridLM
from .harness import Line
from .hybrid import HybridHarness
from .results import keep_beside, table_of
from .text import TextShape

# Of a file of its own: nothing is timed.
COLUMNS = ["case", "mode", "peak_mib", "gradients_mib", "choices_mib", "activations_mib"]
# Of a step, while its backward pass runs: those before data, forward pass and backward pass.
BACKWARD = 3


class Peaks:
    """Marks of a step that read the peaks of memory between them, in bytes.

    Attributes:
        before: what lies there before the step.
        highest: the peak of the step, less ``before``.
        activations: that without gradients: of each stretch between two looks those are taken off
            that lie there when it begins.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks = self.before = self.highest = self.activations = self.gradients = 0

    def mark(self) -> None:
        if self.marks == 0:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        self.look(0)
        self.marks += 1

    def look(self, gradients: int) -> None:
        """Read the peak; so many bytes of gradients lie there from now on."""
        if self.marks <= BACKWARD:
            peak = torch.cuda.max_memory_allocated(self.device) - self.before
            self.highest = max(self.highest, peak)
            self.activations = max(self.activations, peak - self.gradients)
            self.gradients = gradients
            torch.cuda.reset_peak_memory_stats(self.device)

    def watch(self, model: HybridLM) -> None:
        """Look where a layer of the stack is recomputed: the gradients of all after it lie there
        by then, and of what stands behind the stack.
        """
        later = nbytes(model)
        for layer in model.stack.layers:
            later -= nbytes(layer)
        for layer in reversed(model.stack.layers):
            self._watch(layer, later)
            later += nbytes(layer)

    def _watch(self, layer: Any, later: int) -> None:
        force = layer.force

        def looked(x: Tensor, **context: Any) -> tuple[Tensor, Tensor | None]:
            if self.marks == BACKWARD:
                self.look(later)
            return force(x, **context)

        layer.force = looked


class Memory(NamedTuple):
    """Bytes of one step.

    Attributes:
        peak: less what lay there before the step; None on the CPU.
        gradients: of all parameters.
        choices: `Losses.tape_bytes`, kept for the backward pass beside states.
        activations: the peak without both; None on the CPU.
    """

    peak: int | None
    gradients: int
    choices: int
    activations: int | None

    def mib(self) -> tuple[str, ...]:
        """The numbers of a row."""
        return tuple("" if count is None else f"{count / 2**20:.3f}" for count in self)


class DepthHarness(NamedTuple):
    """Measures memory at several depths.

    Attributes:
        harness: everything but the depths.
        depths: numbers of layers.
    """

    harness: HybridHarness
    depths: Sequence[int]

    def bench(self, shape: TextShape) -> bool:
        """Measure one shape, print its table, keep its rows; False where a mode fails that does not
        keep everything.
        """
        harness = self.harness
        title = f"{harness.op} B={shape.batch} T={shape.length}"
        numbers = (name.removesuffix("_mib") for name in COLUMNS[2:])
        table = table_of(title, "MiB, eager", ("layers", "mode"), numbers)

        def line_of(mode: Mode, layers: int) -> Line:
            deep = replace(harness, config=replace(harness.config, layers=layers, mode=mode))

            def told(memory: Memory) -> tuple[str, ...]:
                values = deep.case(shape), mode, *memory.mib()
                keep_beside(harness.file, "depth", COLUMNS, values)
                return memory.mib()

            names = str(layers), mode
            return Line(names, mode != "plain", lambda: measured(deep, shape), told)

        return harness.tabulate(table, [line_of(mode, n) for mode in MODES for n in self.depths])


def measured(harness: HybridHarness, shape: TextShape) -> Memory:
    """A step of a new model; on a GPU a second one, whose peaks are read."""
    choices = 0

    def loss(model: HybridLM, tokens: Tensor) -> Tensor:
        nonlocal choices
        losses = model.losses(tokens)
        choices = losses.tape_bytes
        return losses.total

    step = harness.step(shape, "fusewright")
    step.loss_function = loss
    step.run()
    gradients = nbytes(step.model)
    if harness.device.type != "cuda":
        return Memory(None, gradients, choices, None)
    peaks = Peaks(harness.device)
    peaks.watch(cast(HybridLM, step.model))
    step.run(peaks.mark)
    return Memory(peaks.highest, gradients, choices, peaks.activations - choices)


def nbytes(module: nn.Module) -> int:
    """Of its parameters, and of their gradients."""
    return sum(p.nbytes for p in module.parameters())
