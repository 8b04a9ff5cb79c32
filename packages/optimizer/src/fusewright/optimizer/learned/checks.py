"""Checks of the learned optimizer's arguments, and what its kernels cannot serve."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.checks import check_gradient
from ..common.placement import mesh_of
from ..common.statistics.checks import check_learnable
from ..common.statistics.reference import Statistics, new_statistics, on_meta
from .reference import Network

Tensor = torch.Tensor


def check_arguments(
    mlp: Network,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    statistics: Sequence[Statistics],
    extra: Sequence[Tensor] | None,
) -> None:
    sequences = {"gradients": gradients, "statistics": statistics}
    if extra is not None:
        sequences["extra"] = extra
    for name, sequence in sequences.items():
        if len(sequence) != len(params):
            raise ValueError(
                f"{name} must be {len(params)}, one of each parameter, got {len(sequence)}"
            )
    check_extra(mlp, params, extra)
    for p, g, its in zip(params, gradients, statistics, strict=True):
        check_learnable(p)
        check_gradient(p, g)
        shapes = [list(x.shape) for x in new_statistics(on_meta(p))]
        if [list(x.shape) for x in its] != shapes:
            wanted = f"statistics of a parameter of shape {list(p.shape)} must be of {shapes}"
            raise ValueError(f"{wanted}, got {[list(x.shape) for x in its]}")


def check_extra(mlp: Network, params: Sequence[Tensor], extra: Sequence[Tensor] | None) -> None:
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
        mesh = mesh_of(p)
        if x.ndim > 1 and mesh is not None and mesh[1]:
            raise ValueError(
                f"extra features of a sharded parameter must be [{count}], got {list(x.shape)}"
            )
        if x.device != p.device:
            raise ValueError(f"extra features must be on {p.device}, got {x.device}")


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of the shape can be expanded."""
    ahead = len(to) - len(shape)
    return ahead >= 0 and all(x in (1, y) for x, y in zip(shape, to[ahead:], strict=True))


def network_obstacle(mlp: Network, device: torch.device) -> str | None:
    """Why the kernels cannot read a network."""
    for x in (*mlp.weights(), *mlp.offsets()):
        if x.dtype != torch.float32:
            return f"the kernels take a network of float32, not {x.dtype}"
        if x.device != device:
            return f"the network is on {x.device}, the parameters are on {device}"
    return None
