"""The norm of many tensors on a card, and their scaling: plans launches, and launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from ._backends import card_of
from ._configs import PREPARE, SCALE, SQUARES, Walk
from ._launch import Launch
from ._norm_kernels import _clip_kernel, _norm_kernel, _squares_kernel
from ._tables import CAPTURED, Blocks, Uploaded, addresses_of, aligned, is_captured

Tensor = torch.Tensor
DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def triton_dtype(dtype: torch.dtype) -> Any:
    return DTYPES[dtype]


def programs_of(walk: Walk, blocks: int, device: torch.device) -> int:
    """As many as the card holds at once, but none without a block."""
    return max(1, min(blocks, card_of(device).multiprocessors * walk.programs_per_sm))


class Squares:
    """Sums of squares of tensors of these lengths and this dtype: ``[shares]`` in fp64."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = Blocks(lengths, SQUARES.size, device)
        self.dtype, self.device = dtype, device
        self.programs = programs_of(SQUARES, self.blocks.count, device)
        self.launches: dict[bool, Launch] = {}

    def __call__(self, addresses: Tensor, aligned: bool) -> Tensor:
        """Of the tensors at these addresses."""
        if aligned not in self.launches:
            self.launches[aligned] = Launch(
                _squares_kernel,
                (self.programs,),
                self.device,
                (self.blocks.count,),
                dict(num_warps=SQUARES.num_warps),
                G=triton_dtype(self.dtype),
                ALIGNED=aligned,
                SIZE=SQUARES.size,
            )
        partials = torch.empty(self.programs, dtype=torch.float64, device=self.device)
        blocks = self.blocks
        self.launches[aligned]((addresses, blocks.lengths, blocks.first, blocks.owner, partials))
        return partials


class KernelGradients:
    """Gradients of one dtype on one device, by kernels."""

    def __init__(self, gradients: list[Tensor], mesh: Any, device: torch.device) -> None:
        self.gradients, self.mesh, self.device = gradients, mesh, device
        # What is made in a capture is there in its replays alone.
        captured = is_captured(device)
        make = gradients_plan.__wrapped__ if captured else gradients_plan
        self.plan = make(tuple(g.numel() for g in gradients), gradients[0].dtype, device)
        if captured:
            CAPTURED.append(self.plan)
        addresses = addresses_of(gradients)
        self.aligned = aligned(addresses)
        # Of this call alone: others may still read theirs.
        self.table = Uploaded(len(addresses), torch.int64, device)
        self.table.hold(addresses)
        CAPTURED.extend(self.table.kept)

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Sums of squares in fp64, ``[shares]``, by the mesh that they are of."""
        return [(self.mesh, self.plan.squares(self.table.table, self.aligned))]

    def norm_of(self, squares: Tensor) -> Tensor:
        norm = torch.empty((), dtype=torch.float32, device=self.device)
        norm_launch(len(squares), self.device)((squares, norm))
        return norm

    def clip(self, squares: Tensor, max_norm: float) -> Tensor:
        """Scale in place; returns the norm."""
        return self.plan.clip(self.table.table, self.aligned, squares, max_norm)


@functools.lru_cache(maxsize=256)
def norm_launch(shares: int, device: torch.device) -> Launch:
    return Launch(
        _norm_kernel,
        (1,),
        device,
        (shares,),
        dict(num_warps=PREPARE.num_warps),
        SIZE=PREPARE.size,
    )


@functools.lru_cache(maxsize=256)
def gradients_plan(
    lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> GradientsPlan:
    return GradientsPlan(lengths, dtype, device)


class GradientsPlan:
    """The launches for tensors of these lengths and this dtype."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.squares = Squares(lengths, dtype, device)
        self.blocks = Blocks(lengths, SCALE.size, device)
        self.dtype, self.device = dtype, device
        self.launches: dict[tuple, Launch] = {}

    def clip(self, table: Tensor, aligned: bool, squares: Tensor, max_norm: float) -> Tensor:
        key = aligned, len(squares)
        if key not in self.launches:
            self.launches[key] = Launch(
                _clip_kernel,
                (programs_of(SCALE, self.blocks.count, self.device),),
                self.device,
                (len(squares), self.blocks.count),
                dict(num_warps=SCALE.num_warps),
                G=triton_dtype(self.dtype),
                ALIGNED=aligned,
                SHARES=PREPARE.size,
                SIZE=SCALE.size,
            )
        norm = torch.empty((), dtype=torch.float32, device=self.device)
        blocks = self.blocks
        self.launches[key](
            (table, blocks.lengths, blocks.first, blocks.owner, squares, norm), (max_norm,)
        )
        return norm
