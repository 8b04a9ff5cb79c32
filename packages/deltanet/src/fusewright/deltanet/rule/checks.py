"""Checks of the rule's arguments, before any memory is touched."""

from __future__ import annotations

import torch

from .._core.checks import (
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_floating,
    checked_number,
)
from .._core.precision import wide_dtype

Tensor = torch.Tensor


def check_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """q, k [B, T, H, K], v [B, T, HV, V], gates [B, T, HV], state [N, HV, K, V], cu_seqlens
    [N + 1] over the tokens of one row.
    """
    check_rows(q, k, v, "B, T, ")
    for name, x in gates.items():
        check_gate(name, x, v, "B, T, HV")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q)
        sequences = cu_seqlens.numel() - 1
    if state is not None:
        check_state("initial_state", state, q, v, sequences)


def check_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """The same without the axis of tokens."""
    check_rows(q, k, v, "B, ")
    for name, x in (("g", g), ("beta", beta)):
        check_gate(name, x, v, "B, HV")
    check_state("state", state, q, v, q.shape[0])


def checked_decay(g: Tensor | None, alpha: Tensor | None) -> dict[str, Tensor]:
    """g or alpha under its name; one of the two must be there."""
    if g is not None and alpha is not None:
        raise ValueError("one of g and alpha must be given, got both")
    if alpha is not None:
        return {"alpha": alpha}
    if g is None:
        raise ValueError("one of g and alpha must be given, got neither")
    return {"g": g}


def check_rows(q: Tensor, k: Tensor, v: Tensor, lead: str) -> None:
    axes = lead.count(",") + 2
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.ndim != axes or not x.shape[-1]:
            heads = "HV, V" if name == "v" else "H, K"
            raise ValueError(
                f"{name} must be [{lead}{heads}] with a width of at least 1, got {tuple(x.shape)}"
            )
        # Compared here first: the checks run in each call of an op, where calls cost host time.
        if x.dtype != q.dtype or x.device != q.device:
            check_dtype(name, x, "q", q)
            check_device(name, x, "q", q)
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}")
    key_heads = q.shape[-2]
    if v.shape[:-2] != q.shape[:-2] or not key_heads or v.shape[-2] % key_heads:
        raise ValueError(
            f"v must be [{lead}HV, V] with q {tuple(q.shape)}, HV a multiple of its heads, "
            f"got {tuple(v.shape)}"
        )


def check_gate(name: str, x: Tensor, v: Tensor, axes: str) -> None:
    check_floating(name, x)
    if x.shape != v.shape[:-1]:
        raise ValueError(f"{name} must be [{axes}] = {tuple(v.shape[:-1])}, got {tuple(x.shape)}")
    check_device(name, x, "v", v)


def check_state(name: str, state: Tensor, q: Tensor, v: Tensor, sequences: int) -> None:
    check_floating(name, state)
    shape = (sequences, v.shape[-2], q.shape[-1], v.shape[-1])
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must be [N, HV, K, V] = {shape}, got {tuple(state.shape)}")
    wanted = wide_dtype(q)
    if state.dtype != wanted:
        raise ValueError(f"{name} must be {wanted} for q of {q.dtype}, got {state.dtype}")
    check_device(name, state, "q", q)


def check_residual_weight(d_weight: Tensor, d_residual: str, v: Tensor) -> None:
    """d_weight must be [HV], and needs a residual."""
    if d_residual == "none":
        raise ValueError('d_weight needs d_residual="qk" or "v", got "none"')
    check_floating("d_weight", d_weight)
    if d_weight.shape != v.shape[2:3]:
        raise ValueError(f"d_weight must be [HV] = {v.shape[2:3]}, got {tuple(d_weight.shape)}")
    check_device("d_weight", d_weight, "v", v)


def checked_scale(scale: float | None, q: Tensor) -> float:
    """scale as a float; None means K ** -0.5."""
    return q.shape[-1] ** -0.5 if scale is None else checked_number("scale", scale)
