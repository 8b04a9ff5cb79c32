"""Parameters and their statistics as a step of the learned optimizers takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..placement import number_on
from ..step import Part
from .reference import Statistics

Tensor = torch.Tensor
# A group's numbers in the order of the kernels' table.
GROUP_OPTIONS = ("lr", "weight_decay")


class Member(NamedTuple):
    """A parameter, its statistics and how it is updated.

    Attributes:
        place: among all of the optimizer.
        group: index of its parameter group.
        sign: -1 where the objective is maximized.
        gradient: dtype of its gradient.
        shape: of the whole parameter, of which p may be some rows.
        mesh: of ``mesh_of``.
    """

    place: int
    p: Tensor
    statistics: Statistics
    group: int
    sign: float
    gradient: torch.dtype
    shape: torch.Size
    mesh: Any

    @property
    def is_sharded(self) -> bool:
        if self.mesh is None:
            return False
        device_mesh, axes = self.mesh
        return any(device_mesh.size(axis) > 1 for axis in axes)

    @property
    def step(self) -> Tensor:
        return self.statistics.step


class Rules(NamedTuple):
    """What holds of all parameters of an optimizer.

    Attributes:
        network: an ``UpdateMLP``, or VeLO's networks.
        max_grad_norm: None where gradients are not clipped.
        groups: how many there are.
    """

    network: Any
    max_grad_norm: float | None
    groups: int


class StatisticsPart(Part):
    """Members on one device, all updated by kernels or all in plain torch.

    Attributes:
        extra: features of each member that the caller adds to this step, None for a network
            without.
        numbers: of the groups in this step, in the order of ``GROUP_OPTIONS``.
    """

    members: Sequence[Member]
    extra: list[Tensor] | None = None
    numbers: Sequence[float | Tensor] = ()

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Take a step's gradients, in the members' order, and the groups' numbers."""
        self.gradients = gradients
        self.numbers = [
            number_on(self.device, group[name]) for group in groups for name in GROUP_OPTIONS
        ]
