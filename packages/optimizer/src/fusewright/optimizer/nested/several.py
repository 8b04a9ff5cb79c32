"""What the processes that share parameters have in common: the controller, and sums over the
parameters of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed

from ..common.placement import local, placed_like

Tensor = torch.Tensor


@torch.no_grad()
def share_(tensors: Iterable[Tensor], mesh: Any) -> None:
    """They become those of the mesh's first process."""
    if mesh is not None:
        for x in tensors:
            for axis in range(mesh.ndim):
                torch.distributed.broadcast(x, group=mesh.get_group(axis), group_src=0)


def local_gradients(
    gradients: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[Tensor | None]:
    """What this process has of gradients, placed as their parameters."""
    placed = map(placed_like, gradients, params)
    return [None if g is None else local(g) for g in placed]


def whole(x: Tensor) -> Tensor:
    """A sum over a DTensor as a plain tensor."""
    return getattr(x, "full_tensor", lambda: x)()
