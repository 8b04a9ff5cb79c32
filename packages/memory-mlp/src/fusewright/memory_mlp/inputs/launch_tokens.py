"""Tokens that are left out, and the logits of the gates: tables, plans and launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import Launch, Layout, Plan, allocator, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.operands import all_contiguous
from .launch import contiguous_after, parts_plan

if TYPE_CHECKING:
    from . import kernels_tokens
else:
    kernels_tokens = lazy_module(__package__, "kernels_tokens")

Tensor = torch.Tensor


class TokensTile(NamedTuple):
    """One program takes whole tokens, as many as fit in ``size`` bytes."""

    size: int
    num_warps: int

    def rows(self, columns: int, dtype: torch.dtype) -> int:
        """Tokens of a program, of ``columns`` numbers each, a power of two; at least one."""
        return max(1, self.size // (columns * dtype.itemsize))


class CountTile(NamedTuple):
    """One program counts ``size`` tokens at a time."""

    size: int
    num_warps: int


class GatedTile(NamedTuple):
    """A warp takes ``numbers`` numbers of tokens, a program as many warps as one token needs, but
    no fewer than ``num_warps``; of the gates' weights it holds up to ``held`` numbers a thread.
    """

    numbers: int
    held: int
    num_warps: int

    def warps(self, columns: int) -> int:
        """Of a program whose tokens have ``columns`` numbers, a power of two."""
        return max(self.num_warps, columns // self.numbers)

    def rows(self, columns: int) -> int:
        """Tokens of a program: no more than threads, at least one."""
        warps = self.warps(columns)
        return max(1, min(32 * warps, warps * self.numbers // columns))

    def at_once(self, columns: int, logits: int) -> int:
        """Rows of the gates' weights that a program takes at a time, of ``logits``."""
        return max(1, min(logits, 32 * self.warps(columns) * self.held // columns))


class WeightsTile(NamedTuple):
    """One program takes ``columns`` columns of ``tokens`` tokens."""

    columns: int
    tokens: int


# Source: results/tuning-input-h200-torch2.11-triton3.6.csv, bf16; TOKENS is unmeasured. The rows
# are those of x, as wide as the layer.
TOKENS = TokensTile(size=8192, num_warps=8)
COUNTED_TOKENS = CountTile(size=512, num_warps=2)
GATED_TOKENS = GatedTile(numbers=2048, held=80, num_warps=1)
# Both are programs of one launch.
GATED_TOKENS_BACKWARD = GatedTile(numbers=1024, held=20, num_warps=4)
GATE_WEIGHTS = WeightsTile(columns=64, tokens=32)


class TokensConfig(NamedTuple):
    """The constants of a kernel over whole tokens."""

    WIDTH: int
    BLOCK_WIDTH: int
    ROWS: int
    FLAGS: int = 0
    BLOCK_FLAGS: int = 1
    LOGITS: int = 0
    # Of the gates' weights: rows at a time, and what a program takes of their gradient.
    AT_ONCE: int = 1
    COLS: int = 0
    TOKENS: int = 0
    # The smallest tile that tl.dot multiplies.
    BLOCK_LOGITS: int = 16


class CountConfig(NamedTuple):
    """The constants of the kernel that counts tokens."""

    BLOCK: int


def finite_tokens(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(x with zeros for tokens that are masked or not finite, which are neither)``."""
    operands = contiguous_after(x, mask)
    return token_plan(x.shape, layouts(*operands), None, x.device).run(operands)


def kept_tokens(x: Tensor, kept: Tensor, mask: Tensor | None, other: float) -> Tensor:
    """x where all of kept is True, ``other`` elsewhere, zeros where it is masked."""
    operands = contiguous_after(x, kept, mask)
    plan = token_plan(x.shape, layouts(*operands), kept.shape[-1], x.device)
    return plan.run(operands, (other,))[0]


@functools.lru_cache(maxsize=4096)
def token_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    flags: int | None,
    device: torch.device,
) -> Plan:
    """The plan for operands of these layouts, the first x ``[B, T, dim]``, and ``flags`` flags of
    each token; without flags that of finite_tokens.
    """
    x = operands[0]
    assert x is not None
    batch, tokens, width = shape
    rows = TOKENS.rows(power_of_2(width), x[0])
    place = shape, x, rows, TOKENS.num_warps, device
    y = allocator(shape, x[0], device)
    if flags is not None:
        block = power_of_2(flags)
        kernel = kernels_tokens.kept_tokens_kernel
        return Plan(launch_of_rows(kernel, *place, FLAGS=flags, BLOCK_FLAGS=block), (), (y,))
    present = allocator((batch, tokens), torch.bool, device)
    return Plan(launch_of_rows(kernels_tokens.finite_tokens_kernel, *place), (), (y, present))


def launch_of_rows(
    kernel: Any,
    shape: tuple[int, ...],
    x: Layout,
    rows: int,
    num_warps: int,
    device: torch.device,
    **constants: int,
) -> Launch | None:
    """A kernel whose programs take ``rows`` tokens of x each; None where there are no tokens."""
    batch, tokens, width = shape
    if not batch * tokens:
        return None
    return Launch(
        kernel,
        (cdiv(batch * tokens, rows),),
        device,
        (tokens, batch * tokens, *x[1][:2]),
        dict(num_warps=num_warps),
        CONFIG=TokensConfig(width, power_of_2(width), rows, **constants),
    )


def gated_tokens(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x with zeros for tokens that are masked or not finite, which are neither, logits)``."""
    operands = contiguous_after(x, weight, bias, mask)
    return gated_plan(x.shape, len(weight), layouts(*operands), x.device).run(operands)


@functools.lru_cache(maxsize=4096)
def gated_plan(
    shape: tuple[int, ...], logits: int, operands: tuple[Layout | None, ...], device: torch.device
) -> Plan:
    """The plan for operands of these layouts, x ``[B, T, dim]``, weight, bias and mask."""
    x, *_ = operands
    assert x is not None
    batch, tokens, width = shape
    block = power_of_2(width)
    launch = launch_of_rows(
        *(kernels_tokens.gated_tokens_kernel, shape, x),
        *(GATED_TOKENS.rows(block), GATED_TOKENS.warps(block), device),
        LOGITS=logits,
        AT_ONCE=GATED_TOKENS.at_once(block, logits),
    )
    outputs = (
        allocator(shape, x[0], device),
        allocator((batch, tokens), torch.bool, device),
        allocator((batch, tokens, logits), torch.float32, device),
    )
    return Plan(launch, (), outputs)


def gated_tokens_backward(
    y: Tensor, present: Tensor, weight: Tensor, dy: Tensor | None, dlogits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias)."""
    operands = all_contiguous(y, present, weight, dy, dlogits)
    plan, add = gated_backward_plan(y.shape, len(weight), layouts(*operands), y.device)
    dx, parts = plan.run(operands)
    return dx, *add.run((parts,))


@functools.lru_cache(maxsize=4096)
def gated_backward_plan(
    shape: tuple[int, ...], logits: int, operands: tuple[Layout | None, ...], device: torch.device
) -> tuple[Plan, Plan]:
    """The plan for operands of these layouts: y ``[B, T, dim]``, present, weight, and the gradients
    of y and of the logits; and the one that adds the partial sums of the weights' and biases'
    gradients.
    """
    y, _, weight, *_ = operands
    assert y is not None
    assert weight is not None
    batch, tokens, width = shape
    config = GATED_TOKENS_BACKWARD
    parts = cdiv(batch * tokens, GATE_WEIGHTS.tokens)
    launch = None
    if batch * tokens:
        block = power_of_2(width)
        row_tiles = cdiv(batch * tokens, config.rows(block))
        launch = Launch(
            kernels_tokens.gated_tokens_backward_kernel,
            (row_tiles + parts * cdiv(width, GATE_WEIGHTS.columns),),
            device,
            (batch * tokens, row_tiles),
            dict(num_warps=config.warps(block)),
            CONFIG=TokensConfig(
                width,
                block,
                config.rows(block),
                LOGITS=logits,
                AT_ONCE=config.at_once(block, logits),
                COLS=GATE_WEIGHTS.columns,
                TOKENS=GATE_WEIGHTS.tokens,
            ),
        )
    dx = allocator(shape, y[0], device)
    sums = allocator((parts, logits * (width + 1)), torch.float32, device)
    grads = tuple(allocator(size, weight[0], device) for size in ((logits, width), (logits,)))
    return Plan(launch, (), (dx, sums)), parts_plan(parts, logits * width, logits, grads, device)


def count_tokens(
    written: Tensor,
    skipped: Tensor,
    position: Tensor,
    mask: Tensor | None,
    lost: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens not written now, in all, tokens since the row's start)``."""
    operands = all_contiguous(written, skipped, position, mask, lost)
    plan = count_plan(written.shape, mask is not None, lost is not None, written.device)
    return plan.run(operands)


@functools.lru_cache(maxsize=4096)
def count_plan(
    shape: tuple[int, ...], has_mask: bool, has_lost: bool, device: torch.device
) -> Plan:
    """The plan for ``written [B, T, heads]``."""
    batch, tokens, heads = shape
    launch = None
    if batch * heads:
        launch = Launch(
            kernels_tokens.count_tokens_kernel,
            (batch, heads),
            device,
            (tokens, heads),
            dict(num_warps=COUNTED_TOKENS.num_warps),
            CONFIG=CountConfig(COUNTED_TOKENS.size),
        )
    counts = allocator((batch, heads), torch.int64, device)
    return Plan(launch, (), (counts, counts, allocator((batch,), torch.int64, device)))
