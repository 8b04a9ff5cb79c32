"""The norm of all gradients of an optimizer, over devices and over the shards of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from ._members import current, on

Tensor = torch.Tensor


def total_squares(parts: Sequence[Any]) -> Tensor:
    """Shares of the squared norm, ``[shares]`` in fp64: as they come where there is one device and
    no DTensor, else their sum over devices and processes.
    """
    found = []
    for part in parts:
        with current(part.device):
            found += part.squares()
    if len(parts) == 1 and not any(mesh for mesh, _ in found):
        return found[0][1] if len(found) == 1 else torch.cat([share for _, share in found])
    first = parts[0].device
    totals: dict[Any, Tensor] = {}
    for mesh, share in found:
        total = on(first, share.sum())
        totals[mesh] = totals[mesh] + total if mesh in totals else total
    for mesh, total in totals.items():
        if mesh is not None:
            device_mesh, sharded = mesh
            for axis in sharded:
                torch.distributed.all_reduce(total, group=device_mesh.get_group(axis))
    return torch.stack(list(totals.values())).sum().view(1)
