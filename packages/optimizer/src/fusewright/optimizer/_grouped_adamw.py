"""AdamW whose groups' learning rates follow from this step's gradients: between the sum of their
squares, which clipping needs anyway, and the first thing that moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._backends import launchers
from ._members import Part
from ._tables import upload
from .adamw import AdamW
from .reference import ReferencePart

Tensor = torch.Tensor


class GroupedAdamW(AdamW):
    """AdamW over parameters of one device, none of them sharded.

    Attributes:
        control: is called once a step, with squares ``[2, shares]`` in fp64 of gradients and
            parameters and with the group of each share; with None twice where ``both`` is False.
        both: whether the step takes squares of parameters too.
    """

    control: Callable[[Tensor | None, Tensor | None], None]
    both = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    _measured: list[tuple[Any, Sequence[int]]] | None = None

    def _plan(self) -> list[Tensor | None]:
        gradients = super()._plan()
        if self._parts is not self._measured:
            self._parts = [(Measured(part, self), places) for part, places in self._parts]
            self._measured = self._parts
        # A step that raised may have left some.
        self._found: list[tuple[Tensor, Tensor]] = []
        return gradients

    def take(self, squares: Tensor, owner: Tensor) -> None:
        """Those of one part; with the last one's they are all there."""
        self._found.append((squares, owner))
        if len(self._found) < len(self._parts):
            return
        found, self._found = self._found, []
        if not self.both:
            self.control(None, None)
        elif len(found) == 1:
            self.control(*found[0])
        else:
            self.control(torch.cat([x for x, _ in found], 1), torch.cat([x for _, x in found]))


class Measured:
    """A part that adds squares by group, and shows them to its optimizer."""

    def __init__(self, part: Part, adamw: GroupedAdamW) -> None:
        self.part, self.adamw = part, adamw
        groups = len(adamw.param_groups)
        self.squares_of: Any = None
        if isinstance(part, ReferencePart):
            self.numbers = [member.group for member in part.members]
            self.present = sorted(set(self.numbers))
            owner = self.present
        else:
            self.squares_of = launchers().PartSquares(part, groups)
            owner = self.squares_of.groups
        self.owner = upload(owner, torch.int32, part.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def squares(self) -> list[tuple[None, Tensor]]:
        """Of the gradients, ``[shares]`` in fp64."""
        both = self.adamw.both
        if self.squares_of is not None:
            found = self.squares_of(both)
        else:
            sides = [self.part.gradients] + [[x.p for x in self.part.members]] * both
            found = torch.stack([self.by_group(tensors) for tensors in sides])
        self.adamw.take(found, self.owner)
        return [(None, found[0])]

    def by_group(self, tensors: Sequence[Tensor]) -> Tensor:
        """``[groups present]``, in fp64."""
        return squares_by_group(tensors, self.numbers, self.present)


def squares_by_group(
    tensors: Sequence[Tensor], numbers: Sequence[int], present: Sequence[int]
) -> Tensor:
    """Sums of squares of tensors, each of the group of its number: of the groups present."""
    found: dict[int, list[Tensor]] = {group: [] for group in present}
    for x, number in zip(tensors, numbers, strict=True):
        found[number].append(x.double().square().sum())
    return torch.stack([torch.stack(shares).sum() for shares in found.values()])
