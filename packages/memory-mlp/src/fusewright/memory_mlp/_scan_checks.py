"""What memory_scan asks of its arguments, before any memory is touched."""

from __future__ import annotations

import torch

from ._checks import ACTIVATIONS, check_floating, check_option, check_same, dtype_of_state
from .weights import MemoryWeights, weight_shapes

Tensor = torch.Tensor

READS = ("after", "before")


def check_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: MemoryWeights,
    momentum: MemoryWeights,
    gates: dict[str, Tensor],
    write_mask: Tensor | None,
    chunk: int,
    activation: str,
    read: str,
) -> None:
    """q, k, v one token's rows, weights and momentum those of the same rows and heads, gates and
    mask one for each token.
    """
    check_floating("q", q)
    if q.ndim != 4 or not q.shape[-1]:
        raise ValueError(f"q must be [B, T, heads, D] with D at least 1, got {tuple(q.shape)}")
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    check_option("activation", activation, ACTIVATIONS)
    check_option("read", read, READS)
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise TypeError(f"chunk must be an integer, got {type(chunk).__name__}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    batch, tokens, heads, width = q.shape
    wide = dtype_of_state(q)
    hidden = 0
    for name, half in (("weights", weights), ("momentum", momentum)):
        if not isinstance(half, MemoryWeights):
            raise TypeError(f"{name} must be MemoryWeights, got {type(half).__name__}")
        hidden = hidden or (half.w1.shape[-2] if half.w1.ndim == 4 else 0)
        shapes = weight_shapes((batch, heads), hidden, width)
        for field, x, shape in zip(half._fields, half, shapes, strict=True):
            check_floating(f"{name}.{field}", x)
            if tuple(x.shape) != shape or not hidden:
                wanted = (batch, heads, *(axis or "hidden" for axis in shape[2:]))
                raise ValueError(f"{name}.{field} must be {wanted}, got {tuple(x.shape)}")
            if x.dtype != wide or x.device != q.device:
                raise ValueError(
                    f"{name}.{field} must be {wide} on {q.device}, got {x.dtype} on {x.device}"
                )
    for name, gate in gates.items():
        check_floating(name, gate)
        check_token_numbers(name, gate, (batch, tokens, heads), q)
    if write_mask is not None:
        if not isinstance(write_mask, Tensor) or write_mask.dtype != torch.bool:
            found = getattr(write_mask, "dtype", type(write_mask).__name__)
            raise TypeError(f"write_mask must be a bool tensor, got {found}")
        shape = (batch, tokens, heads)[: 2 if write_mask.ndim == 2 else 3]
        check_token_numbers("write_mask", write_mask, shape, q)


def check_token_numbers(name: str, x: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    if tuple(x.shape) != shape:
        axes = ", ".join(("B", "T", "heads")[: len(shape)])
        raise ValueError(f"{name} must be [{axes}] = {shape}, got {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
