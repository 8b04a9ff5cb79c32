"""AdamW on a card: plans the launches of one optimizer's parameters there, and launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ._adamw_kernels import GROUP_NUMBERS, NUMBERS, _adamw_kernel, _prepare_kernel
from ._configs import ADAMW, PREPARE
from ._group_numbers import GroupNumbers
from ._launch import Launch
from ._members import Member, Part, Rules, Step, group_numbers
from ._norm_launch import Squares, triton_dtype
from ._tables import Blocks, Uploaded, addresses_of, aligned, upload

Tensor = torch.Tensor


class KernelPart(Part):
    """The members on one device that kernels serve: one launch for each combination of dtypes."""

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        keyed = sorted(members, key=lambda member: repr(member.kind))
        super().__init__(keyed, rules, device)
        self.batches: list[Batch] = []
        self.numbers = torch.empty(len(keyed), NUMBERS.value, dtype=torch.float32, device=device)
        self.groups = upload([x.group for x in keyed], torch.int32, device)
        self.signs = upload([x.sign for x in keyed], torch.float32, device)
        self.steps = upload(addresses_of(x.step for x in keyed), torch.int64, device)
        for _, found in itertools.groupby(keyed, key=lambda member: member.kind):
            start = sum(len(batch.members) for batch in self.batches)
            self.batches.append(Batch(list(found), start, self))
        self.group_numbers = GroupNumbers(GROUP_NUMBERS.value * rules.groups, device)
        self.most = Uploaded(1, torch.float64, device)
        self.prepare: dict[tuple, Launch] = {}

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Have the tables show these gradients, in the members' order, and the groups' numbers."""
        self.gradients = gradients
        for batch in self.batches:
            batch.point(gradients[batch.start : batch.start + len(batch.members)])
        self.point_numbers(groups)

    def point_numbers(self, groups: list[dict]) -> None:
        """Have the tables show the groups' numbers."""
        self.group_numbers.point(group_numbers(groups, self.device))
        self.most.hold([self.rules.max_grad_norm or 0.0])

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Sums of squares of the gradients in fp64, ``[shares]``, by the mesh that they are of."""
        return [(batch.members[0].mesh, batch.squares()) for batch in self.batches]

    def move(self, step: Step) -> None:
        """Take the step, if it is to be taken."""
        rules = self.rules
        partials = step.squares
        shares = 0 if partials is None else len(partials)
        key = (shares, step.grad_scale is None, step.found_inf is None)
        if key not in self.prepare:
            self.prepare[key] = Launch(
                _prepare_kernel,
                (1,),
                self.device,
                (shares, len(self.members)),
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
                *(partials, self.most.table, step.grad_scale, step.found_inf),
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
        self.gradients = Uploaded(len(members), torch.int64, part.device, apart=True)
        self.aligned = False
        self.launches: dict[bool, Launch] = {}
        self.shares: Squares | None = None
        after = start + len(members)
        self.numbers = part.numbers[start:after]
        # Not a part of the part's, whose address may be that of an odd number of them.
        self.steps = upload(addresses_of(x.step for x in members), torch.int64, part.device)

    def point(self, gradients: list[Tensor]) -> None:
        addresses = addresses_of(gradients)
        if self.gradients.hold(addresses):
            self.aligned = self.all_aligned and aligned(addresses)

    def squares(self) -> Tensor:
        if self.shares is None:
            self.shares = Squares(self.lengths, self.members[0].kind.gradient, self.part.device)
        return self.shares(self.gradients.table, self.aligned)

    def move(self, skipped: Tensor) -> None:
        if not self.blocks.count:
            return
        if self.aligned not in self.launches:
            kind, rules = self.members[0].kind, self.part.rules
            self.launches[self.aligned] = Launch(
                _adamw_kernel,
                (self.blocks.count,),
                self.part.device,
                (len(self.members), rules.seed),
                dict(num_warps=ADAMW.num_warps),
                P=triton_dtype(kind.parameter),
                G=triton_dtype(kind.gradient),
                STATE=triton_dtype(kind.state),
                AMSGRAD=kind.amsgrad,
                DECOUPLED=rules.decoupled,
                STOCHASTIC=rules.rounding == "stochastic",
                REMAINDER=kind.remainder,
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
