"""Checks of the attention functions' arguments, before any memory is touched."""

from __future__ import annotations

import math

import torch

from .._core.checks import (
    check_device,
    check_dtype,
    check_floating,
    check_integers,
    checked_number,
)
from .._core.precision import autocasts

WIDTH_MULTIPLE = 8
MAX_WIDTH = 256
# The kernels take it in fp32, times log2(e).
LOWEST_SCALE = torch.finfo(torch.float32).tiny
HIGHEST_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)

Tensor = torch.Tensor


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q must be [B, Nq, H, D], k [B, M, G, D] and v [B, M, G, Dv], G a divisor of H, floating, on
    one device.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, tokens, heads, width], got {tuple(x.shape)}")
    batches, _, heads, width = q.shape
    for each in (width, v.shape[-1]):
        if each % WIDTH_MULTIPLE or not 0 < each <= MAX_WIDTH:
            raise ValueError(
                f"the width of a head must be a multiple of {WIDTH_MULTIPLE} up to {MAX_WIDTH}, "
                f"got {each}"
            )
    _, keys, key_heads, _ = k.shape
    wanted = (batches, keys, key_heads)
    divides = key_heads == heads or (key_heads > 0 and heads % key_heads == 0)
    for name, x in (("k", k), ("v", v)):
        if x.shape[:3] != wanted or k.shape[3] != width or not divides:
            raise ValueError(
                f"k and v must be [{batches}, M, G, {width}] and [{batches}, M, G, Dv] with q "
                f"{tuple(q.shape)}, one M and one G that divides {heads}; "
                f"got k {tuple(k.shape)}, v {tuple(v.shape)}"
            )
        check_device(name, x, "q", q)


def prepared(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """q, k and v as autocast hands them to a matrix product, in one dtype; and the factor of the
    scores.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    else:
        scale = checked_number("scale", scale, LOWEST_SCALE, HIGHEST_SCALE)
    if autocasts(q.device.type):
        # Each fp64 tensor stays as it is, as in torch's attention.
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    check_dtype("k", k, "q", q)
    check_dtype("v", v, "q", q)
    return (q, k, v), scale


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """sinks must hold one number for each head of q, in fp32 or q's dtype, on its device."""
    check_floating("sinks", sinks)
    if sinks.dtype not in (torch.float32, q.dtype):
        raise ValueError(f"sinks must have dtype torch.float32 or q's {q.dtype}, got {sinks.dtype}")
    if sinks.shape != q.shape[2:3]:
        raise ValueError(
            f"sinks must have shape ({q.shape[2]},), one number for each head, "
            f"got {tuple(sinks.shape)}"
        )
    check_device("sinks", sinks, "q", q)


def check_key_lengths(key_lengths: Tensor, q: Tensor) -> None:
    """key_lengths must hold one whole number for each task, on q's device."""
    check_whole_numbers("key_lengths", key_lengths, q)
    if key_lengths.shape != q.shape[:1]:
        raise ValueError(
            f"key_lengths must have shape ({q.shape[0]},), one number for each task, "
            f"got {tuple(key_lengths.shape)}"
        )


def check_documents(cu_seqlens: Tensor, q: Tensor) -> None:
    """cu_seqlens must be [N + 1] beside one row of the batch, or [B, N + 1]."""
    check_whole_numbers("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.ndim not in (1, 2) or cu_seqlens.shape[-1] < 2:
        raise ValueError(
            f"cu_seqlens must be [N + 1] or [B, N + 1] with N at least 1, got {cu_seqlens.shape}"
        )
    if cu_seqlens.ndim == 1 and q.shape[0] != 1:
        raise ValueError(
            f"with cu_seqlens [N + 1] q must have one row, B = 1, got {tuple(q.shape)}"
        )
    if cu_seqlens.ndim == 2 and cu_seqlens.shape[0] != q.shape[0]:
        raise ValueError(
            f"cu_seqlens must be [B, N + 1] with q's B = {q.shape[0]}, got {cu_seqlens.shape}"
        )


def check_whole_numbers(name: str, numbers: Tensor, q: Tensor) -> None:
    """A strided tensor of int32 or int64, on q's device."""
    check_integers(name, numbers)
    check_device(name, numbers, "q", q)
