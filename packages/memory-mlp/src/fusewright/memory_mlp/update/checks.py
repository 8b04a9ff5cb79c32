"""What memory_update asks of its arguments, before any memory is touched."""

from __future__ import annotations

import numbers

import torch

from .._core.checks import (
    check_device,
    check_dtype,
    check_floating,
    check_option,
    checked_number,
)
from .._core.precision import autocast, wide_dtype
from ..common.checks import ACTIVATION_NAMES, REDUCTIONS, are_plain, checked_positive
from ..common.weights import MemoryWeights, weight_shapes

Tensor = torch.Tensor


def checked_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [*lead, N, D] of one shape, device and, under autocast after the cast, dtype."""
    for name, x in (("k", k), ("v", v)):
        check_floating(name, x)
    if k.ndim < 2 or not k.shape[-1]:
        raise ValueError(f"k must be [*lead, N, D] with D at least 1, got {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    check_device("v", v, "k", k)
    if k.dtype == v.dtype:
        return autocast(k, v)  # type: ignore[return-value]
    k, v = autocast(k)[0], autocast(v)[0]
    check_dtype("v", v, "k", k)
    return k, v


def check_state(weights: MemoryWeights, momentum: MemoryWeights, k: Tensor) -> None:
    """Both of one memory for each leading index of k, or of one for all, in fp32 (fp64 for fp64
    keys).
    """
    for name, state in (("weights", weights), ("momentum", momentum)):
        if not isinstance(state, MemoryWeights):
            raise TypeError(f"{name} must be a MemoryWeights, got {type(state).__name__}")
    if is_state(weights, momentum, k):
        return
    # One of them is wrong: say which.
    for name, state in (("weights", weights), ("momentum", momentum)):
        for field, x in zip(state._fields, state, strict=True):
            check_floating(f"{name}.{field}", x)
    if weights.w1.ndim < 2:
        raise ValueError(
            f"weights.w1 must be [*lead, hidden, D], got shape {tuple(weights.w1.shape)}"
        )
    *lead, hidden, _ = weights.w1.shape
    width = k.shape[-1]
    if lead and lead != list(k.shape[:-2]):
        raise ValueError(
            f"weights.w1 must have k's leading axes {tuple(k.shape[:-2])} or none, got shape "
            f"{tuple(weights.w1.shape)}"
        )
    if not hidden:
        raise ValueError("the memory must have at least one hidden unit, got none")
    wanted, shapes = wide_dtype(k), weight_shapes(lead, hidden, width)
    for name, state in (("weights", weights), ("momentum", momentum)):
        for field, x, shape in zip(state._fields, state, shapes, strict=True):
            if x.shape != shape:
                raise ValueError(
                    f"{name}.{field} must be {shape} for {hidden} hidden units and keys of "
                    f"{width}, got {tuple(x.shape)}"
                )
            if x.dtype != wanted:
                raise ValueError(f"{name}.{field} must be {wanted}, got {x.dtype}")
            check_device(f"{name}.{field}", x, "k", k)


def is_state(weights: MemoryWeights, momentum: MemoryWeights, k: Tensor) -> bool:
    """Whether all eight tensors are as they should be, quickly."""
    w1 = weights.w1
    if not isinstance(w1, Tensor) or w1.ndim < 2:
        return False
    *lead, hidden, _ = w1.shape
    *outer, _, width = k.shape
    if not hidden or (lead and lead != outer):
        return False
    shapes = weight_shapes(lead, hidden, width)
    tensors, dtypes = (*weights, *momentum), ((wide_dtype(k),),) * 8
    return are_plain(tensors, (*shapes, *shapes), dtypes, k.device)


def checked_gates(w1: Tensor, **gates: Tensor | float) -> list[Tensor]:
    """One number for each memory, in its dtype."""
    lead, dtype = w1.shape[:-2], w1.dtype
    tensors = []
    for name, gate in gates.items():
        if isinstance(gate, Tensor):
            check_floating(name, gate)
            if gate.shape != lead:
                raise ValueError(
                    f"{name} must be a number or a tensor of shape {tuple(lead)}, one for each "
                    f"memory, got {tuple(gate.shape)}"
                )
            check_device(name, gate, "weights.w1", w1)
            tensors.append(gate if gate.dtype == dtype else gate.to(dtype))
            continue
        if isinstance(gate, bool) or not isinstance(gate, numbers.Real):
            raise TypeError(f"{name} must be a tensor or a number, got {type(gate).__name__}")
        tensors.append(w1.new_full(lead, checked_number(name, gate)))
    return tensors


def checked_row_weights(row_weights: Tensor, k: Tensor) -> Tensor:
    """One number for each row, in the precision of the sums."""
    check_floating("row_weights", row_weights)
    if row_weights.shape != k.shape[:-1]:
        raise ValueError(
            f"row_weights must have shape {tuple(k.shape[:-1])}, one for each row of k, got "
            f"{tuple(row_weights.shape)}"
        )
    check_device("row_weights", row_weights, "k", k)
    return row_weights.to(wide_dtype(k))


def checked_options(
    activation: str, reduction: str, max_grad_norm: float | None
) -> tuple[str, str, float | None]:
    """The options as the op takes them."""
    check_option("activation", activation, ACTIVATION_NAMES)
    check_option("reduction", reduction, REDUCTIONS)
    if max_grad_norm is not None:
        max_grad_norm = checked_positive("max_grad_norm", max_grad_norm)
    return activation, reduction, max_grad_norm
