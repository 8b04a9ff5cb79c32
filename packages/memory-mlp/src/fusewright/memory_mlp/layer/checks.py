"""Checks of NeuralMemory's arguments, before any memory is touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.backends import check_backend
from .._core.checks import check_bool, check_floating, check_option, checked_count
from .._core.precision import autocasts
from ..common.checks import (
    ACTIVATION_NAMES,
    READS,
    REDUCTIONS,
    check_switch,
    checked_positive,
)
from .memory_state import MemoryState
from .steps import Rules

Tensor = torch.Tensor

HALVES = ("weights", "momentum")
CHOICES = {
    "activation": ACTIVATION_NAMES,
    "granularity": ("token", "chunk", "segment"),
    "reduction": REDUCTIONS,
    "scope": ("sequence", "batch_pooled"),
    "read": READS,
    "forget": ("zero", "initial"),
}


def check_rules(rules: Rules) -> None:
    """Options of NeuralMemory, and combinations that it serves."""
    checked_count("layers", rules.layers)
    checked_count("chunk", rules.chunk)
    for name, choices in CHOICES.items():
        check_option(name, getattr(rules, name), choices)
    check_switch("residual_norm", rules.residual_norm)
    check_backend(rules.backend)
    if rules.max_grad_norm is not None:
        checked_positive("max_grad_norm", rules.max_grad_norm)
    if rules.granularity == "token" and rules.scope == "batch_pooled":
        raise ValueError('scope "batch_pooled" pools steps, got it with granularity "token"')
    if rules.granularity != "token" and rules.residual_norm:
        raise ValueError(
            f'residual_norm is for granularity "token", got it with "{rules.granularity}"'
        )
    if rules.backend == "triton" and rules.layers != 2:
        if rules.layers == 1:
            raise ValueError('layers must be 2 or more with backend "triton", got 1')
        if rules.granularity != "token" or rules.max_grad_norm is not None:
            raise ValueError(
                f'layers must be 2 with backend "triton" and granularity "{rules.granularity}", '
                f"max_grad_norm {rules.max_grad_norm}: the kernels serve more only token by token "
                f"and without a clip, got {rules.layers}"
            )


def checked_head_dim(dim: int, heads: int, head_dim: int | None) -> int:
    """The width of a head."""
    checked_count("dim", dim)
    checked_count("heads", heads)
    if head_dim is not None:
        return checked_count("head_dim", head_dim)
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads = {heads} without head_dim, got {dim}")
    return dim // heads


def checked_starts(length: float, eta: float, rate: float) -> tuple[float, float, float]:
    """What alpha, eta and a learned rate start at, each between 0 and 1."""
    starts = {
        "memory_length": 1.0 / checked_positive("memory_length", length),
        "eta_start": checked_positive("eta_start", eta),
        "rate_start": checked_positive("rate_start", rate),
    }
    given = {"memory_length": length, "eta_start": eta, "rate_start": rate}
    for name, start in starts.items():
        if not 0.0 < start < 1.0:
            wanted = "above 1" if name == "memory_length" else "between 0 and 1"
            raise ValueError(f"{name} must be {wanted}, got {given[name]}")
    alpha, eta, rate = starts.values()
    return alpha, eta, rate


def check_tokens(
    name: str, x: Tensor, weight: Tensor, shape: tuple[int | None, ...], dim: int
) -> None:
    """x must be ``[B, T, dim]`` with the sizes of ``shape`` where those are not None, on the
    weight's device and, unless autocast makes it so, in its dtype.
    """
    check_floating(name, x)
    sizes = (*shape, dim)
    if x.ndim != 3 or any(n not in (None, m) for n, m in zip(sizes, x.shape, strict=True)):
        axes = ", ".join(
            letter if size is None else str(size) for letter, size in zip("BT", shape, strict=True)
        )
        raise ValueError(f"{name} must be [{axes}, {dim}], got shape {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the weights' device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not autocasts(x.device.type):
        raise ValueError(
            f"{name} must have the weights' dtype {weight.dtype} outside autocast, got {x.dtype}"
        )


def check_mask(name: str, mask: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """A bool tensor of this shape and device."""
    check_bool(name, mask)
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"{name} must be on device {device}, got {mask.device}")


def check_state(
    state: MemoryState,
    half: Sequence[tuple[int, ...]],
    others: dict[str, tuple[int | None, ...]],
    chunk: int,
    device: torch.device,
) -> None:
    """A state whose weights and whose momentum have the shapes of ``half``, whose other tensors
    have theirs, None being any size, and fewer than ``chunk`` tokens in its running chunk.
    """
    if not isinstance(state, MemoryState):
        raise TypeError(f"state must be a MemoryState, got {type(state).__name__}")
    if is_plain_state(state, half, others, chunk, device):
        return
    # One is wrong: which one?
    tensors = {f"{name}[{i}]": x for name in HALVES for i, x in enumerate(getattr(state, name))}
    shapes: dict[str, tuple[int | None, ...]] = {
        f"{name}[{i}]": sizes for name in HALVES for i, sizes in enumerate(half)
    }
    if tensors.keys() != shapes.keys():
        raise ValueError(f"state.weights must be {len(half)} tensors, got {len(state.weights)}")
    tensors |= {"convolution": state.convolution, "tail.k": state.tail.k}
    tensors["position"] = state.position
    for name, sizes in (shapes | others).items():
        x = tensors[name]
        if x.ndim != len(sizes) or any(
            n not in (None, m) for n, m in zip(sizes, x.shape, strict=True)
        ):
            raise ValueError(f"state.{name} must be {sizes}, got {tuple(x.shape)}")
        if x.device != device:
            raise ValueError(f"state.{name} must be on {device}, got {x.device}")
    if state.tail.length >= chunk:
        raise ValueError(
            f"state.tail must be fewer than {chunk} tokens, as many as a chunk has, "
            f"got {state.tail.length}"
        )


def is_plain_state(
    state: MemoryState,
    half: Sequence[tuple[int, ...]],
    others: dict[str, tuple[int | None, ...]],
    chunk: int,
    device: torch.device,
) -> bool:
    """Whether all is as :func:`check_state` wants it; a repeated call asks this first."""
    k = state.tail.k
    if k.ndim != 4 or k.shape[1] >= chunk:
        return False
    batch, _, *head = others["tail.k"]
    tensors = (*state.weights, *state.momentum, state.convolution, state.position, k)
    last = others["convolution"], others["position"], (batch, k.shape[1], *head)
    shapes = (*half, *half, *last)
    if len(tensors) != len(shapes):
        return False
    return all(x.shape == y and x.device == device for x, y in zip(tensors, shapes, strict=True))
