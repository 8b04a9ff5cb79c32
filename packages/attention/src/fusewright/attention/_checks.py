"""What the public functions ask of their arguments, before any memory is touched."""

from __future__ import annotations

import math
import numbers

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (torch.int32, torch.int64)
WIDTH_MULTIPLE = 8
MAX_WIDTH = 128
MAX_TURNED_WIDTH = 256
# The kernels take it in fp32, times log2(e).
LOWEST_SCALE = torch.finfo(torch.float32).tiny
HIGHEST_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q must be [B, Nq, H, D] and k and v [B, M, H, D], floating, on one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, tokens, heads, width], got {tuple(x.shape)}")
    batches, _, heads, width = q.shape
    if width % WIDTH_MULTIPLE or not 0 < width <= MAX_WIDTH:
        raise ValueError(
            f"the width of a head must be a multiple of {WIDTH_MULTIPLE} up to {MAX_WIDTH}, "
            f"got {width}"
        )
    wanted = (batches, k.shape[1], heads, width)
    for name, x in (("k", k), ("v", v)):
        if x.shape != wanted:
            raise ValueError(
                f"k and v must be [{batches}, M, {heads}, {width}] beside q {tuple(q.shape)}, "
                f"with one M; got k {tuple(k.shape)}, v {tuple(v.shape)}"
            )
        check_device(name, x, q)


def check_same_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")


def check_lengths(key_lengths: torch.Tensor, q: torch.Tensor) -> None:
    """key_lengths must hold one whole number for each task, on q's device."""
    if not isinstance(key_lengths, torch.Tensor):
        raise TypeError(f"key_lengths must be a tensor, got {type(key_lengths).__name__}")
    if key_lengths.dtype not in LENGTHS:
        raise TypeError(f"key_lengths must be int32 or int64, got {key_lengths.dtype}")
    check_strided("key_lengths", key_lengths)
    if key_lengths.shape != q.shape[:1]:
        raise ValueError(
            f"key_lengths must have shape ({q.shape[0]},), one number for each task, "
            f"got {tuple(key_lengths.shape)}"
        )
    check_device("key_lengths", key_lengths, q)


def check_band(window: int, prefix: int, every: int, q: torch.Tensor, k: torch.Tensor) -> None:
    """window and every must be 1 or more, prefix a part of the keys, and q rows of the same
    sequence.
    """
    for name, number in (("window", window), ("prefix", prefix), ("every", every)):
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name} must be a whole number, got {type(number).__name__}")
    rows, keys = q.shape[1], k.shape[1]
    if every < 1:
        raise ValueError(f"every must be 1 or more rows, got {every}")
    if rows > keys:
        raise ValueError(f"q must be the last rows of {keys} at most, got {rows}")
    if every > 1 and rows and (rows - 1) * every >= keys:
        raise ValueError(
            f"q must be the last of each {every} rows of {keys} at most, got {rows} rows"
        )
    if window < 1:
        raise ValueError(f"window must be 1 or more keys, got {window}")
    if not 0 <= prefix <= keys:
        raise ValueError(f"prefix must be 0 to {keys}, the number of keys, got {prefix}")


def check_rotary(
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    beside: torch.Tensor | None,
    prefix: torch.Tensor | None,
) -> None:
    """rows and beside must be [B, T, 1 or 2, H, D], prefix as much for other tokens, and cos and
    sin [T, D / 2], which get no gradient.
    """
    check_floating("rows", rows)
    if rows.ndim != 5 or rows.shape[2] not in (1, 2):
        raise ValueError(
            f"rows must be [batch, tokens, 1 or 2, heads, width], got {tuple(rows.shape)}"
        )
    batches, tokens, *row = rows.shape
    width = row[-1]
    if width % 2 or not 0 < width <= MAX_TURNED_WIDTH:
        raise ValueError(
            f"the width of a head must be even and up to {MAX_TURNED_WIDTH}, got {width}"
        )
    angles = torch.float64 if rows.dtype == torch.float64 else torch.float32
    for name, x in (("cos", cos), ("sin", sin)):
        check_like_rows(name, x, rows, angles)
        if x.shape != (tokens, width // 2):
            raise ValueError(f"{name} must be [{tokens}, {width // 2}], got {tuple(x.shape)}")
        if x.requires_grad:
            raise ValueError(f"{name} gets no gradient, and must not require one")
    if beside is not None:
        check_like_rows("beside", beside, rows, rows.dtype)
        if beside.shape != rows.shape:
            raise ValueError(
                f"beside must have the shape of rows {tuple(rows.shape)}, got {tuple(beside.shape)}"
            )
    if prefix is not None:
        check_like_rows("prefix", prefix, rows, rows.dtype)
        fits = prefix.shape[-3:] == rows.shape[-3:]
        if not fits or prefix.ndim not in (4, 5) or (prefix.ndim == 5 and len(prefix) != batches):
            raise ValueError(
                f"prefix must be [P, {', '.join(map(str, row))}] or so for each of {batches} rows "
                f"of the batch, got {tuple(prefix.shape)}"
            )


def check_like_rows(name: str, x: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> None:
    """x must be of this dtype, on the device of rows."""
    check_floating(name, x)
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} beside rows of {rows.dtype}, got {x.dtype}")
    if x.device != rows.device:
        raise ValueError(f"{name} must be on the device of rows {rows.device}, got {x.device}")


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


def checked_scale(scale: float) -> float:
    """The factor of the scores as a float."""
    if isinstance(scale, bool) or not isinstance(scale, (float, numbers.Real)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not LOWEST_SCALE <= scale <= HIGHEST_SCALE:
        raise ValueError(
            f"scale must be from {LOWEST_SCALE:.3g} to {HIGHEST_SCALE:.3g}, got {scale:.3g}"
        )
    return float(scale)
