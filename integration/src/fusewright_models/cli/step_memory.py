"""The memory that a step takes, found out where nothing is allocated: on the device "meta".

    weights + moments + max(gradients, most that a pass holds)

Weights, gradients and the optimizer's moments are those of the model and of one step, to the byte.
What a pass holds is what is alive at one time within a forward and a backward pass, gradients among
it: of plain torch, which runs on a CPU. Kernels keep less: for a GPU it is a formula,

    rows * columns * (bytes of the model + layers * bytes of a layer)

whose bytes are fitted to the peaks of integration/results, all of which it meets within a quarter.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..training.optimizer_traits import take_step
from .run import Run

# Bytes that a step keeps on a GPU of each token in bf16, for each column of the model and for each
# column of each layer.
ON_GPU = {
    "transformer-np": (0, 33),
    "titan-mac": (0, 125),
    "exact": (287, 0),
    "stored": (220, 17),
    "plain": (189, 85),
}
# Bytes a column of each layer that is recomputed, of which only the input is saved.
OF_INPUT = 8


class BatchSize(NamedTuple):
    """Of a run's batch and model.

    Attributes:
        rows: tokens of the batch.
        unit: what it is counted in, "token" or "task".
        units: how many of these it has.
        layer_columns: layers of the model, and its columns.
    """

    rows: int
    unit: str
    units: int
    layer_columns: tuple[int, int]


class LiveMemory(TorchDispatchMode):
    """Counts what operations allocate, as long as it is there.

    Attributes:
        now: bytes of all that has been allocated since it was entered and is there.
        most: the most that they have been.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for storage in storages_of([args, kwargs]):
            # What was there before, of which a result may be a view.
            self._know(storage, 0)
        found = func(*args, **(kwargs or {}))
        for storage in storages_of(found):
            self._know(storage, storage.nbytes())
        return found

    def _know(self, storage: torch.UntypedStorage, size: int) -> None:
        # As long as it is there, no other one has its number.
        number = storage._cdata
        if number not in self.known:
            self.known[number] = size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, number)

    def _forget(self, number: int) -> None:
        self.now -= self.known.pop(number)


class States(NamedTuple):
    """What is there between two steps, in bytes.

    Attributes:
        weights: parameters as they are stored, and buffers.
        gradients: of all parameters.
        moments: what the optimizer keeps.
    """

    weights: int
    gradients: int
    moments: int


def states_of(model: nn.Module, optimizer: Optimizer) -> States:
    """Of a model and an optimizer that has taken a step of it, which is taken here.

    Args:
        model: on the device "meta".
        optimizer: over its parameters.
    """
    for group in optimizer.param_groups:
        # torch's fused step knows no such device, and keeps the same.
        if group.get("fused"):
            group["fused"] = False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = torch.empty_like(p)
    gradients = bytes_of([p.grad for p in parameters])
    take_step(optimizer, parameters[0].new_zeros(()), parameters, 1.0)
    optimizer.zero_grad(set_to_none=True)
    moments = bytes_of(optimizer.state_dict())
    return States(bytes_of([*model.parameters(), *model.buffers()]), gradients, moments)


def bytes_of(tensors: Any) -> int:
    """Of all tensors in it, what they have in common once."""
    return sum({each._cdata: each.nbytes() for each in storages_of(tensors)}.values())


def storages_of(tensors: Any) -> list[torch.UntypedStorage]:
    """Of the tensors in it."""
    return [x.untyped_storage() for x in pytree.tree_leaves(tensors) if isinstance(x, Tensor)]


def kept_on_gpu(run: Run, size: BatchSize) -> float:
    """Bytes that a step keeps beside states, by the formula above."""
    layers, columns = size.layer_columns
    of_model, of_layer = ON_GPU[getattr(run, "mode", run.model_name)]
    of_layers = layers * of_layer
    if run.checkpointing == "block" and of_layer:
        of_layers = of_layer + layers * OF_INPUT
    wide = 1 if run.precision == "bf16" else 2
    return wide * size.rows * columns * (of_model + of_layers)
