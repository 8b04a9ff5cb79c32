"""Checks of memory_scan's arguments, before any memory is touched."""

from __future__ import annotations

import torch

from .._core.checks import (
    FLOATING,
    check_bool,
    check_device,
    check_floating,
    check_option,
    check_same,
    checked_count,
)
from .._core.precision import wide_dtype
from ..common.checks import ACTIVATION_NAMES, READS, are_plain, check_heads
from ..common.weights import MemoryWeights, weight_shapes

Tensor = torch.Tensor


def checked_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: MemoryWeights,
    momentum: MemoryWeights,
    gates: tuple[Tensor, ...],
    chunk: int,
    activation: str,
    read: str,
) -> int:
    """The chunk as an int. q, k, v must be rows of heads of one shape, weights and momentum
    memories of these rows and heads, each gate one number for each token and head.
    """
    if (
        isinstance(q, Tensor)
        and isinstance(weights, MemoryWeights)
        and isinstance(momentum, MemoryWeights)
        and isinstance(weights.w1, Tensor)
        and q.ndim == weights.w1.ndim == 4
        and type(chunk) is int
        and activation in ACTIVATION_NAMES
        and read in READS
        and q.shape[3]
        and weights.w1.shape[2]
        and chunk > 0
        and q.dtype in FLOATING
    ):
        shape = q.shape
        state = weight_shapes((shape[0], shape[2]), weights.w1.shape[2], shape[3])
        if are_plain(
            (q, k, v, *weights, *momentum, *gates),
            (shape,) * 3 + (*state, *state) + (shape[:3],) * 3,
            ((q.dtype,),) * 3 + ((wide_dtype(q),),) * 8 + (FLOATING,) * 3,
            q.device,
        ):
            return chunk
    # One is wrong: which one?
    check_heads("q", q)
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    check_option("activation", activation, ACTIVATION_NAMES)
    check_option("read", read, READS)
    batch, tokens, heads, width = q.shape
    dtype = wide_dtype(q)
    hidden = 0
    for name, half in (("weights", weights), ("momentum", momentum)):
        if not isinstance(half, MemoryWeights):
            raise TypeError(f"{name} must be MemoryWeights, got {type(half).__name__}")
        for field, x in zip(half._fields, half, strict=True):
            check_floating(f"{name}.{field}", x)
        hidden = hidden or (half.w1.shape[-2] if half.w1.ndim == 4 else 0)
        shapes = weight_shapes((batch, heads), hidden, width)
        for field, x, axes in zip(half._fields, half, shapes, strict=True):
            if tuple(x.shape) != axes or not hidden:
                wanted = (batch, heads, *(axis or "hidden" for axis in axes[2:]))
                raise ValueError(f"{name}.{field} must be {wanted}, got {tuple(x.shape)}")
            if x.dtype != dtype or x.device != q.device:
                raise ValueError(
                    f"{name}.{field} must be {dtype} on {q.device}, got {x.dtype} on {x.device}"
                )
    for name, gate in zip(("alpha", "eta", "theta"), gates, strict=True):
        check_floating(name, gate)
        check_token_numbers(name, gate, (batch, tokens, heads), q)
    return checked_count("chunk", chunk)


def check_rest(rest: MemoryWeights, weights: MemoryWeights) -> None:
    """Of one row's weights, in their dtype and on their device."""
    if not isinstance(rest, MemoryWeights):
        raise TypeError(f"rest must be MemoryWeights, got {type(rest).__name__}")
    for field, x, like in zip(rest._fields, rest, weights, strict=True):
        check_floating(f"rest.{field}", x)
        if x.shape != like.shape[1:]:
            raise ValueError(f"rest.{field} must be {tuple(like.shape[1:])}, got {tuple(x.shape)}")
        if x.dtype != like.dtype or x.device != like.device:
            raise ValueError(
                f"rest.{field} must be {like.dtype} on {like.device}, got {x.dtype} on {x.device}"
            )


def check_resets(resets: Tensor, q: Tensor, chunk: int) -> None:
    """One bool for each chunk of q's rows."""
    check_bool("resets", resets)
    wanted = len(q), -(-q.shape[1] // chunk)
    if tuple(resets.shape) != wanted:
        raise ValueError(f"resets must be [B, chunks] = {wanted}, got {tuple(resets.shape)}")
    check_device("resets", resets, "q", q)


def checked_mask(write_mask: Tensor, q: Tensor) -> Tensor:
    """The mask as [B, T, heads]."""
    check_bool("write_mask", write_mask)
    shape = tuple(q.shape[:3])
    if write_mask.ndim == 2:
        check_token_numbers("write_mask", write_mask, shape[:2], q)
        return write_mask.unsqueeze(-1).expand(shape)
    check_token_numbers("write_mask", write_mask, shape, q)
    return write_mask


def check_token_numbers(name: str, x: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    """One number for each token, or for each token and head."""
    if tuple(x.shape) != shape:
        axes = ", ".join(("B", "T", "heads")[: len(shape)])
        raise ValueError(f"{name} must be [{axes}] = {shape}, got {tuple(x.shape)}")
    check_device(name, x, "q", q)
