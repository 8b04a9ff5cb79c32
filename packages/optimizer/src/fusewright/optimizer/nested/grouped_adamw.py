"""AdamW whose groups' learning rates follow from this step's gradients: they are set after the sum
of the gradients' squares, which clipping needs anyway, and before any parameter is updated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..adamw import launch as adamw_launch
from ..adamw.adamw import AdamW
from ..adamw.reference import ReferencePart
from ..common.step import add_over_shards_
from ..common.tables import upload
from . import launch
from .reference import by_group, squares_by_group

Tensor = torch.Tensor


class GroupedReferencePart(ReferencePart):
    """Members in plain torch, whose squares are added by group.

    Attributes:
        adamw: the optimizer, which collects the squares.
        squares_of: the launches of the squares; None in plain torch.
        owner: the group of each partial sum, int32.
    """

    adamw: GroupedAdamW
    squares_of: Any = None

    def group_by(self, adamw: GroupedAdamW) -> None:
        self.adamw = adamw
        self.places = [member.group for member in self.members]
        self.present = sorted(set(self.places))
        self.owner = upload(self.present, torch.int32, self.device)

    def squares(self) -> list[tuple[None, Tensor]]:
        """Partial sums of the gradients' squares in fp64, as ``total_squares`` takes them."""
        sides = [self.gradients] + [[x.p for x in self.members]] * self.adamw.both
        sums = [squares_by_group(tensors, self.places, self.present) for tensors in sides]
        return self.adamw.collect(torch.stack(sums), self.owner, self.members[0].mesh)


class GroupedKernelPart(adamw_launch.KernelPart):
    """The same by kernels."""

    def group_by(self, adamw: GroupedAdamW) -> None:
        self.adamw, self.squares_of = adamw, launch.PartSquares(self, len(adamw.param_groups))
        self.owner = upload(self.squares_of.groups, torch.int32, self.device)

    def squares(self) -> list[tuple[None, Tensor]]:
        squares = self.squares_of(self.adamw.both)
        return self.adamw.collect(squares, self.owner, self.members[0].mesh)


class GroupedAdamW(AdamW):
    """AdamW over parameters of one device; of DTensors sums are those over all shards.

    Attributes:
        control: is called once a step, with squares ``[2, partials]`` in fp64 of gradients and
            parameters and with the group of each partial sum; with None twice where ``both`` is
            False.
        both: whether the step takes squares of parameters too.
    """

    _kinds = GroupedReferencePart, GroupedKernelPart
    control: Callable[[Tensor | None, Tensor | None], None]
    both = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def _plan(self, *context: Any) -> list[Tensor | None]:
        # A step that raised may have left some.
        self._collected: list[tuple[Tensor, Tensor]] = []
        return super()._plan(*context)

    def _apart(self, member: Any) -> Any:
        # The sums of a part are added over one mesh.
        return super()._apart(member), member.mesh

    def _part(self, members: list[Any], device: torch.device, with_kernels: bool) -> Any:
        part = super()._part(members, device, with_kernels)
        part.group_by(self)
        return part

    def collect(
        self, squares: Tensor, owner: Tensor, mesh: Any = None
    ) -> list[tuple[None, Tensor]]:
        """Take the squares of one part, of this mesh, and return those of the gradients as
        ``total_squares`` takes them; the last part completes them.
        """
        if mesh is not None:
            groups = len(self.param_groups)
            sides = squares if self.both else squares[:1]
            squares = torch.stack([by_group(side, owner, groups) for side in sides])
            add_over_shards_(squares, mesh)
            owner = torch.arange(groups, dtype=torch.int32, device=owner.device)
        self._collected.append((squares, owner))
        if len(self._collected) == len(self._parts):
            collected, self._collected = self._collected, []
            if not self.both:
                self.control(None, None)
            elif len(collected) == 1:
                self.control(*collected[0])
            else:
                squares_of_parts, owners = zip(*collected, strict=True)
                self.control(torch.cat(squares_of_parts, 1), torch.cat(owners))
        return [(None, squares[0])]
