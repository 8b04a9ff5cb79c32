"""What NeuralMemory and memory_read ask of their arguments, before any memory is touched."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING

import torch

from ._backends import check_backend
from ._checks import ACTIVATIONS, REDUCTIONS, casts, check_floating, check_option
from ._scan_checks import READS
from .memory_state import MemoryState
from .weights import MemoryWeights, weight_shapes

if TYPE_CHECKING:
    from ._steps import Rules

Tensor = torch.Tensor

HALVES = ("weights", "momentum")
CHOICES = {
    "activation": ACTIVATIONS,
    "granularity": ("token", "chunk", "segment"),
    "reduction": REDUCTIONS,
    "scope": ("sequence", "batch_pooled"),
    "read": READS,
}


def check_rules(rules: Rules) -> None:
    """Options that NeuralMemory knows, and that go together."""
    check_count("layers", rules.layers)
    check_count("chunk", rules.chunk)
    for name, choices in CHOICES.items():
        check_option(name, getattr(rules, name), choices)
    check_backend(rules.backend)
    if rules.max_grad_norm is not None:
        check_positive("max_grad_norm", rules.max_grad_norm)
    if rules.granularity == "token":
        if rules.max_grad_norm is not None:
            raise ValueError('max_grad_norm is for pooled steps, got it with granularity "token"')
        if rules.scope == "batch_pooled":
            raise ValueError('scope "batch_pooled" pools steps, got it with granularity "token"')
    if rules.layers != 2 and rules.backend == "triton":
        raise ValueError(
            f'layers must be 2 with backend "triton": the kernels know no other, got {rules.layers}'
        )


def check_count(name: str, value: int, lowest: int = 1) -> None:
    """A whole number, not below ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}")


def check_positive(name: str, value: float) -> None:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value}")


def checked_head_dim(dim: int, heads: int, head_dim: int | None) -> int:
    """The width of a head."""
    check_count("dim", dim)
    check_count("heads", heads)
    if head_dim is not None:
        check_count("head_dim", head_dim)
        return head_dim
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads = {heads} without head_dim, got {dim}")
    return dim // heads


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
    if x.dtype != weight.dtype and not casts(x.device.type):
        raise ValueError(
            f"{name} must have the weights' dtype {weight.dtype} outside autocast, got {x.dtype}"
        )


def check_mask(name: str, mask: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """A bool tensor of this shape and device."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"{name} must be a bool tensor, got {found}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"{name} must be on device {device}, got {mask.device}")


def check_state(
    state: MemoryState,
    shapes: dict[str, tuple[int | None, ...]],
    chunk: int,
    device: torch.device,
) -> None:
    """A state whose tensors have these shapes, None being any, and fewer than ``chunk`` tokens in
    its running chunk.
    """
    if not isinstance(state, MemoryState):
        raise TypeError(f"state must be a MemoryState, got {type(state).__name__}")
    found = {f"{half}[{i}]": x for half in HALVES for i, x in enumerate(getattr(state, half))}
    found |= {"convolution": state.convolution, "tail.k": state.tail.k, "position": state.position}
    if found.keys() != shapes.keys():
        wanted = sum(name.startswith("weights") for name in shapes)
        raise ValueError(f"state.weights must be {wanted} tensors, got {len(state.weights)}")
    for name, x in found.items():
        sizes = shapes[name]
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


def check_read(q: Tensor, weights: MemoryWeights, activation: str) -> None:
    """q must hold rows that the memories of its rows and heads can read."""
    check_floating("q", q)
    if q.ndim != 4 or not q.shape[-1]:
        raise ValueError(f"q must be [B, T, heads, D] with D at least 1, got {tuple(q.shape)}")
    if not isinstance(weights, MemoryWeights):
        raise TypeError(f"weights must be MemoryWeights, got {type(weights).__name__}")
    check_option("activation", activation, ACTIVATIONS)
    for field, x in zip(weights._fields, weights, strict=True):
        check_floating(f"weights.{field}", x)
    batch, _, heads, width = q.shape
    hidden = weights.b1.shape[-1] if weights.b1.ndim else 0
    shapes = weight_shapes((batch, heads), hidden, width)
    for field, x, shape in zip(weights._fields, weights, shapes, strict=True):
        if tuple(x.shape) != shape:
            raise ValueError(f"weights.{field} must be {shape}, got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"weights.{field} must be on q's device {q.device}, got {x.device}")
