"""Sequences whose tokens several processes share, each a part of them behind that of the process
before: a layer's state at the end of a part goes to the next process, which waits for no more.

    process 0    layer 0    layer 1    layer 2    ...
    process 1               layer 0    layer 1    layer 2    ...
    process 2                          layer 0    layer 1    layer 2    ...

A process that has come to its last layer may begin with another sequence.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Place:
    """Of a tensor among those that are sent."""

    number: int


class Relay:
    """Takes states from the process before this one, and gives others to the next one, each in
    the order in which it was given.

    Args:
        group: the processes, in the order of their parts.
        device: of the states.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.count = group.rank(), group.size()
        # Tensors stay until they are sent.
        self.leaving: list[tuple[Any, Tensor]] = []

    def take(self) -> Any:
        """The next state of the process before: a pytree of tensors and host numbers. None in the
        first process.
        """
        if self.rank == 0:
            return None
        (size,) = self._received([((1,), torch.int64)])
        length = int(size)  # sync: what is to be received
        (told,) = self._received([((length,), torch.uint8)])
        # Of a process of the same program.
        tree, shapes = pickle.loads(bytes(told.tolist()))  # sync: likewise
        tensors = self._received(shapes)
        return pytree.tree_map_only(Place, lambda place: tensors[place.number], tree)

    def give(self, state: Any) -> None:
        """Send a state, unless this is the last process; its tensors must not change before
        `finish`.
        """
        if self.rank == self.count - 1:
            return
        # A memory that stands twice in a state is sent once.
        places: dict[int, Place] = {}
        tensors: list[Tensor] = []

        def placed(x: Tensor) -> Place:
            if id(x) not in places:
                places[id(x)] = Place(len(tensors))
                tensors.append(x)
            return places[id(x)]

        tree = pytree.tree_map_only(Tensor, placed, state)
        shapes = [(tuple(x.shape), x.dtype) for x in tensors]
        told = torch.frombuffer(bytearray(pickle.dumps((tree, shapes))), dtype=torch.uint8)
        # Not as an object of torch.distributed, which waits for the other process to take it.
        head = torch.tensor([len(told)]), told
        for x in (*(x.to(self.device) for x in head), *tensors):
            if x.numel():
                sent = x.contiguous()
                work = distributed.isend(sent, group=self.group, group_dst=self.rank + 1)
                self.leaving.append((work, sent))

    def _received(self, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        tensors = [torch.empty(size, dtype=dtype, device=self.device) for size, dtype in shapes]
        source: dict[str, Any] = {"group": self.group, "group_src": self.rank - 1}
        coming: list[Any] = [distributed.irecv(x, **source) for x in tensors if x.numel()]
        for work in coming:
            work.wait()
        return tensors

    def finish(self) -> None:
        """Until all that was given is on its way."""
        for work, _ in self.leaving:
            work.wait()
        self.leaving.clear()


def check_parts(model: nn.Module) -> None:
    """Refuse to read a part of a sequence where that would go wrong.

    Raises:
        RuntimeError: autograd is on, whose gradients would end with the part; or the model's
            parameters are sharded, so that processes wait for one another in another order.
    """
    name = type(model).__name__
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"wanted torch.no_grad around a {name} that reads a part of a sequence, since no "
            "gradient goes from process to process; got a call that autograd records"
        )
    if any(hasattr(module, "set_reshard_after_backward") for module in model.modules()):
        raise RuntimeError(
            f"wanted a {name} with all its parameters in each process that reads a part of a "
            "sequence; got one that fully_shard has taken"
        )
