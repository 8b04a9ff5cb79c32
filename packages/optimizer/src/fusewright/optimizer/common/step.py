"""One step on one device: what decides it, and the parameters that are updated together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed

from .placement import current, laid_out_like, local, on
from .tables import same

Tensor = torch.Tensor


class Step(NamedTuple):
    """What one step on one device reads, and where it writes its results.

    Attributes:
        squares: partial sums of the squared norm of all gradients, which are still scaled; None
            where no norm is wanted.
        grad_scale, found_inf: torch.amp.GradScaler's; None without one.
        norm: gets the norm, 0-d fp32.
        skipped: gets whether the step was skipped, 0-d bool.
        skipped_count: counts skipped steps, 0-d int64.
        norm_below: of ``norm_bound``: the step is skipped unless the norm, unscaled and clipped, is
            below this.
    """

    squares: Tensor | None
    grad_scale: Tensor | None
    found_inf: Tensor | None
    norm: Tensor
    skipped: Tensor
    skipped_count: Tensor
    norm_below: float = math.inf


def norm_bound(squared: Iterable[torch.dtype]) -> float:
    """The one bound of all optimizers: below it gradients are finite, and so are their squares, and
    the sums of these, in all of the dtypes that a step stores squares in: 2^63, 2^511 for fp64
    alone; infinite where it stores none.
    """
    # A quarter of the largest number is left for what is rounded.
    return min((2.0 ** (511 if x == torch.float64 else 63) for x in squared), default=math.inf)


class Part:
    """Members, which are parameters with their state, on one device, updated by kernels or in
    plain torch.

    Attributes:
        members: in the order of the gradients.
        rules: what holds of all members.
        gradients: of a step, while it is taken.
    """

    members: Sequence[Any]

    def __init__(self, members: Sequence[Any], rules: Any, device: torch.device) -> None:
        self.members, self.rules, self.device = members, rules, device
        self.gradients: list[Tensor] = []
        # Whether gradients are laid out as their parameters without a copy.
        self.plain = False

    def gradients_of(self, gradients: list[Tensor]) -> list[Tensor]:
        """Local real memory of the gradients, laid out as the parameters'."""
        if self.plain:
            return gradients
        laid_out = [
            laid_out_like(local(g), member.p)
            for g, member in zip(gradients, self.members, strict=True)
        ]
        # A plan serves gradients of one layout.
        self.plain = same(laid_out, gradients)
        return laid_out

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Sums of squares of the gradients in fp64, as ``total_squares`` takes them: here in plain
        torch.
        """
        return [
            (getattr(member, "mesh", None), square_of(g).view(1))
            for member, g in zip(self.members, self.gradients, strict=True)
        ]


def square_of(x: Tensor) -> Tensor:
    """The sum of squares in fp64, 0-d."""
    # One copy, squared in place: a second one would take as long as all else on a CPU.
    return x.to(torch.float64, copy=True).square_().sum()


def add_over_shards_(x: Tensor, mesh: Any) -> None:
    """A sum over what a process has becomes that over all shards; ``mesh`` as ``mesh_of`` has it,
    None of plain tensors.
    """
    if mesh is not None:
        device_mesh, sharded = mesh
        for axis in sharded:
            torch.distributed.all_reduce(x, group=device_mesh.get_group(axis))


def total_squares(parts: Sequence[Any]) -> Tensor:
    """Partial sums of the squared norm of all gradients, ``[partials]`` in fp64: those of the parts
    where there is one device and no DTensor, else their sum over devices and processes.

    ``part.squares()`` gives pairs of a mesh, None for plain tensors, and partial sums.
    """
    pairs = []
    for part in parts:
        with current(part.device):
            pairs += part.squares()
    if len(parts) == 1 and not any(mesh for mesh, _ in pairs):
        return pairs[0][1] if len(pairs) == 1 else torch.cat([partials for _, partials in pairs])
    first = parts[0].device
    totals: dict[Any, Tensor] = {}
    for mesh, partials in pairs:
        total = on(first, partials.sum())
        totals[mesh] = totals[mesh] + total if mesh in totals else total
    for mesh, total in totals.items():
        add_over_shards_(total, mesh)
    return torch.stack(list(totals.values())).sum().view(1)
