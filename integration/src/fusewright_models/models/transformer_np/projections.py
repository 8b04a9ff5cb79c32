"""Queries of all rows, keys and values of the first ones, without the copies that linear layers of
a part of the rows, and autograd, would make.

    q = a W_q      (k, v) = a_M W_kv       a_M the first M rows of a task

    da = dq W_q^T, to whose first M rows dk W_k^T and dv W_v^T are added by the products themselves
    dW_q = a^T dq      dW_kv = [a_M^T dk, a_M^T dv]

Autograd would stack dk and dv, fill the gradient of a_M up with zeros, and add it to that of q.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.registration import apply
from ..checks import autocast_dtype

# Rows of the smallest tile in which a GPU's products come fast.
TILE_ROWS = 64


def projected(
    a: Tensor,
    query: Tensor,
    key_value: Tensor,
    context_rows: int,
    *,
    heads: int = 1,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``a [B, T, d]`` queries of the rows from ``first`` on ``[B, T - first, H, d / H]``, keys
    and values of the first ``context_rows [B, M, H, d / H]``, in autocast's dtype where there is
    one.

    ``query [d, d]`` and ``key_value [2 d, d]`` are weights as of ``nn.Linear``. k and v lie side by
    side in one tensor.
    """
    # fp64 stays what it is, as in a linear layer.
    dtype = None if a.dtype == torch.float64 else autocast_dtype(a.device)
    operands = (x if dtype is None else x.to(dtype) for x in (a, query, key_value))
    return apply(Projections, *operands, context_rows, heads, first)


class Projections(torch.autograd.Function):
    """The products and their gradients."""

    @staticmethod
    def forward(
        a: Tensor,
        query: Tensor,
        key_value: Tensor,
        context_rows: int,
        heads: int,
        first: int,
    ) -> tuple[Tensor, ...]:
        q = linear_of_part(a[:, first:], query)
        both = linear_of_part(a[:, :context_rows], key_value)
        return tuple([x.unflatten(-1, (heads, -1)) for x in (q, *both.chunk(2, -1))])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.context_rows, _heads, ctx.first = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        a, query, key_value = ctx.saved_tensors
        of_rows, of_query, of_key_value = ctx.needs_input_grad[:3]
        dq, dk, dv = (x.flatten(-2) for x in gradients)
        da = dquery = dkey_value = None
        if of_rows:
            if ctx.first:
                # Rows before the first have no queries.
                da = dq.new_zeros(a.shape)
                da[:, ctx.first :].baddbmm_(dq, query.expand(len(a), -1, -1))
            else:
                da = dq @ query
            of_keys = da[:, : ctx.context_rows]
            for gradient, weight in zip((dk, dv), key_value.chunk(2), strict=True):
                of_keys.baddbmm_(gradient, weight.expand(len(a), -1, -1))
        if of_query:
            dquery = dq.flatten(0, 1).T @ a[:, ctx.first :].flatten(0, 1)
        if of_key_value:
            keys = a[:, : ctx.context_rows].flatten(0, 1)
            dkey_value = torch.cat([gradient.flatten(0, 1).T @ keys for gradient in (dk, dv)])
        return da, dquery, dkey_value, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        *inputs: Any,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """Products of torch's, so that autograd adds up the gradients of what samples share."""
        *tensors, context_rows, heads, first = inputs
        a, query, key_value = (
            x if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims, strict=False)
        )
        # A weight of each sample is that of all its tasks.
        query, key_value = (w.unsqueeze(1) if w.ndim == 3 else w for w in (query, key_value))
        q = a[..., first:, :] @ query.mT
        both = a[..., :context_rows, :] @ key_value.mT
        rows, of_query, of_key_value, *_ = in_dims
        stacked = [rows is not None or dim is not None for dim in (of_query, of_key_value)]
        found = tuple([x.unflatten(-1, (heads, -1)) for x in (q, *both.chunk(2, -1))])
        return found, tuple(0 if stacked[place] else None for place in (0, 1, 1))


def linear_of_part(rows: Tensor, weight: Tensor) -> Tensor:
    """The linear layer of ``rows [B, n, d]``, which may be a part of each task's.

    One product of all reads such a part from a copy, a product for each task where it lies: that is
    taken where its tiles are seven eighths full.
    """
    count = rows.shape[1]
    in_tiles = math.ceil(count / TILE_ROWS) * TILE_ROWS
    if rows.is_contiguous() or 8 * count < 7 * in_tiles:
        return F.linear(rows, weight)
    return torch.bmm(rows, weight.T.expand(len(rows), -1, -1))
