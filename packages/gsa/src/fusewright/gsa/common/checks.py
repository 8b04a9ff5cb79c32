"""What the public functions of several families check of their arguments, before any memory is
touched.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from .._core.checks import (
    FLOATING,
    check_device,
    check_floating,
    check_integers,
    check_option,
    checked_count,
    checked_number,
)

Tensor = torch.Tensor
MAX_WIDTH = 256
Law = Literal["inverse", "proportional", "entropy", "fixed"]
LAWS = get_args(Law)
Form = Literal["gated", "relu"]
FORMS = get_args(Form)
Path = Literal["auto", "tiles", "queries"]
PATHS = get_args(Path)
# The kernels take a scale in fp32, times log2(e).
LOWEST_SCALE = torch.finfo(torch.float32).tiny
HIGHEST_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)


def check_indexer(q: Tensor, k: Tensor, w: Tensor, bias: Tensor) -> None:
    """q must be [B, Tq, H, d], k [B, Tkv, d], w [B, Tq, H] and bias [H], floating, on one
    device.
    """
    for name, x, axes in (
        ("q", q, "batch, tokens, heads, width"),
        ("k", k, "batch, tokens, width"),
        ("w", w, "batch, tokens, heads"),
        ("bias", bias, "heads"),
    ):
        check_axes(name, x, axes, q)
    batches, queries, heads, width = q.shape
    if heads == 0:
        raise ValueError("q must have at least one head, got 0")
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"the width of the indexer must be from 1 to {MAX_WIDTH}, got {width}")
    wanted = {"k": (batches, k.shape[1], width), "w": (batches, queries, heads), "bias": (heads,)}
    for name, x in (("k", k), ("w", w), ("bias", bias)):
        if tuple(x.shape) != wanted[name]:
            raise ValueError(
                f"{name} must have shape {wanted[name]} for q {tuple(q.shape)}, "
                f"got {tuple(x.shape)}"
            )


def weights_of_form(w: Tensor, form: str) -> Tensor:
    """w as the indexer's kernels and reference take it: of the form "relu" over sqrt(H)."""
    check_option("form", form, FORMS)
    if form == "gated":
        return w
    wide = torch.promote_types(w.dtype, torch.float32)
    return w.to(wide) * w.shape[-1] ** -0.5


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q must be [B, T, H, D] and k and v [B, Tkv, Hkv, D], floating, on one device, with H a
    multiple of Hkv.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, "batch, tokens, heads, width", q)
    batches, _, heads, width = q.shape
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"the width of a head must be from 1 to {MAX_WIDTH}, got {width}")
    key_heads = k.shape[2]
    if not heads or not key_heads or heads % key_heads:
        raise ValueError(
            f"q must have a multiple of the heads of k, at least one, got {heads} and {key_heads}"
        )
    wanted = (batches, k.shape[1], key_heads, width)
    for x in (k, v):
        if tuple(x.shape) != wanted:
            raise ValueError(
                f"k and v must be [{batches}, Tkv, Hkv, {width}] for q {tuple(q.shape)}, with "
                f"one Tkv and one Hkv; got k {tuple(k.shape)}, v {tuple(v.shape)}"
            )


def check_axes(name: str, x: Tensor, axes: str, q: Tensor) -> None:
    """A floating tensor of these axes on q's device."""
    check_floating(name, x)
    if x.ndim != axes.count(",") + 1:
        raise ValueError(f"{name} must be [{axes}], got {tuple(x.shape)}")
    check_device(name, x, "q", q)


def check_selection(q: Tensor, indices: Tensor, count: Tensor | None, mask: Tensor | None) -> None:
    """indices must be [B, T, K] or [B, H, T, K], mask like it, and count like it without K."""
    check_integers("indices", indices)
    batches, queries, heads, _ = q.shape
    leading = ((batches, queries), (batches, heads, queries))
    if tuple(indices.shape[:-1]) not in leading:
        raise ValueError(
            f"indices must be [{batches}, {queries}, K] or [{batches}, {heads}, {queries}, K] "
            f"for q {tuple(q.shape)}, got {tuple(indices.shape)}"
        )
    check_device("indices", indices, "q", q)
    if count is not None:
        check_integers("count", count)
        check_like_indices("count", count, indices.shape[:-1], q)
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool and mask.dtype not in FLOATING:
            raise TypeError(f"mask must be boolean or floating point, got {mask.dtype}")
        check_like_indices("mask", mask, indices.shape, q)


def check_like_indices(name: str, x: Tensor, shape: torch.Size, q: Tensor) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)} for indices, got {tuple(x.shape)}")
    check_device(name, x, "q", q)


def check_law(law: str, k_base: int, k_min: int, k_max: int, sinks: int, window: int) -> None:
    """The law must be known, and the counts 1 <= k_min <= k_max, 0 <= sinks + window <= k_min."""
    check_option("law", law, LAWS)
    counts = dict(k_base=k_base, k_min=k_min, k_max=k_max, sinks=sinks, window=window)
    for name, number in counts.items():
        checked_count(name, number, lowest=-(2**63))
    checked_count("k_base", k_base)
    if not 1 <= k_min <= k_max:
        raise ValueError(f"k_min must be from 1 to k_max, {k_max}, got {k_min}")
    if not 0 <= sinks <= k_min:
        raise ValueError(f"sinks must be from 0 to k_min, {k_min}, got {sinks}")
    if not 0 <= window <= k_min - sinks:
        raise ValueError(f"window must be from 0 to k_min - sinks, {k_min - sinks}, got {window}")


def checked_offset(q_offset: int, keys: int) -> int:
    """The position of the first row, at most the number of keys: from there on a row sees every
    key, and ops take no more than 64 bits.
    """
    return min(checked_count("q_offset", q_offset, lowest=0), keys)


def checked_scale(scale: float | None, width: int) -> float:
    """The factor of the products as a float; 1 / sqrt(width) where it is left out."""
    if scale is None:
        return 1.0 / math.sqrt(width)
    return checked_number("scale", scale, LOWEST_SCALE, HIGHEST_SCALE)
