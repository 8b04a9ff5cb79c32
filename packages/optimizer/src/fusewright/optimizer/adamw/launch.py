"""AdamW's launches: one that prepares a step, then one for each combination of dtypes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.lazy import lazy_module
from ..common import launch
from ..common.launch import Block, Squares
from ..common.step import Step
from ..common.tables import Blocks, Uploaded, addresses_of, aligned, upload
from .members import Member, Rules, group_numbers

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor
# Source: docs/decisions/0008-adamw-launch-h200.csv.
ADAMW = Block(size=1024, num_warps=4)


class KernelPart(launch.KernelPart):
    """The members on one device that kernels serve: one launch for each combination of dtypes."""

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        ordered = sorted(members, key=lambda member: repr(member.key))
        columns = kernels.NUMBERS.value
        super().__init__(ordered, rules, device, kernels, "prepare_kernel", columns)
        self.batches: list[Batch] = []
        for _, batch_members in itertools.groupby(ordered, key=lambda member: member.key):
            start = sum(len(batch.members) for batch in self.batches)
            self.batches.append(Batch(list(batch_members), start, self))

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Put a step's gradients, in the members' order, and the groups' numbers into tables."""
        self.gradients = gradients
        for batch in self.batches:
            batch.point(gradients[batch.start : batch.start + len(batch.members)])
        self.point_numbers(groups)

    def point_numbers(self, groups: list[dict]) -> None:
        """Put the groups' numbers into the tables."""
        self.group_numbers.point(group_numbers(groups, self.device))

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Partial sums of the gradients' squares in fp64, as ``total_squares`` takes them."""
        return [(batch.members[0].mesh, batch.squares()) for batch in self.batches]

    def move(self, step: Step) -> None:
        """Take the step, unless it is skipped."""
        self.prepare(step, DECOUPLED=self.rules.decoupled)
        for batch in self.batches:
            batch.move(step.skipped)


class Batch:
    """Members that one launch serves; ``start`` is where the part has the first of them."""

    def __init__(self, members: list[Member], start: int, part: KernelPart) -> None:
        self.members, self.start, self.device = members, start, part.device
        self.planned = part.planned
        self.lengths = [member.p.numel() for member in members]
        self.blocks = Blocks(self.lengths, ADAMW.size, part.device)
        columns = zip(*((member.p, *member.buffers) for member in members), strict=True)
        lines = [[0 if x is None else x.data_ptr() for x in column] for column in columns]
        addresses = list(itertools.chain.from_iterable(lines))
        self.all_aligned = aligned(addresses)
        self.table = upload(addresses, torch.int64, part.device)
        self.gradients = Uploaded(len(members), torch.int64, part.device, exclusive=True)
        self.aligned = False
        key, rules = members[0].key, part.rules
        self.integers = len(members), rules.seed
        self.constants = dict(
            PARAMETER=key.parameter,
            GRADIENT=key.gradient,
            STATE=key.state,
            AMSGRAD=key.amsgrad,
            REMAINDER=key.remainder,
            DECOUPLED=rules.decoupled,
            STOCHASTIC=rules.rounding == "stochastic",
        )
        self.numbers = part.table[start : start + len(members)]
        # Not a slice of the part's, which may begin at an address that is not aligned.
        self.steps = upload(addresses_of(x.step for x in members), torch.int64, part.device)

    def point(self, gradients: list[Tensor]) -> None:
        addresses = addresses_of(gradients)
        if self.gradients.hold(addresses):
            self.aligned = self.all_aligned and aligned(addresses)

    @functools.cached_property
    def sum_squares(self) -> Squares:
        return Squares(self.lengths, self.members[0].gradient, self.device)

    def squares(self) -> Tensor:
        return self.sum_squares(self.gradients.table, self.aligned)

    def move(self, skipped: Tensor) -> None:
        if not self.blocks.count:
            return
        shape = (self.blocks.count,), self.integers
        constants = self.constants
        launch = self.planned("adamw_kernel", *shape, ADAMW, ALIGNED=self.aligned, **constants)
        tables = self.table, self.gradients.table, *self.blocks.tables
        launch((*tables, self.numbers, skipped, self.steps))
