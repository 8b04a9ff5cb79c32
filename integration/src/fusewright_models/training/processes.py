"""Processes that train one model together: those of torchrun, by torch.distributed alone.

Each draws the batch that one process would draw and takes its rows of it: losses, gradients and
steps are those of one process up to rounding, however many there are. All of them evaluate, and one
alone writes.

ddp    each has the whole model; gradients are averaged, in the backward pass of eager steps
       (DistributedDataParallel) and between the graphs of captured ones
fsdp   each has a part of every parameter, of its gradient and of its moments (fully_shard)
hsdp   the same among the processes of a host; each host has the whole
context  each has the whole model, and of every task of a batch, rather than of the batch, its part
         of the rows: a model that knows how gathers what it attends to; gradients as by ddp
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..choices import Parallel
from ..devices import check_device_name, checked_device
from .source import Batch

# What torchrun tells each process.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# What is asked of a model beside its call: parameters are gathered for these as well.
METHODS = ("logits", "next_token_loss", "read")
# The others wait for the first one while it writes a checkpoint to a slow disk.
PATIENCE = timedelta(hours=2)
# Newer torch warns of the older name.
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

T = TypeVar("T")


def launched() -> bool:
    """Whether torchrun, or what sets its variables, has started this process."""
    return all(name in os.environ for name in VARIABLES)


def process_count() -> int:
    """How many are started together."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def is_first_of_host() -> bool:
    """Whether this process is the one of several on its host that tells what is true of all."""
    return not launched() or os.environ["LOCAL_RANK"] == "0"


def check_device_of_all(device: str) -> None:
    """
    Raises:
        ValueError: it is no device that processes can take each one of, or that torch sees.
    """
    if launched() and device.startswith("cuda:"):
        raise ValueError(
            f"wanted --device cuda, of which each process takes the one of its number; got {device}"
        )
    check_device_name(device)


class Processes:
    """One of those that train together; of one alone everything is as it is.

    Args:
        parallel: how the others take part; None where there is one.
        device: that this one trains on.

    Attributes:
        rank: of this one, from 0.
        count: of all.
    """

    def __init__(
        self, parallel: Parallel | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.parallel, self.device = parallel, torch.device(device)
        self.rank, self.count = 0, 1
        if parallel is not None:
            self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    @property
    def shards(self) -> bool:
        """Whether parameters are in parts."""
        return self.parallel in ("fsdp", "hsdp")

    @property
    def shares_rows(self) -> bool:
        """Whether each has a part of the rows of every task, rather than tasks of its own."""
        return self.parallel == "context"

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.parallel is not None

    @property
    def is_main(self) -> bool:
        """Whether this one writes and prints."""
        return self.rank == 0

    def rows(self, batch: Any, size: int) -> Batch:
        """Those of a batch of ``size`` that this one trains on."""
        if self.parallel is None:
            return batch
        if self.shares_rows:
            return batch.part_of_rows(self.rank, distributed.group.WORLD)
        each = size // self.count
        return batch.part(self.rank * each, (self.rank + 1) * each)

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module] = ()) -> None:
        """Leave this one its part of the parameters, if it has one: before an optimizer takes
        them.

        Args:
            model: whole, the same in all processes.
            blocks: whose parameters are gathered one block after another; all others are gathered
                together.

        Raises:
            ValueError: hosts have different numbers of processes, under hsdp.
        """
        if not self.shards:
            return
        # Imported here: a torch without it trains in one process.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        shape: tuple[int, ...] = (self.count,)
        names: tuple[str, ...] = ("shards",)
        if self.parallel == "hsdp":
            of_host = int(os.environ["LOCAL_WORLD_SIZE"])
            if self.count % of_host:
                raise ValueError(
                    f"wanted as many processes on each host; got {of_host} of {self.count} on this"
                )
            shape, names = (self.count // of_host, of_host), ("hosts", "shards")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        for each in (*blocks, model):
            fully_shard(each, mesh=mesh)
        for name in METHODS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """What is called in the place of the model."""
        if self.shards or not self.several:
            return model
        # Buffers are averaged instead.
        options: dict[str, Any] = {SYNC_BUFFERS: False}
        return DistributedDataParallel(model, **options)

    def adding(self, model: Any, *, last: bool) -> AbstractContextManager[Any]:
        """Around a batch's forward and backward pass by what ``wrapped`` returned: gradients are
        added up over processes in the ``last`` of a step alone.
        """
        if self.shards:
            model.set_requires_gradient_sync(last)
        alone = self.shards or not self.several or last
        return nullcontext() if alone else model.no_sync()

    @torch.no_grad()
    def average_(self, *tensors: Tensor) -> None:
        """Each becomes its mean over processes."""
        if self.parallel is None or not tensors:
            return
        if len(tensors) == 1 and tensors[0].is_contiguous():
            self._average_(tensors[0])
            return
        flat = torch.cat([x.reshape(-1) for x in tensors])
        self._average_(flat)
        for x, mean in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(mean.view_as(x))

    def _average_(self, x: Tensor) -> None:
        # Gloo has no means.
        if distributed.get_backend() == "nccl":
            distributed.all_reduce(x, distributed.ReduceOp.AVG)
        else:
            distributed.all_reduce(x)
            x.div_(self.count)

    @torch.no_grad()
    def same_(self, model: nn.Module) -> None:
        """Parameters and buffers become those of the first process."""
        if self.parallel is not None:
            for x in (*model.parameters(), *model.buffers()):
                sent = x.contiguous()
                distributed.broadcast(sent, src=0)
                if sent is not x:
                    x.copy_(sent)

    def add_(self, x: Tensor) -> Tensor:
        """It becomes its sum over processes, and is returned."""
        if self.parallel is not None:
            distributed.all_reduce(x)
        return x

    def whole(self, state: T) -> T:
        """A state dict with whole tensors for shards: the first process has them on the host, the
        others have empty ones.
        """
        if not self.shards:
            return state

        def gathered(x: Any) -> Any:
            if not isinstance(x, Tensor) or not hasattr(x, "full_tensor"):
                return x
            # All take part in it.
            full = x.full_tensor()
            return full.cpu() if self.is_main else full.new_empty(0)

        return pytree.tree_map(gathered, state)

    def load_model(self, model: nn.Module, state: dict[str, Any]) -> None:
        """``model.load_state_dict`` of a state of whole tensors."""
        if self.shards:
            own = model.state_dict()
            state = {name: placed(x, own.get(name)) for name, x in state.items()}
        model.load_state_dict(state)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Likewise of an optimizer."""
        if self.shards:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            of_each = dict(enumerate(parameters))
            moments = {
                place: {name: placed_state(x, of_each.get(place)) for name, x in some.items()}
                for place, some in state["state"].items()
            }
            state = state | {"state": moments}
        optimizer.load_state_dict(state)

    def agreed(self, value: T) -> T:
        """The value of the first process."""
        held = [value]
        if self.parallel is not None:
            distributed.broadcast_object_list(held, src=0, device=self.device)
        return held[0]

    def told(self, value: T) -> list[T]:
        """The values of all processes."""
        if self.parallel is None:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def first(self, act: Callable[[], object]) -> None:
        """Have the first process do something that all wait for. Where it fails all do, by its
        words.
        """
        error: Exception | None = None
        if self.is_main:
            try:
                act()
            except (ValueError, OSError, RuntimeError) as failed:
                error = failed
        told = self.agreed(None if error is None else str(error))
        if error is not None:
            raise error
        if told is not None:
            raise RuntimeError(told)

    def greatest(self, value: int) -> int:
        """The greatest value of all processes."""
        if self.parallel is None:
            return value
        held = torch.tensor(value, device=self.device)
        distributed.all_reduce(held, distributed.ReduceOp.MAX)
        return int(held)  # sync: where processes wait for one another

    def wait(self) -> None:
        """Until all have come here."""
        if self.parallel is not None:
            distributed.barrier()


ALONE = Processes()


def join(parallel: Parallel | None, device: str) -> Processes:
    """This process among those that torchrun has started, by ``ddp`` where nothing else is asked
    for; `ALONE` without torchrun.

    Args:
        parallel: how they train together.
        device: "cuda", of which each takes the one of its number on the host, or "cpu".

    Raises:
        ValueError: the device has a number, or is none that torch can use here.
        RuntimeError: the others do not come.
    """
    if not launched():
        return ALONE
    check_device_of_all(device)
    if device == "cuda":
        where = checked_device(f"cuda:{os.environ['LOCAL_RANK']}")
        # What "cuda" means from here on.
        torch.cuda.set_device(where)
        distributed.init_process_group("nccl", device_id=where, timeout=PATIENCE)
    else:
        where = checked_device(device)
        distributed.init_process_group("gloo", timeout=PATIENCE)
    return Processes(parallel or "ddp", where)


@contextmanager
def leaving() -> Iterator[None]:
    """Around a program, which leaves the processes that it has joined.

    Not where it fails: others may be waiting for this one, which an orderly end would wait for in
    turn. Torchrun ends them all as soon as one has failed.
    """
    yield
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """What is saved of a model beside its parameters."""
    saved = model.state_dict().keys()
    return [x for name, x in model.named_buffers() if name in saved]


def running_averages(model: nn.Module) -> list[Tensor]:
    """Those of them that follow the rows of a batch, and are averaged over processes."""
    return [x for x in saved_buffers(model) if x.is_floating_point()]


def local(x: Tensor) -> Tensor:
    """The shard of this process; a whole tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def placed_state(x: Any, p: Any) -> Any:
    """A whole piece of an optimizer's state, placed as its parameter where it has an element for
    each of its; the optimizer places the others.
    """
    return placed(x, p) if isinstance(x, Tensor) and x.shape == getattr(p, "shape", None) else x


def placed(x: Any, like: Any) -> Any:
    """A whole tensor's shard, cut as a tensor of as many axes is; all else as it is."""
    if not (isinstance(x, Tensor) and hasattr(like, "placements") and x.ndim == like.ndim):
        return x
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole of it: none has to send.
    return distribute_tensor(
        x.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
