"""The padding of stored weights, of which a process may have some rows."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def padding_here(model: nn.Module) -> list[Tensor]:
    """Views of what this process has of the weights that its modules store beyond their width."""
    found: list[Tensor] = []
    for module in model.modules():
        padded: dict[str, Any] = getattr(module, "padded", {})
        for name, how in padded.items():
            weight = attrgetter(name)(module).detach()
            sharded = isinstance(weight, DTensor)
            found += of_shard(weight, how) if sharded else [how.beyond(weight)]
    return found


def of_shard(weight: DTensor, how: Any) -> list[Tensor]:
    """Of rows that are cut as torch.chunk cuts them: of each block what is here."""
    rows = weight.to_local()
    cut = [axis for axis, placed in enumerate(weight.placements) if placed.is_shard(how.axis)]
    if not cut:
        return [how.beyond(rows)]
    (axis,) = cut
    each = -(-weight.shape[how.axis] // weight.device_mesh.size(axis))
    start = each * weight.device_mesh.get_local_rank(axis)
    found: list[Tensor] = []
    for block in range(how.blocks):
        first = max(block * how.stored + how.width, start)
        last = min((block + 1) * how.stored, start + rows.shape[how.axis])
        if first < last:
            found.append(rows.narrow(how.axis, first - start, last - first))
    return found
