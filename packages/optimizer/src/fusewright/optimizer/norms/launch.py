"""Launches of the norm of many tensors, and of their scaling."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.lazy import lazy_module
from ..common.launch import PREPARE, GridStride, Squares, planned, programs_of
from ..common.tables import Blocks, addresses_of, aligned, is_captured, upload

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor
# Source: docs/decisions/0008-adamw-launch-h200.csv, which measured the squares alike.
SCALE = GridStride(size=4096, num_warps=8, programs_per_sm=4)


class KernelGradients:
    """Gradients of one dtype on one device, by kernels."""

    def __init__(self, gradients: list[Tensor], mesh: Any, device: torch.device) -> None:
        self.gradients, self.mesh, self.device = gradients, mesh, device
        # What is allocated in a capture exists in its replays alone.
        plan_of = gradients_plan.__wrapped__ if is_captured(device) else gradients_plan
        self.plan = plan_of(tuple(g.numel() for g in gradients), gradients[0].dtype, device)
        addresses = addresses_of(gradients)
        self.aligned = aligned(addresses)
        # Of this call alone: earlier calls' kernels may still read theirs.
        self.table = upload(addresses, torch.int64, device)

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Partial sums of squares in fp64, as ``total_squares`` takes them."""
        return [(self.mesh, self.plan.squares(self.table, self.aligned))]

    def norm_of(self, squares: Tensor) -> Tensor:
        norm = torch.empty((), dtype=torch.float32, device=self.device)
        launch = planned(kernels, self.device, "norm_kernel", (1,), (len(squares),), PREPARE)
        launch((squares, norm))
        return norm

    def clip(self, squares: Tensor, max_norm: float) -> Tensor:
        """Scale in place; returns the norm."""
        return self.plan.clip(self.table, self.aligned, squares, max_norm)


@functools.lru_cache(maxsize=256)
def gradients_plan(
    lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> GradientsPlan:
    return GradientsPlan(lengths, dtype, device)


class GradientsPlan:
    """The launches for tensors of these lengths and this dtype."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.squares = Squares(lengths, dtype, device)
        self.lengths, self.dtype, self.device = lengths, dtype, device

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Of clipping alone."""
        return Blocks(self.lengths, SCALE.size, self.device)

    def clip(self, table: Tensor, aligned: bool, squares: Tensor, max_norm: float) -> Tensor:
        norm = torch.empty((), dtype=torch.float32, device=self.device)
        grid = (programs_of(SCALE, self.blocks.count, self.device),)
        integers = len(squares), self.blocks.count
        constants = dict(G=self.dtype, ALIGNED=aligned, PARTIALS=PREPARE.size)
        launch = planned(kernels, self.device, "clip_kernel", grid, integers, SCALE, **constants)
        launch((table, *self.blocks.tables, squares, norm), (max_norm,))
        return norm
