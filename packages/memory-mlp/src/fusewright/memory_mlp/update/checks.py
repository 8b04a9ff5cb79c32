"""Checks of memory_update's arguments, before any memory is touched."""

from __future__ import annotations

import numbers

import torch

from .._core.checks import (
    FLOATING,
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


def check_update(
    k: Tensor,
    v: Tensor,
    weights: MemoryWeights,
    momentum: MemoryWeights,
    gates: tuple[Tensor | float, ...],
) -> None:
    """k and v must be [*lead, N, D] of one shape, weights and momentum one memory for each leading
    index of k, or one for all, in fp32 (fp64 for fp64 keys), each gate a number or one for each
    memory.
    """
    if (
        isinstance(k, Tensor)
        and isinstance(weights, MemoryWeights)
        and isinstance(momentum, MemoryWeights)
        and isinstance(weights.w1, Tensor)
        and k.ndim > 1
        and weights.w1.ndim > 1
    ):
        *lead, hidden, _ = weights.w1.shape
        *outer, _, width = k.shape
        shapes = weight_shapes(lead, hidden, width)
        tensors = [x for x in gates if isinstance(x, Tensor)]
        if (
            (width and hidden)
            and (not lead or lead == outer)
            and are_plain(
                (k, v, *weights, *momentum, *tensors),
                (k.shape, k.shape, *shapes, *shapes) + (tuple(lead),) * len(tensors),
                (FLOATING,) * 2 + ((wide_dtype(k),),) * 8 + (FLOATING,) * len(tensors),
                k.device,
            )
        ):
            return
    # One is wrong: which one?
    for name, x in (("k", k), ("v", v)):
        check_floating(name, x)
    if k.ndim < 2 or not k.shape[-1]:
        raise ValueError(f"k must be [*lead, N, D] with D at least 1, got {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    check_device("v", v, "k", k)
    for name, state in (("weights", weights), ("momentum", momentum)):
        if not isinstance(state, MemoryWeights):
            raise TypeError(f"{name} must be a MemoryWeights, got {type(state).__name__}")
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
    dtype, shapes = wide_dtype(k), weight_shapes(lead, hidden, width)
    for name, state in (("weights", weights), ("momentum", momentum)):
        for field, x, shape in zip(state._fields, state, shapes, strict=True):
            if x.shape != shape:
                raise ValueError(
                    f"{name}.{field} must be {shape} for {hidden} hidden units and keys of "
                    f"{width}, got {tuple(x.shape)}"
                )
            if x.dtype != dtype:
                raise ValueError(f"{name}.{field} must be {dtype}, got {x.dtype}")
            check_device(f"{name}.{field}", x, "k", k)
    for name, gate in zip(("alpha", "eta", "theta"), gates, strict=True):
        if isinstance(gate, Tensor):
            check_floating(name, gate)
            if list(gate.shape) != lead:
                raise ValueError(
                    f"{name} must be a number or a tensor of shape {tuple(lead)}, one for each "
                    f"memory, got {tuple(gate.shape)}"
                )
            check_device(name, gate, "k", k)


def cast_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of one dtype; under autocast only after the cast."""
    if k.dtype == v.dtype:
        return autocast(k, v)  # type: ignore[return-value]
    k, v = autocast(k)[0], autocast(v)[0]
    check_dtype("v", v, "k", k)
    return k, v


def checked_gates(w1: Tensor, **gates: Tensor | float) -> list[Tensor]:
    """One number for each memory, in its dtype."""
    lead, dtype = w1.shape[:-2], w1.dtype
    tensors = []
    for name, gate in gates.items():
        if isinstance(gate, Tensor):
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
