"""What is wanted of the learned optimizer's arguments, and what the kernels cannot serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._backends import launchers
from ._checks import check_gradient
from ._members import is_dense
from .learned_features import Statistics, new_statistics
from .update_mlp import UpdateMLP

Tensor = torch.Tensor


def check_arguments(
    mlp: UpdateMLP,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    statistics: Sequence[Statistics],
    extra: Sequence[Tensor] | None,
) -> None:
    given = {"gradients": gradients, "statistics": statistics}
    if extra is not None:
        given["extra"] = extra
    for name, some in given.items():
        if len(some) != len(params):
            raise ValueError(
                f"{name} must be {len(params)}, one of each parameter, got {len(some)}"
            )
    check_extra(mlp, params, extra)
    for p, g, kept in zip(params, gradients, statistics, strict=True):
        check_learnable(p)
        check_gradient(p, g)
        shapes = [list(x.shape) for x in meta_statistics(p)]
        if [list(x.shape) for x in kept] != shapes:
            wanted = f"statistics of a parameter of shape {list(p.shape)} must be of {shapes}"
            raise ValueError(f"{wanted}, got {[list(x.shape) for x in kept]}")


def check_extra(mlp: UpdateMLP, params: Sequence[Tensor], extra: Sequence[Tensor] | None) -> None:
    count = mlp.extra_features
    if extra is None and count:
        raise ValueError(f"the network has {count} extra features, got none")
    for p, x in zip(params, extra or (), strict=extra is not None):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"extra features must be floating tensors, got {got}")
        shape = (*p.shape, count)
        if not x.ndim or x.shape[-1] != count or not broadcasts(x.shape, shape):
            raise ValueError(
                f"extra features must be [{count}] or broadcast to {list(shape)}, got "
                f"{list(x.shape)}"
            )
        if x.device != p.device:
            raise ValueError(f"extra features must be on {p.device}, got {x.device}")


def broadcasts(given: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor can be expanded to the shape."""
    ahead = len(shape) - len(given)
    return ahead >= 0 and all(x in (1, y) for x, y in zip(given, shape[ahead:], strict=True))


def check_learnable(p: Tensor) -> None:
    if p.layout is not torch.strided:
        raise TypeError(f"parameters must be strided tensors, got one of {p.layout}")
    if not p.is_floating_point():
        raise TypeError(f"parameters must be real floating tensors, got one of {p.dtype}")
    if hasattr(p, "device_mesh"):
        raise TypeError(
            "parameters must be whole tensors, got a DTensor: the statistics are of whole tensors"
        )


def meta_statistics(p: Tensor) -> Statistics:
    """Shapes and strides of a parameter's statistics."""
    return new_statistics(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta"))


def network_obstacle(mlp: UpdateMLP, device: torch.device) -> str | None:
    """Why the kernels cannot read a network."""
    for x in (*mlp.weights(), *mlp.offsets()):
        if x.dtype != torch.float32:
            return f"the kernels take a network of float32, not {x.dtype}"
        if x.device != device:
            return f"the network is on {x.device}, the parameters are on {device}"
    return None


def tensor_obstacle(p: Tensor) -> str | None:
    if not is_dense(p):
        return "a parameter has gaps in its memory"
    if launchers().too_long(p):
        return "a row of a parameter has over 2^30 elements"
    return None


def check_state(state: dict[str, Any], shapes: dict[str, Tensor], number: int) -> None:
    """A parameter's state: all of it, of its shapes."""
    if not state:
        return
    for name, wanted in shapes.items():
        if name not in state:
            raise ValueError(
                f"the state of parameter {number} must have {name}, got {sorted(state)}"
            )
        shape = list(torch.as_tensor(state[name]).shape)
        if shape != list(wanted.shape):
            raise ValueError(
                f"{name} of parameter {number} must have shape {list(wanted.shape)}, got {shape}"
            )
