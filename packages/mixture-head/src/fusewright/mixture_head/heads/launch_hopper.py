"""The launch of grouped heads whose second layers are the epilogue of a product, for Hopper."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, DescribedLaunch, Launch, allocator, cdiv, in_tiles
from .._core.lazy import lazy_module
from .._core.product_hopper import PRODUCT, constants_of, in_bulk, plan_product, serves

if TYPE_CHECKING:
    from . import kernels_hopper as kernels
else:
    kernels = lazy_module(__package__, "kernels_hopper")

Tensor = torch.Tensor
# From so many tiles of a program for each slice of its panel, the epilogue takes less time than a
# pass over memory: on an H200 as long at 0.8, 500 rows of 13,760 columns, and 7 % less at 1.6.
FASTER = 0.9


class SumConfig(NamedTuple):
    """One program adds the parts of ``block_rows`` rows of one head."""

    block_rows: int
    num_warps: int


SUM = SumConfig(block_rows=256, num_warps=4)


class HeadsConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``: as ``kernels_product_hopper`` has it;
    whether it KEEPS u; the HEADS, and the width that each has STORED.
    """

    SLICES: int
    ROWS: int
    BLOCK_COLS: int
    PART_COLS: int
    ROUNDS: int
    PLACES: int
    LOADS: bool
    WHOLE: bool
    COLUMNS: int
    REGISTERS: int
    COPYING_REGISTERS: int
    COLS_FIRST: bool
    KEEPS: bool
    HEADS: int
    STORED: int


class HeadsPlan(NamedTuple):
    """The launches and the memory of one call; ``u`` is None unless it is kept."""

    product: DescribedLaunch
    add_parts: Launch
    parts: Allocator
    u: Allocator | None
    out: Allocator


def has_epilogue(x: Tensor, hidden_weight: Tensor) -> bool:
    """Whether the second layers of heads are computed in the product of the first ones."""
    rows, inner = x.shape[:-1].numel(), x.shape[-1]
    return serves(rows, inner, len(hidden_weight), x.dtype, x.device, FASTER)


def product_heads(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor, keeps: bool
) -> tuple[Tensor, Tensor | None]:
    """``(out, u)``, u ``[..., G, S]`` = x A^T and out ``[..., G, 3]`` = SiLU(u) C in fp32, of
    contiguous x and A; u is None unless it ``keeps``.
    """
    plan = plan_heads(x.shape, *output_weight.shape[:2], x.dtype, keeps, x.device)
    parts, out = plan.parts(), plan.out()
    x, hidden_weight = in_bulk(x.view(-1, x.shape[-1])), in_bulk(hidden_weight)
    u = None if plan.u is None else plan.u()
    # What is not written has no address of its own.
    of_u = x.new_empty(1, 8) if u is None else u.view(len(x), len(hidden_weight))
    plan.product((x, hidden_weight, of_u, by_columns(output_weight), parts))
    plan.add_parts((parts, out))
    return out, u


def by_columns(weight: Tensor) -> Tensor:
    """C as the product's columns have it, ``[3, G * S]`` in fp32."""
    heads, stored, outputs = weight.shape
    columns = weight.new_empty(outputs, heads, stored, dtype=torch.float32)
    return columns.copy_(weight.permute(2, 0, 1)).view(outputs, heads * stored)


def parts_of(heads: int, stored: int) -> int:
    """The most parts that a head's hidden units lie in, which do not start where a part does."""
    begins = math.gcd(stored, PRODUCT.block_cols)
    furthest = PRODUCT.block_cols - begins if heads > 1 else 0
    return (furthest + stored - 1) // PRODUCT.block_cols + 1


@functools.lru_cache(maxsize=4096)
def plan_heads(
    shape: tuple[int, ...],
    heads: int,
    stored: int,
    dtype: torch.dtype,
    keeps: bool,
    device: torch.device,
) -> HeadsPlan:
    """The plan of ``product_heads`` on x of this shape."""
    *leading, inner = shape
    rows, cols = math.prod(leading), heads * stored
    config = HeadsConstants(
        **constants_of(inner, cols_first=True, loads=False, whole=True, columns=3),
        KEEPS=keeps,
        HEADS=heads,
        STORED=stored,
    )
    add_parts = Launch(
        kernels.add_outputs_kernel,
        (cdiv(rows, SUM.block_rows) * heads,),
        device,
        (rows,),
        dict(num_warps=SUM.num_warps),
        HEADS=heads,
        STORED=stored,
        BLOCK_COLS=PRODUCT.block_cols,
        BLOCK_ROWS=SUM.block_rows,
    )
    product = plan_product(
        kernels.hopper_heads_kernel, rows, cols, config, 1, device, scalars=(rows,)
    )
    product.descriptors += (in_tiles(1, PRODUCT.block_cols, swizzled=0, bits=32),)
    return HeadsPlan(
        product,
        add_parts,
        parts=allocator((parts_of(heads, stored), heads, 3, rows), torch.float32, device),
        u=allocator((*leading, heads, stored), dtype, device) if keeps else None,
        out=allocator((*leading, heads, 3), torch.float32, device),
    )
