"""Tasks whose rows several processes share: each has a part of the context rows and of the targets,
and everything is of its own rows but the attention, whose keys and values are of all context rows.

    k, v = those of all processes, one behind another        dk, dv: summed over processes, each
                                                             keeps those of its own rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from ..._core.registration import apply

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Newer torch warns of the older names.
all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
reduce_scatter = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


def of_all_rows(k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the context rows of all processes of ``group``, in their order: of ``[B,
    m, H, D]`` each, as many rows in every process, ``[B, n m, H, D]`` for n of them.

    A gradient of either is the sum, in fp32 or wider, of what the processes have for it.
    """
    both = apply(Gathered, torch.cat([k, v], dim=2), group)
    return both.chunk(2, dim=2)


class Gathered(torch.autograd.Function):
    """``[B, m, ...]`` of each process to ``[B, n m, ...]``."""

    @staticmethod
    def forward(x: Tensor, group: ProcessGroup) -> Tensor:
        count = group.size()
        parts = x.new_empty(count * len(x), *x.shape[1:])
        all_gather(parts, x.contiguous(), group=group)
        # Of one task no copy.
        return parts.unflatten(0, (count, len(x))).movedim(0, 1).flatten(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.group = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
        parts = wide.unflatten(1, (ctx.group.size(), -1)).movedim(1, 0).contiguous()
        dx = parts.new_empty(parts.shape[1:])
        reduce_scatter(dx, parts.flatten(0, 1), group=ctx.group)
        return dx.to(ctx.dtype), None
