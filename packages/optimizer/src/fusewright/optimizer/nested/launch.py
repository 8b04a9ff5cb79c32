"""Launches of learning rates by group: squares by group, the numbers that follow from them, and how
a loss depends on those numbers.

The parts and batches are those of AdamW's launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.launch import PREPARE, SQUARES, planned, programs_of
from ..common.placement import laid_out_like
from ..common.tables import Blocks, Uploaded, aligned, upload
from .reference import START

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor
# A weight of the controller is one tile of the one program of a group.
WIDEST = 128


def programs_by_group(blocks: Sequence[int], programs: int) -> tuple[list[int], list[int]]:
    """Divide the blocks of groups among about ``programs`` programs, each of which stays within one
    group: the programs' bounds, and the group of each.
    """
    bounds, groups, start, total = [0], [], 0, max(1, sum(blocks))
    for group, count in enumerate(blocks):
        its = min(count, max(1, programs * count // total))
        bounds += [start + count * (k + 1) // its for k in range(its)]
        groups += [group] * its
        start += count
    return bounds, groups


class BatchSquares:
    """Squares of one batch's gradients and parameters."""

    def __init__(self, batch: Any, device: torch.device, groups: int) -> None:
        self.batch, self.device = batch, device
        self.blocks = Blocks(batch.lengths, SQUARES.size, device)
        of_group = [0] * groups
        # The members of a batch are in the order of the groups.
        for member, length in zip(batch.members, batch.lengths, strict=True):
            of_group[member.group] += -(-length // SQUARES.size)
        programs = programs_of(SQUARES, self.blocks.count, device)
        bounds, self.groups = programs_by_group(of_group, programs)
        self.bounds = upload(bounds, torch.int32, device)
        key = batch.members[0].key
        self.constants = dict(G=key.gradient, P=key.parameter)
        self.state = key.state
        self.loss_gradients: Uploaded | None = None

    def __call__(self, squares: Tensor, place: int, both: bool) -> None:
        """Write the partial sums, from this place of their lines on."""
        if not self.groups:
            return
        batch, constants = self.batch, self.constants | {"ALIGNED": self.batch.aligned}
        plan = (len(self.groups), 1 + both), (squares.shape[1], place), SQUARES
        launch = planned(kernels, self.device, "group_squares_kernel", *plan, **constants)
        # The first line of a batch's table is of parameters.
        launch((batch.gradients.table, batch.table, *self.blocks.tables, self.bounds, squares))

    def dots(self, gradients: Sequence[Tensor | None], dots: Tensor, place: int) -> None:
        """Write partial sums of a loss's gradients times how the last step updated the members."""
        if not self.groups:
            return
        batch, count = self.batch, len(self.batch.members)
        if self.loss_gradients is None:
            self.loss_gradients = Uploaded(count, torch.int64, self.device, exclusive=True)
        addresses = [0 if g is None else g.data_ptr() for g in gradients]
        self.loss_gradients.hold(addresses)
        whole = batch.all_aligned and aligned(addresses)
        constants = self.constants | {"STATE": self.state, "ALIGNED": whole}
        plan = (len(self.groups),), (count, place), SQUARES
        launch = planned(kernels, self.device, "group_dots_kernel", *plan, **constants)
        tables = batch.table, self.loss_gradients.table, *self.blocks.tables
        launch((*tables, self.bounds, batch.numbers, dots))


class PartSquares:
    """Squares of all members of a part: one launch for each combination of dtypes.

    Attributes:
        groups: of each partial sum, on the host.
        bounds: the first partial sum of each batch, and the count of all.
    """

    def __init__(self, part: Any, groups: int) -> None:
        self.part = part
        self.batches = [BatchSquares(batch, part.device, groups) for batch in part.batches]
        self.groups: list[int] = []
        self.bounds = [0]
        for batch in self.batches:
            self.groups += batch.groups
            self.bounds.append(len(self.groups))
        self.squares = torch.zeros(2, len(self.groups), dtype=torch.float64, device=part.device)

    def __call__(self, both: bool) -> Tensor:
        """``[2, partials]`` in fp64: of gradients and, where ``both``, of parameters."""
        for batch, place in zip(self.batches, self.bounds, strict=False):
            batch(self.squares, place, both)
        return self.squares

    def dots(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """``[partials]`` in fp64 of gradients, in the members' order, times how AdamW's last step
        updated their parameters: p - p'.
        """
        laid_out = []
        for member, g in zip(self.part.members, gradients, strict=True):
            like = None if g is None else laid_out_like(g.detach(), member.p)
            laid_out.append(None if like is None else like.to(member.key.gradient))
        dots = torch.zeros(len(self.groups), dtype=torch.float64, device=self.part.device)
        for batch, place in zip(self.batches, self.bounds, strict=False):
            start = batch.batch.start
            batch.dots(laid_out[start : start + len(batch.batch.members)], dots, place)
        return dots


class Control:
    """The launch that gives groups their learning rates."""

    def __init__(self, network: Any, groups: int, device: torch.device) -> None:
        self.network, self.device, self.groups = network, device, groups
        self.layers = Uploaded(2 * len(network.linears), torch.int64, device)
        self.hidden_layers = len(network.linears) - 1
        self.tile = power_of_2(network.hidden)

    def __call__(
        self, squares: Tensor | None, owner: Tensor | None, tensors: Sequence[Any]
    ) -> None:
        """From squares of gradients and parameters, ``[2, partials]``, with the group of each; None
        where multipliers stay. The other tensors are in the kernel's order.
        """
        depths, base, loss, grad_scale, found_inf, *results = tensors
        # Users may have replaced the parameters' memory.
        linears = self.network.linears
        self.layers.hold([x.data_ptr() for layer in linears for x in (layer.weight, layer.bias)])
        partial_count = 0 if squares is None else squares.shape[1]
        launch = planned(
            kernels,
            self.device,
            "control_kernel",
            (self.groups,),
            (partial_count, self.network.hidden),
            PREPARE,
            UPDATES=squares is not None,
            LOG=self.network.features == "log",
            HAS_SCALE=grad_scale is not None,
            HAS_FOUND=found_inf is not None,
            LAYERS=self.hidden_layers,
            HIDDEN=self.tile,
        )
        ahead = squares, owner, depths, self.layers.table
        launch((*ahead, base, loss, grad_scale, found_inf, *results), (START,))
