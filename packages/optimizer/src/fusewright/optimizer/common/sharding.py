"""Parameters of which each process has some rows, and what the processes add up."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed

from .._core.launches import cdiv
from .placement import is_distributed, local, mesh_of
from .step import add_over_shards_

Tensor = torch.Tensor
Result = TypeVar("Result")
Mesh = tuple[Any, int]
# It yields sums over this process's rows, and is sent those over all rows.
Summing = Generator[list[Tensor], list[Tensor], Result]


def mesh_of_rows(p: Tensor) -> Mesh | None:
    """The mesh, and its axis, whose processes have some rows each; None where each has all."""
    mesh = mesh_of(p)
    if mesh is None or not mesh[1]:
        return None
    device_mesh, (axis, *_) = mesh
    return device_mesh, axis


def check_rows(p: Tensor) -> None:
    """Raise where the parts of a DTensor are no rows, as FSDP2 cuts them."""
    if not is_distributed(p):
        return
    from torch.distributed.tensor import Shard

    placements = p.placements  # type: ignore[attr-defined]
    cut = [how for how in placements if not how.is_replicate()]
    # Its subclasses cut what is cut already.
    if len(cut) > 1 or any(type(how) is not Shard or how.dim for how in cut):
        raise TypeError(
            "a parameter must be whole or sharded by rows over one axis of its mesh, got a DTensor "
            f"placed by {', '.join(map(str, placements))}"
        )
    mesh = mesh_of_rows(p)
    if mesh is not None:
        device_mesh, axis = mesh
        wanted = parts_of_rows(len(p), device_mesh.size(axis))[device_mesh.get_local_rank(axis)]
        if len(local(p)) != wanted:
            raise ValueError(
                f"of a DTensor's {len(p)} rows this process must have {wanted}, as torch.chunk "
                f"cuts them, got {len(local(p))}"
            )


def parts_of_rows(rows: int, processes: int) -> list[int]:
    """How many each process has, as torch.chunk cuts them: the last ones may have none."""
    each = cdiv(rows, processes)
    return [min(each, max(0, rows - rank * each)) for rank in range(processes)]


def mesh_of_all(params: Iterable[Tensor]) -> Any:
    """The mesh of the first DTensor; None where there is none."""
    return next((mesh[0] for mesh in map(mesh_of, params) if mesh is not None), None)


def mean_of(x: Tensor, mesh: Any) -> Tensor:
    """The mean of x over all processes of a mesh, x itself without one."""
    if mesh is None:
        return x
    total = x.clone()
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(total, group=mesh.get_group(axis))
    return total / mesh.size()


def summed_together(moves: Iterable[tuple[Any, Summing[Result]]]) -> list[Result]:
    """Run them all, each with its mesh as ``mesh_of`` has it, in one order in all processes, and
    add up together what they yield at a time. One that yields nothing has ended before the next
    begins.

    Returns:
        What each returns.
    """
    results: dict[int, Result] = {}
    # None begins a generator.
    going: list[tuple[int, Any, Summing[Result], Any]]
    going = [(place, mesh, move, None) for place, (mesh, move) in enumerate(moves)]
    while going:
        asked: list[tuple[int, Any, Summing[Result], Any]] = []
        for place, mesh, move, sums in going:
            try:
                asked.append((place, mesh, move, move.send(sums)))
            except StopIteration as end:
                results[place] = end.value
        add_together_([(mesh, x) for _, mesh, _, sums in asked for x in sums])
        going = asked
    return [results[place] for place in range(len(results))]


def add_together_(pairs: Sequence[tuple[Any, Tensor]]) -> None:
    """Sums over a process's rows become those over all rows, by one all-reduce for each mesh and
    dtype.
    """
    alike: dict[Any, list[Tensor]] = {}
    for mesh, x in pairs:
        alike.setdefault((mesh, x.dtype), []).append(x)
    for (mesh, _), sums in alike.items():
        total = torch.cat([x.reshape(-1) for x in sums])
        add_over_shards_(total, mesh)
        parts = total.split([x.numel() for x in sums])
        for x, part in zip(sums, parts, strict=True):
            x.copy_(part.view(x.shape))
