"""The launches of the grouped linear layer, forward and backward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import Launch, cdiv
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from .._core.registration import empty_grad
from .._core.rows import MAX_ROWS

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class ProductConfig(NamedTuple):
    """Tiles of ``block_rows`` and ``block_cols``, sums over ``block_inner`` terms at a time."""

    block_rows: int
    block_cols: int
    block_inner: int
    num_warps: int
    num_stages: int


# The shortest side that tensor cores multiply.
SHORTEST = 16
SHORT = ProductConfig(128, 128, 64, num_warps=8, num_stages=3)
FP32 = ProductConfig(64, 64, 32, num_warps=4, num_stages=2)
# Numbers of one weight are counted in 32 bits.
MOST_NUMBERS = 2**31 - 1


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x ``[..., d]`` times the weight of each row's group: ``[..., S]``."""
    y = x.new_empty((*x.shape[:-1], weight.shape[1]))
    grouped_product(x.contiguous(), weight.contiguous(), ends.contiguous(), y, cols_first=True)
    return y


def grouped_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, x_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, empty where not asked for."""
    dy, x, ends = dy.contiguous(), x.contiguous(), ends.contiguous()
    dx = dweight = empty_grad(x)
    if x_grad:
        dx = x.new_empty(x.shape)
        grouped_product(dy, weight.contiguous(), ends, dx, cols_first=False)
    if weight_grad:
        dweight = weight.new_empty(weight.shape)
        plan = plan_weight(x.shape[:-1].numel(), *weight.shape, x.dtype, ends.dtype, x.device)
        if plan is not None:
            plan((dy, x, ends, dweight))
    return dx, dweight


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, y: Tensor, cols_first: bool) -> None:
    """Write the rows of y: x times each group's matrix, or its transpose."""
    rows, inner, cols = x.shape[:-1].numel(), x.shape[-1], y.shape[-1]
    sizes = rows, inner, cols, len(weight)
    launch = plan_product(*sizes, cols_first, x.dtype, ends.dtype, x.device)
    if launch is not None:
        launch((x, weight, ends, y))


def config_of(dtype: torch.dtype, *sides: int) -> ProductConfig:
    """The tiles, none longer than a side needs."""
    config = FP32 if dtype == torch.float32 else SHORT
    rows, cols, inner = (
        min(block, max(SHORTEST, power_of_2(side)))
        for block, side in zip(config[:3], sides, strict=True)
    )
    return ProductConfig(rows, cols, inner, *config[3:])


def check_countable(rows: int, numbers: int, most_rows: int = MAX_ROWS) -> None:
    """Rows, and the numbers in the weight of a group, must be few enough for the kernels' numbers.

    Raises:
        ValueError: they are not.
    """
    if rows > most_rows or numbers > MOST_NUMBERS:
        raise ValueError(
            f"the kernels serve up to {most_rows} rows and {MOST_NUMBERS} numbers in the weight of "
            f"a group, got {rows} and {numbers}"
        )


@functools.lru_cache(maxsize=4096)
def plan_product(
    rows: int,
    inner: int,
    cols: int,
    groups: int,
    cols_first: bool,
    dtype: torch.dtype,
    ends_dtype: torch.dtype,
    device: torch.device,
) -> Launch | None:
    """The launch over all rows and columns; None where there are none."""
    if not rows or not cols:
        return None
    config = config_of(dtype, SHORT.block_rows, cols, max(inner, 1))
    # Rows of tiles that are not whole, or of none of the rows, are counted too.
    most_rows = min(MAX_ROWS, max(0, 2**31 - (groups + 1) * config.block_rows))
    check_countable(rows, inner * cols, most_rows)
    # A group's last tile is not whole, nor is that of the rows behind them.
    tiles = rows // config.block_rows + groups + 1
    return Launch(
        kernels.grouped_product_kernel,
        (tiles * cdiv(cols, config.block_cols),),
        device,
        (rows,),
        dict(num_warps=config.num_warps),
        INNER=inner,
        COLS=cols,
        GROUPS=groups,
        COLS_FIRST=cols_first,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLS=config.block_cols,
        BLOCK_INNER=config.block_inner,
        NUM_STAGES=config.num_stages,
        UPCAST=interpreted(),
    )


@functools.lru_cache(maxsize=4096)
def plan_weight(
    rows: int,
    groups: int,
    cols: int,
    inner: int,
    dtype: torch.dtype,
    ends_dtype: torch.dtype,
    device: torch.device,
) -> Launch | None:
    """The launch over all weights, whose sums are over rows; None where there are none."""
    if not groups or not cols or not inner:
        return None
    check_countable(rows, inner * cols)
    # As tiles of a product: columns of dy, columns of x, rows.
    config = config_of(dtype, cols, inner, SHORT.block_inner)
    blocks = cdiv(cols, config.block_rows) * cdiv(inner, config.block_cols)
    return Launch(
        kernels.grouped_weight_kernel,
        (groups * blocks,),
        device,
        (rows,),
        dict(num_warps=config.num_warps),
        INNER=inner,
        COLS=cols,
        GROUPS=groups,
        BLOCK_ROWS=config.block_inner,
        BLOCK_COLS=config.block_rows,
        BLOCK_INNER=config.block_cols,
        NUM_STAGES=config.num_stages,
        UPCAST=interpreted(),
    )
