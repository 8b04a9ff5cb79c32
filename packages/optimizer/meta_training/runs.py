"""Many short trainings of one task side by side, each with numbers of its own, on one device.

A step draws batches, takes gradients by torch.func, moves all parameters and adds up what the
losses count. On a GPU a step of several tasks is captured once in a CUDA graph, a branch for each
task, and then replayed; elsewhere the same code runs operation by operation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from fusewright.optimizer import FunctionalAdamW, UpdateMLP, learned_apply, learned_init
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from .parts import Task, Tensors, spread

Tensor = torch.Tensor
# A loss counts as the logarithm of its ratio to the first one; ratios below LOWEST or above HIGHEST
# change the count little.
LOWEST, HIGHEST = 0.01, 5.0


class Stepper(Protocol):
    """An optimizer of which every run has one with other numbers: trees with runs along the first
    axis.
    """

    def start(self, params: list[Tensor]) -> Any: ...
    def move(
        self, params: list[Tensor], gradients: list[Tensor], state: Any
    ) -> tuple[list[Tensor], Any]: ...


class LearnedSteps(NamedTuple):
    """``UpdateMLP`` with weights ``[runs, numbers of the network]``."""

    mlp: UpdateMLP
    weights: Tensor

    def start(self, params: list[Tensor]) -> Any:
        # vmap gives all runs the same memory.
        return tree_map(
            lambda x: x.clone(memory_format=torch.contiguous_format), vmap(learned_init)(params)
        )

    def move(
        self, params: list[Tensor], gradients: list[Tensor], state: Any
    ) -> tuple[list[Tensor], Any]:
        def of_run(flat: Tensor, ps: list[Tensor], gs: list[Tensor], kept: Any) -> Any:
            operands = (ps, gs, kept)
            updates, kept = functional_call(self.mlp, named(self.mlp, flat), operands, PLAIN)
            return learned_apply(ps, updates), kept

        return vmap(of_run)(self.weights, params, gradients, state)


# Weights differ from run to run, which the kernels cannot serve.
PLAIN = {"backend": "reference"}


def named(mlp: UpdateMLP, flat: Tensor) -> dict[str, Tensor]:
    """The network's numbers by their names, from a vector of all."""
    parameters = dict(mlp.named_parameters())
    parts = flat.split([x.numel() for x in parameters.values()])
    return {
        name: part.view(x.shape) for (name, x), part in zip(parameters.items(), parts, strict=True)
    }


class AdamWSteps(NamedTuple):
    """AdamW without decay, with rates ``[runs]``."""

    rates: Tensor

    def start(self, params: list[Tensor]) -> Any:
        return FunctionalAdamW().init(params)._replace(step=torch.zeros_like(self.rates))

    def move(
        self, params: list[Tensor], gradients: list[Tensor], state: Any
    ) -> tuple[list[Tensor], Any]:
        def of_run(rate: Tensor, ps: list[Tensor], gs: list[Tensor], kept: Any) -> Any:
            optimizer = FunctionalAdamW(rate, weight_decay=0.0)
            updates, kept = optimizer.update(gs, kept, ps)
            return optimizer.apply(ps, updates), kept

        return vmap(of_run)(self.rates, params, gradients, state)


class Runs:
    """``copies`` times ``n`` trainings of a task; the copies of a problem see the same start and
    the same batches. All tensors are kept where they are, as a captured step needs it.

    Attributes:
        age: ``[n]``, steps since the problem was drawn.
        total: ``[copies, n]``, sum of what the losses counted since it was last set to zero.
        ratio: ``[copies, n]``, the last loss over the first one.
    """

    def __init__(
        self, task: Task, stepper: Stepper, n: int, copies: int, device: torch.device
    ) -> None:
        self.task, self.stepper = task, stepper
        self.n, self.copies, self.device = n, copies, device
        self.age = torch.zeros(n, device=device)
        self.first, self.ratio, self.total = torch.zeros(3, copies, n, device=device)
        self._drawn = self._draw()
        self._params = [self._spread(x) for x in self._drawn.params]
        self._state = stepper.start(self._params)

    def restart(self, over: Tensor) -> None:
        """Draw the problems again for which ``over`` ``[n]`` is true."""
        fresh = self._draw()
        put(self._drawn, fresh, over)
        put(self._params, [self._spread(x) for x in fresh.params], over.repeat(self.copies))
        zeros = tree_map(torch.zeros_like, self._state)
        put(self._state, zeros, over.repeat(self.copies))
        self.age.masked_fill_(over, 0.0)

    def step(self) -> None:
        """One step of all."""
        problems, _, unit, gain = self._drawn
        batch = [self._spread(x) for x in self.task.batch(problems)]

        def loss(ps: list[Tensor], unit: Tensor, gain: Tensor, batch: Sequence[Tensor]) -> Tensor:
            return gain * self.task.loss([unit * p for p in ps], tuple(batch))

        operands = (self._params, self._spread(unit), self._spread(gain), batch)
        gradients, losses = vmap(grad_and_value(loss))(*operands)
        losses = losses.view(self.copies, self.n)
        torch.where(self.age == 0.0, losses, self.first, out=self.first)
        torch.div(losses, self.first, out=self.ratio)
        self.total.add_(counted(self.ratio))
        self.age.add_(1.0)
        params, state = self.stepper.move(self._params, gradients, self._state)
        put(self._params, params)
        put(self._state, state)

    def _draw(self) -> Drawn:
        n, device = self.n, self.device
        problems = self.task.problems(n, device)
        unit, gain = spread(n, 0.5, 2.0, device), spread(n, 0.1, 10.0, device)
        start = spread(n, 0.5, 2.0, device)
        params = []
        for shape in self.task.shapes():
            x = torch.zeros(n, *shape, device=device)
            if len(shape) > 1:
                size = start / unit * shape[0] ** -0.5
                x = torch.randn_like(x) * size.view(-1, *[1] * len(shape))
            params.append(x)
        return Drawn(problems, params, unit, gain)

    def _spread(self, x: Tensor) -> Tensor:
        """``[copies n, ...]``: the copies of all problems after each other."""
        return x.repeat(self.copies, *[1] * (x.ndim - 1))


class Drawn(NamedTuple):
    """Problems, the parameters to start from, and what parameters and losses are multiplied by."""

    problems: Tensors
    params: list[Tensor]
    unit: Tensor
    gain: Tensor


def counted(ratio: Tensor) -> Tensor:
    """The count of a loss, from its ratio to the first one."""
    clipped = torch.nan_to_num(ratio, HIGHEST, HIGHEST, HIGHEST).clamp(max=HIGHEST)
    return (clipped + LOWEST).log()


def put(kept: Any, new: Any, where: Tensor | None = None) -> None:
    """Copy a tree into another one, all of it or those rows."""
    for old, fresh in zip(tree_leaves(kept), tree_leaves(new), strict=True):
        if where is not None:
            fresh = torch.where(where.view(-1, *[1] * (old.ndim - 1)), fresh, old)
        old.copy_(fresh)


def stepping(several: Sequence[Runs]) -> Callable[[], None]:
    """A function that takes a step of all runs: on a GPU the replay of a graph."""

    def in_turns() -> None:
        for runs in several:
            runs.step()

    if several[0].device.type != "cuda":
        return in_turns
    streams = [torch.cuda.Stream() for _ in several]

    def in_branches() -> None:
        trunk = torch.cuda.current_stream()
        for runs, stream in zip(several, streams, strict=True):
            stream.wait_stream(trunk)
            with torch.cuda.stream(stream):
                runs.step()
        for stream in streams:
            trunk.wait_stream(stream)

    warm_up, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(2):
            in_branches()
    torch.cuda.current_stream().wait_stream(warm_up)
    # A graph that is garbage must not be freed during a capture.
    gc.collect()
    with torch.cuda.graph(graph):
        in_branches()
    for runs in several:
        runs.restart(torch.ones(runs.n, dtype=torch.bool, device=runs.device))
    return graph.replay
