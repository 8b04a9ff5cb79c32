"""Squares by parameter group and what follows from them, on a card: plans launches, and
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ._adamw_launch import Batch, KernelPart
from ._configs import PREPARE, SQUARES
from ._group_norm_kernels import _control_kernel, _group_dots_kernel, _group_squares_kernel
from ._launch import Launch
from ._members import laid_out_like
from ._norm_launch import programs_of, triton_dtype
from ._tables import Blocks, Uploaded, aligned, upload
from .nested_controller import START, NestedController

Tensor = torch.Tensor
# A weight of the controller is one tile of the one program of a group.
WIDEST = 128


def shared_out(blocks: Sequence[int], programs: int) -> tuple[list[int], list[int]]:
    """Blocks of groups over about so many programs, each of which stays within one group: bounds
    of the programs, and the group of each.
    """
    bounds, groups, start, total = [0], [], 0, max(1, sum(blocks))
    for group, count in enumerate(blocks):
        mine = min(count, max(1, programs * count // total))
        bounds += [start + count * (k + 1) // mine for k in range(mine)]
        groups += [group] * mine
        start += count
    return bounds, groups


class BatchSquares:
    """Squares of one batch's gradients and parameters."""

    def __init__(self, batch: Batch, device: torch.device, groups: int) -> None:
        self.batch, self.device = batch, device
        self.blocks = Blocks(batch.lengths, SQUARES.size, device)
        of_group = [0] * groups
        # A batch has its members in the order of the groups.
        for member, length in zip(batch.members, batch.lengths, strict=True):
            of_group[member.group] += -(-length // SQUARES.size)
        programs = programs_of(SQUARES, self.blocks.count, device)
        bounds, self.groups = shared_out(of_group, programs)
        self.bounds = upload(bounds, torch.int32, device)
        self.launches: dict[tuple, Launch] = {}
        self.dot_launches: dict[tuple, Launch] = {}
        self.given: Uploaded | None = None

    def __call__(self, squares: Tensor, place: int, both: bool) -> None:
        """Write the shares, from this place of their lines on."""
        if not self.groups:
            return
        batch, blocks = self.batch, self.blocks
        key = place, both, batch.aligned
        if key not in self.launches:
            kind = batch.members[0].kind
            self.launches[key] = Launch(
                _group_squares_kernel,
                (len(self.groups), 1 + both),
                self.device,
                (squares.shape[1], place),
                dict(num_warps=SQUARES.num_warps),
                G=triton_dtype(kind.gradient),
                P=triton_dtype(kind.parameter),
                ALIGNED=batch.aligned,
                SIZE=SQUARES.size,
            )
        # The first line of a batch's table is of parameters.
        tables = batch.gradients.table, batch.table, blocks.lengths, blocks.first, blocks.owner
        self.launches[key]((*tables, self.bounds, squares))

    def dots(self, given: Sequence[Tensor | None], dots: Tensor, place: int) -> None:
        """Write shares of these gradients times how the last step moved the members."""
        if not self.groups:
            return
        batch, blocks = self.batch, self.blocks
        kind, count = batch.members[0].kind, len(batch.members)
        if self.given is None:
            self.given = Uploaded(count, torch.int64, self.device, apart=True)
        addresses = [0 if g is None else g.data_ptr() for g in given]
        self.given.hold(addresses)
        key = place, batch.all_aligned and aligned(addresses)
        if key not in self.dot_launches:
            self.dot_launches[key] = Launch(
                _group_dots_kernel,
                (len(self.groups),),
                self.device,
                (count, place),
                dict(num_warps=SQUARES.num_warps),
                G=triton_dtype(kind.gradient),
                P=triton_dtype(kind.parameter),
                STATE=triton_dtype(kind.state),
                ALIGNED=key[1],
                SIZE=SQUARES.size,
            )
        tables = batch.table, self.given.table, blocks.lengths, blocks.first, blocks.owner
        self.dot_launches[key]((*tables, self.bounds, batch.numbers, dots))


class PartSquares:
    """Squares of all members of a part: one launch for each combination of dtypes.

    Attributes:
        groups: of each share, on the host.
        bounds: the first share of each batch, and their count.
    """

    def __init__(self, part: KernelPart, groups: int) -> None:
        self.part = part
        self.batches = [BatchSquares(batch, part.device, groups) for batch in part.batches]
        self.groups: list[int] = []
        self.bounds = [0]
        for batch in self.batches:
            self.groups += batch.groups
            self.bounds.append(len(self.groups))
        self.squares = torch.zeros(2, len(self.groups), dtype=torch.float64, device=part.device)

    def __call__(self, both: bool) -> Tensor:
        """``[2, shares]`` in fp64: of gradients and, where both are asked for, of parameters."""
        for batch, place in zip(self.batches, self.bounds, strict=False):
            batch(self.squares, place, both)
        return self.squares

    def dots(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """``[shares]`` in fp64 of gradients, in the members' order, times how AdamW's last step
        moved their parameters: p - p'.
        """
        given = []
        for member, g in zip(self.part.members, gradients, strict=True):
            like = None if g is None else laid_out_like(g.detach(), member.p)
            given.append(None if like is None else like.to(member.kind.gradient))
        dots = torch.zeros(len(self.groups), dtype=torch.float64, device=self.part.device)
        for batch, place in zip(self.batches, self.bounds, strict=False):
            start = batch.batch.start
            batch.dots(given[start : start + len(batch.batch.members)], dots, place)
        return dots


class Control:
    """The launch that gives groups their learning rates."""

    def __init__(self, network: NestedController, groups: int, device: torch.device) -> None:
        self.network, self.device, self.groups = network, device, groups
        self.layers = Uploaded(2 * len(network.linears), torch.int64, device)
        self.hidden_layers = len(network.linears) - 1
        self.launches: dict[tuple, Launch] = {}

    def __call__(
        self, squares: Tensor | None, owner: Tensor | None, tensors: Sequence[Any]
    ) -> None:
        """Of squares of gradients and parameters, ``[2, shares]``, with the group of each share;
        None where multipliers stay. The other tensors in the kernel's order.
        """
        depths, base, loss, grad_scale, found_inf, *results = tensors
        # Others may have put other memory in the parameters' place.
        linears = self.network.linears
        self.layers.hold([x.data_ptr() for layer in linears for x in (layer.weight, layer.bias)])
        shares = 0 if squares is None else squares.shape[1]
        key = shares, squares is None, grad_scale is None, found_inf is None
        if key not in self.launches:
            hidden = self.network.hidden
            self.launches[key] = Launch(
                _control_kernel,
                (self.groups,),
                self.device,
                (shares, hidden),
                dict(num_warps=PREPARE.num_warps),
                UPDATES=squares is not None,
                LOG=self.network.features == "log",
                HAS_SCALE=grad_scale is not None,
                HAS_FOUND=found_inf is not None,
                LAYERS=self.hidden_layers,
                HIDDEN=triton.next_power_of_2(hidden),
                SIZE=PREPARE.size,
            )
        ahead = squares, owner, depths, self.layers.table
        self.launches[key]((*ahead, base, loss, grad_scale, found_inf, *results), (START,))
