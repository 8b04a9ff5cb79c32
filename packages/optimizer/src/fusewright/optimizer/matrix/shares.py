"""Matrices of which each process has some rows, while a step needs them whole.

Each process gets all rows of its share of the matrices, multiplies these, and sends every process
the rows that are its own: two exchanges in the place of a gathering by all. What waits for others
is a generator, and yields where it does, so that one stack's products run while another's rows are
on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import torch
import torch.distributed

from .._core.precision import without_autocast
from ..common.placement import current
from ..common.sharding import Mesh, mesh_of_rows, parts_of_rows

Tensor = torch.Tensor


class Shares:
    """How the processes of a mesh's axis share a stack of matrices.

    Args:
        mesh: the mesh, and its axis.
        rows: of each matrix.
        own: how many matrices each process multiplies, of the first ones the first.

    Attributes:
        rows: of each matrix, by the process that has them.
        own: as given.
    """

    def __init__(self, mesh: Mesh, rows: int, own: Sequence[int]) -> None:
        device_mesh, axis = mesh
        self.group = device_mesh.get_group(axis)
        self.rank = device_mesh.get_local_rank(axis)
        self.rows, self.own = parts_of_rows(rows, len(own)), own

    def sum_(self, x: Tensor) -> Iterator[None]:
        """It becomes its sum over processes."""
        work = torch.distributed.all_reduce(x, group=self.group, async_op=True)
        yield
        work.wait()

    def applied(
        self, function: Callable[[Tensor], Tensor], x: Tensor
    ) -> Generator[None, None, Tensor]:
        """A function of each whole matrix, whose result is one as large: of the rows that are here,
        ``[matrices, rows, columns]``, the same rows of the results.
        """
        here, mine = self.rows[self.rank], self.own[self.rank]
        columns = x.shape[-1]
        sent = [count * here * columns for count in self.own]
        received = [mine * rows * columns for rows in self.rows]
        gathered = yield from self._exchanged(x.contiguous(), sent, received)
        parts = gathered.split(received)
        whole = [part.view(mine, -1, columns) for part in parts if part.numel()]
        y = x.new_empty(0)
        if whole:
            y = function(torch.cat(whole, 1))
            y = torch.cat([part.reshape(-1) for part in y.split(self.rows, 1)])
        scattered = yield from self._exchanged(y, received, sent)
        return scattered.view(x.shape)

    def _exchanged(
        self, x: Tensor, sent: list[int], received: list[int]
    ) -> Generator[None, None, Tensor]:
        """From and to each process so many elements."""
        y = x.new_empty(sum(received))
        work = torch.distributed.all_to_all_single(
            y, x.view(-1), received, sent, group=self.group, async_op=True
        )
        yield
        work.wait()
        return y


def overlapped(moves: Iterable[tuple[torch.device, Iterator[None]]]) -> None:
    """Run them all, each on its device. Where one waits the next begins, and then those before it
    go on, up to where they wait again: all processes in one order.
    """
    begun: list[tuple[torch.device, Iterator[None]]] = []
    for move in moves:
        begun = [each for each in (move, *begun) if goes_on(*each)]
    while begun:
        begun = [each for each in begun if goes_on(*each)]


def goes_on(device: torch.device, move: Iterator[None]) -> bool:
    """Whether it has come to where it waits, not to its end."""
    with current(device), without_autocast(device):
        return next(move, True) is None


def process_count(p: Tensor) -> int:
    """How many processes have a parameter's rows together."""
    mesh = mesh_of_rows(p)
    return 1 if mesh is None else mesh[0].size(mesh[1])


def shared_out(stacks: Sequence[tuple[Mesh, int, torch.Size]]) -> list[list[int]]:
    """Of stacks, by mesh, number of matrices and shape, how many matrices each process multiplies:
    each as many, and one more those that have least to do.
    """
    costs = [elements_and_shorter_side(shape) for _, _, shape in stacks]
    loads: dict[Mesh, list[float]] = {}
    shares: list[list[int]] = [[] for _ in stacks]
    for place in sorted(range(len(stacks)), key=lambda place: -costs[place]):
        mesh, count, _ = stacks[place]
        processes = mesh[0].size(mesh[1])
        load = loads.setdefault(mesh, [0.0] * processes)
        each, left = divmod(count, processes)
        more = sorted(range(processes), key=load.__getitem__)[:left]
        own = shares[place] = [each + (rank in more) for rank in range(processes)]
        for rank, matrices in enumerate(own):
            load[rank] += matrices * costs[place]
    return shares


def elements_and_shorter_side(shape: torch.Size) -> float:
    """What a matrix's products take, up to a factor."""
    rows, columns = shape[0], math.prod(shape[1:])
    return float(rows * columns * min(rows, columns))
