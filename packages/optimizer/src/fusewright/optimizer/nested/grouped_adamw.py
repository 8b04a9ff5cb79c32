"""AdamW whose groups' learning rates follow from this step's gradients: they are set after the sum
of the gradients' squares, which clipping needs anyway, and before any parameter is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..adamw.adamw import AdamW
from ..common.tables import upload
from . import launch
from .reference import squares_by_group

Tensor = torch.Tensor


class GroupedAdamW(AdamW):
    """AdamW over parameters of one device, none of them sharded.

    Attributes:
        control: is called once a step, with squares ``[2, partials]`` in fp64 of gradients and
            parameters and with the group of each partial sum; with None twice where ``both`` is
            False.
        both: whether the step takes squares of parameters too.
    """

    control: Callable[[Tensor | None, Tensor | None], None]
    both = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def _plan(self) -> list[Tensor | None]:
        # A step that raised may have left some.
        self._collected: list[tuple[Tensor, Tensor]] = []
        return super()._plan()

    def _part(self, members: list[Any], device: torch.device, with_kernels: bool) -> Any:
        return GroupedPart(super()._part(members, device, with_kernels), self, with_kernels)

    def collect(self, squares: Tensor, owner: Tensor) -> None:
        """Take the squares of one part; those of the last part complete them."""
        self._collected.append((squares, owner))
        if len(self._collected) < len(self._parts):
            return
        collected, self._collected = self._collected, []
        if not self.both:
            self.control(None, None)
        elif len(collected) == 1:
            self.control(*collected[0])
        else:
            squares_of_parts, owners = zip(*collected, strict=True)
            self.control(torch.cat(squares_of_parts, 1), torch.cat(owners))


class GroupedPart:
    """A part of AdamW that adds squares by group, and passes them on to its optimizer.

    Attributes:
        squares_of: the launches of the squares; None in plain torch.
        owner: the group of each partial sum, int32.
    """

    def __init__(self, part: Any, adamw: GroupedAdamW, with_kernels: bool) -> None:
        self.part, self.adamw = part, adamw
        self.squares_of: Any = None
        if with_kernels:
            self.squares_of = launch.PartSquares(part, len(adamw.param_groups))
            owner = self.squares_of.groups
        else:
            self.numbers = [member.group for member in part.members]
            self.present = owner = sorted(set(self.numbers))
        self.owner = upload(owner, torch.int32, part.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def squares(self) -> list[tuple[None, Tensor]]:
        """Partial sums of the gradients' squares in fp64, as ``total_squares`` takes them."""
        both = self.adamw.both
        if self.squares_of is not None:
            squares = self.squares_of(both)
        else:
            sides = [self.part.gradients] + [[x.p for x in self.part.members]] * both
            squares = torch.stack([self.by_group(tensors) for tensors in sides])
        self.adamw.collect(squares, self.owner)
        return [(None, squares[0])]

    def by_group(self, tensors: Sequence[Tensor]) -> Tensor:
        """``[groups present]``, in fp64."""
        return squares_by_group(tensors, self.numbers, self.present)
