"""AdamW's launches: one that prepares a step, then one for each combination of dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.launches import Launch
from .._core.lazy import lazy_module
from ..common.group_numbers import GroupNumbers
from ..common.launch import PREPARE, Block, Squares, triton_dtype
from ..common.step import Part, Step
from ..common.tables import Blocks, Uploaded, addresses_of, aligned, upload
from .members import Member, Rules, group_numbers

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor
# Source: docs/decisions/0008-adamw-launch-h200.csv.
ADAMW = Block(size=1024, num_warps=4)


class KernelPart(Part):
    """The members on one device that kernels serve: one launch for each combination of dtypes."""

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        ordered = sorted(members, key=lambda member: repr(member.key))
        super().__init__(ordered, rules, device)
        self.batches: list[Batch] = []
        shape = len(ordered), kernels.NUMBERS.value
        self.numbers = torch.empty(shape, dtype=torch.float32, device=device)
        self.groups = upload([x.group for x in ordered], torch.int32, device)
        self.signs = upload([x.sign for x in ordered], torch.float32, device)
        self.steps = upload(addresses_of(x.step for x in ordered), torch.int64, device)
        for _, batch_members in itertools.groupby(ordered, key=lambda member: member.key):
            start = sum(len(batch.members) for batch in self.batches)
            self.batches.append(Batch(list(batch_members), start, self))
        self.group_numbers = GroupNumbers(kernels.GROUP_NUMBERS.value * rules.groups, device)
        self.max_norm = Uploaded(1, torch.float64, device)
        self.prepare: dict[tuple, Launch] = {}

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Put a step's gradients, in the members' order, and the groups' numbers into tables."""
        self.gradients = gradients
        for batch in self.batches:
            batch.point(gradients[batch.start : batch.start + len(batch.members)])
        self.point_numbers(groups)

    def point_numbers(self, groups: list[dict]) -> None:
        """Put the groups' numbers into the tables."""
        self.group_numbers.point(group_numbers(groups, self.device))
        self.max_norm.hold([self.rules.max_grad_norm or 0.0])

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Partial sums of the gradients' squares in fp64, as ``total_squares`` takes them."""
        return [(batch.members[0].mesh, batch.squares()) for batch in self.batches]

    def move(self, step: Step) -> None:
        """Take the step, unless it is skipped."""
        rules = self.rules
        partials = step.squares
        partial_count = 0 if partials is None else len(partials)
        key = (partial_count, step.grad_scale is None, step.found_inf is None)
        if key not in self.prepare:
            self.prepare[key] = Launch(
                kernels.prepare_kernel,
                (1,),
                self.device,
                (partial_count, len(self.members)),
                dict(num_warps=PREPARE.num_warps),
                HAS_NORM=partials is not None,
                CLIPS=rules.max_grad_norm is not None,
                HAS_SCALE=step.grad_scale is not None,
                HAS_FOUND=step.found_inf is not None,
                DECOUPLED=rules.decoupled,
                SIZE=PREPARE.size,
            )
        self.prepare[key](
            (
                *(partials, self.max_norm.table, step.grad_scale, step.found_inf),
                *(self.group_numbers.addresses, self.group_numbers.wide, self.groups, self.signs),
                *(self.steps, step.norm, step.skipped, step.skipped_count, self.numbers),
            )
        )
        for batch in self.batches:
            batch.move(step.skipped)


class Batch:
    """Members that one launch serves; ``start`` is where the part has the first of them."""

    def __init__(self, members: list[Member], start: int, part: KernelPart) -> None:
        self.members, self.start, self.part = members, start, part
        self.lengths = [member.p.numel() for member in members]
        self.blocks = Blocks(self.lengths, ADAMW.size, part.device)
        columns = zip(*((member.p, *member.buffers) for member in members), strict=True)
        lines = [[0 if x is None else x.data_ptr() for x in column] for column in columns]
        addresses = list(itertools.chain.from_iterable(lines))
        self.all_aligned = aligned(addresses)
        self.table = upload(addresses, torch.int64, part.device)
        self.gradients = Uploaded(len(members), torch.int64, part.device, exclusive=True)
        self.aligned = False
        self.launches: dict[bool, Launch] = {}
        self.squares_launch: Squares | None = None
        after = start + len(members)
        self.numbers = part.numbers[start:after]
        # Not a slice of the part's, which may begin at an address that is not aligned.
        self.steps = upload(addresses_of(x.step for x in members), torch.int64, part.device)

    def point(self, gradients: list[Tensor]) -> None:
        addresses = addresses_of(gradients)
        if self.gradients.hold(addresses):
            self.aligned = self.all_aligned and aligned(addresses)

    def squares(self) -> Tensor:
        if self.squares_launch is None:
            gradient = self.members[0].key.gradient
            self.squares_launch = Squares(self.lengths, gradient, self.part.device)
        return self.squares_launch(self.gradients.table, self.aligned)

    def move(self, skipped: Tensor) -> None:
        if not self.blocks.count:
            return
        if self.aligned not in self.launches:
            key, rules = self.members[0].key, self.part.rules
            self.launches[self.aligned] = Launch(
                kernels.adamw_kernel,
                (self.blocks.count,),
                self.part.device,
                (len(self.members), rules.seed),
                dict(num_warps=ADAMW.num_warps),
                P=triton_dtype(key.parameter),
                G=triton_dtype(key.gradient),
                STATE=triton_dtype(key.state),
                AMSGRAD=key.amsgrad,
                DECOUPLED=rules.decoupled,
                STOCHASTIC=rules.rounding == "stochastic",
                REMAINDER=key.remainder,
                ALIGNED=self.aligned,
                SIZE=ADAMW.size,
            )
        blocks = self.blocks
        self.launches[self.aligned](
            (
                *(self.table, self.gradients.table, blocks.lengths, blocks.first, blocks.owner),
                *(self.numbers, skipped, self.steps),
            )
        )
