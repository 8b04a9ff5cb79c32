"""What the public functions ask of their arguments, before any memory is touched."""

from __future__ import annotations

import math
import numbers
from typing import Literal, get_args

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 256
INDICES = (torch.int32, torch.int64)
Law = Literal["inverse", "proportional", "entropy", "fixed"]
LAWS = get_args(Law)
Path = Literal["auto", "tiles", "queries"]
PATHS = get_args(Path)
# The kernels take it in fp32, times log2(e).
LOWEST_SCALE = torch.finfo(torch.float32).tiny
HIGHEST_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)


def check_indexer(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> None:
    """q must be [B, Tq, H, d], k [B, Tkv, d], w [B, Tq, H] and bias [H], floating, on one
    device.
    """
    for name, x, axes in (
        ("q", q, "batch, tokens, heads, width"),
        ("k", k, "batch, tokens, width"),
        ("w", w, "batch, tokens, heads"),
        ("bias", bias, "heads"),
    ):
        check_floating(name, x)
        if x.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} must be [{axes}], got {tuple(x.shape)}")
        check_device(name, x, q)
    batches, queries, heads, width = q.shape
    if heads == 0:
        raise ValueError("q must have at least one head, got 0")
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"the width of the indexer must be from 1 to {MAX_WIDTH}, got {width}")
    wanted = {"k": (batches, k.shape[1], width), "w": (batches, queries, heads), "bias": (heads,)}
    for name, x in (("k", k), ("w", w), ("bias", bias)):
        if tuple(x.shape) != wanted[name]:
            raise ValueError(
                f"{name} must have shape {wanted[name]} beside q {tuple(q.shape)}, "
                f"got {tuple(x.shape)}"
            )


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q must be [B, T, H, D] and k and v [B, Tkv, Hkv, D], floating, on one device, with H a
    multiple of Hkv.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, tokens, heads, width], got {tuple(x.shape)}")
        check_device(name, x, q)
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
                f"k and v must be [{batches}, Tkv, Hkv, {width}] beside q {tuple(q.shape)}, with "
                f"one Tkv and one Hkv; got k {tuple(k.shape)}, v {tuple(v.shape)}"
            )


def check_selection(
    q: torch.Tensor,
    indices: torch.Tensor,
    count: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    """indices must be [B, T, K] or [B, H, T, K], mask like it, and count like it without K."""
    check_whole_numbers("indices", indices)
    batches, queries, heads, _ = q.shape
    leading = ((batches, queries), (batches, heads, queries))
    if tuple(indices.shape[:-1]) not in leading:
        raise ValueError(
            f"indices must be [{batches}, {queries}, K] or [{batches}, {heads}, {queries}, K] "
            f"beside q {tuple(q.shape)}, got {tuple(indices.shape)}"
        )
    check_device("indices", indices, q)
    if count is not None:
        check_whole_numbers("count", count)
        check_like("count", count, indices.shape[:-1], q)
    if mask is not None:
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool and mask.dtype not in FLOATING:
            raise TypeError(f"mask must be boolean or floating point, got {mask.dtype}")
        check_like("mask", mask, indices.shape, q)


def check_selected(indices: torch.Tensor, count: torch.Tensor | None, keys: int) -> None:
    """In the slots that count, of indices [B, R, T, K], must be keys or -1, and no key twice."""
    slot = torch.arange(indices.shape[-1], device=indices.device)
    counts = slot < (indices.shape[-1] if count is None else count.unsqueeze(-1))
    outside = counts & ((indices < -1) | (indices >= keys))
    for place in outside.nonzero()[:1].tolist():  # sync: check=True says that it waits
        found = indices[tuple(place)].item()  # sync: of what is about to be refused
        raise ValueError(
            f"indices must be from -1 to {keys - 1}, got {found} at [batch, head, query, slot] "
            f"{place}"
        )
    # Slots without a key differ from each other.
    apart = torch.where(counts & (indices >= 0), indices, -1 - slot).sort(-1).values
    twice = (apart.diff(dim=-1) == 0).nonzero()[:1]
    for batch, head, query, slot in twice.tolist():  # sync: as above
        key = apart[batch, head, query, slot].item()  # sync: of what is about to be refused
        raise ValueError(
            f"the keys of a query must differ, got {key} twice at [batch, head, query] "
            f"{[batch, head, query]}"
        )


def check_path(path: str) -> None:
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")


def checked_dense_below(dense_below: int, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether attention to these keys is to be dense."""
    check_whole("dense_below", dense_below)
    if dense_below < 0:
        raise ValueError(f"dense_below must be at least 0, got {dense_below}")
    if not dense_below or k.shape[1] >= dense_below:
        return False
    if q.shape[1] > k.shape[1]:
        raise ValueError(
            f"dense_below asks for as many keys as queries at least, got {q.shape[1]} queries and "
            f"{k.shape[1]} keys"
        )
    return True


def check_loss(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor | None,
) -> None:
    """The indexer and the attention must be of the same tokens, lse [B, H, T], and indices of all
    heads.
    """
    for name, x, like, other in (("q", q, "q_index", q_index), ("k", k, "k_index", k_index)):
        if x.shape[:2] != other.shape[:2]:
            raise ValueError(
                f"{name} must have the tokens of {like}, {tuple(other.shape[:2])}, "
                f"got {tuple(x.shape[:2])}"
            )
        check_device(name, x, q_index)
    check_floating("lse", lse)
    wanted = (q.shape[0], q.shape[2], q.shape[1])
    if tuple(lse.shape) != wanted:
        raise ValueError(f"lse must have shape {wanted}, got {tuple(lse.shape)}")
    check_device("lse", lse, q_index)
    if indices is not None and isinstance(indices, torch.Tensor) and indices.ndim != 3:
        raise ValueError(f"indices must be [batch, tokens, K], got {tuple(indices.shape)}")


def checked_temperature(temperature: torch.Tensor | float, q: torch.Tensor) -> torch.Tensor:
    """The temperature as a tensor of one number, on q's device."""
    if isinstance(temperature, torch.Tensor):
        check_floating("temperature", temperature)
        if temperature.ndim:
            raise ValueError(
                f"temperature must be one number, got shape {tuple(temperature.shape)}"
            )
        check_device("temperature", temperature, q)
        return temperature
    check_between("temperature", temperature, -HIGHEST_SCALE, HIGHEST_SCALE)
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.full((), float(temperature), dtype=wide, device=q.device)


def check_whole_numbers(name: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in INDICES:
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    check_strided(name, x)


def check_like(name: str, x: torch.Tensor, shape: torch.Size, q: torch.Tensor) -> None:
    if x.shape != shape:
        raise ValueError(
            f"{name} must have shape {tuple(shape)} beside indices, got {tuple(x.shape)}"
        )
    check_device(name, x, q)


def check_same_dtype(q: torch.Tensor, *others: tuple[str, torch.Tensor]) -> None:
    for name, x in others:
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")


def check_law(law: str, k_base: int, k_min: int, k_max: int, sinks: int) -> None:
    """The law must be known, and the counts 1 <= k_min <= k_max, 0 <= sinks <= k_min."""
    if law not in LAWS:
        raise ValueError(f"law must be one of {', '.join(LAWS)}, got {law!r}")
    for name, number in (("k_base", k_base), ("k_min", k_min), ("k_max", k_max), ("sinks", sinks)):
        check_whole(name, number)
    checked_count("k_base", k_base)
    if not 1 <= k_min <= k_max:
        raise ValueError(f"k_min must be from 1 to k_max, {k_max}, got {k_min}")
    if not 0 <= sinks <= k_min:
        raise ValueError(f"sinks must be from 0 to k_min, {k_min}, got {sinks}")


def check_ema(variance_ema: torch.Tensor | None, q: torch.Tensor) -> None:
    """variance_ema must be one fp32 number on q's device."""
    if variance_ema is None:
        return
    check_floating("variance_ema", variance_ema)
    if variance_ema.ndim or variance_ema.dtype != torch.float32:
        raise ValueError(
            f"variance_ema must be one number in float32, got {tuple(variance_ema.shape)} "
            f"in {variance_ema.dtype}"
        )
    check_device("variance_ema", variance_ema, q)


def check_offset(q_offset: int) -> None:
    check_whole("q_offset", q_offset)
    if q_offset < 0:
        raise ValueError(f"q_offset must be at least 0, got {q_offset}")


def checked_count(name: str, number: int) -> int:
    """A positive whole number."""
    check_whole(name, number)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def check_whole(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"{name} must be a whole number, got {type(number).__name__}")


def check_between(name: str, number: float, lowest: float, highest: float) -> None:
    """A number that is neither below the one nor above the other."""
    if isinstance(number, bool) or not isinstance(number, (float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(number).__name__}")
    if not lowest <= number <= highest:
        raise ValueError(f"{name} must be from {lowest:.3g} to {highest:.3g}, got {number:.3g}")


def check_tokens(x: torch.Tensor, width: int) -> None:
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"x must be [batch, tokens, {width}], got {tuple(x.shape)}")


def check_floating(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
    check_strided(name, tensor)


def check_strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a strided tensor, got {what}")


def check_device(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")


def checked_scale(scale: float | None, width: int) -> float:
    """The factor of the products as a float; 1 / sqrt(width) where it is left out."""
    if scale is None:
        return 1.0 / math.sqrt(width)
    check_between("scale", scale, LOWEST_SCALE, HIGHEST_SCALE)
    return float(scale)


def cast(x: torch.Tensor) -> torch.Tensor:
    """x as autocast hands it to a matrix product."""
    # Autocast knows no meta tensors.
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
