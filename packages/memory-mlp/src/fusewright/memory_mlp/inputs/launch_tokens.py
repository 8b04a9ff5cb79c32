"""Tokens that are left out, and the logits of the gates: tables, plans and launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, Launch, Layout, allocator, cdiv, is_current, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.operands import contiguous
from .launch import parts_launch, with_contiguous_rows

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


class Plan(NamedTuple):
    """One launch, none where there are no tokens, and its outputs."""

    launch: Launch | None
    y: Allocator
    present: Allocator


def finite_tokens(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(x with zeros for tokens that are masked or not finite, which are neither)``."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return finite_tokens(x, mask)
    x, mask = with_contiguous_rows(x), contiguous(mask)
    plan = token_plan(x.shape, layouts(x, mask), None, x.device)
    y, present = plan.y(), plan.present()
    if plan.launch is not None:
        plan.launch((x, mask, y, present))
    return y, present


def kept_tokens(x: Tensor, kept: Tensor, mask: Tensor | None, other: float) -> Tensor:
    """x where all of kept is True, ``other`` elsewhere, zeros where it is masked."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return kept_tokens(x, kept, mask, other)
    x, kept, mask = with_contiguous_rows(x), kept.contiguous(), contiguous(mask)
    plan = token_plan(x.shape, layouts(x, mask), kept.shape[-1], x.device)
    y = plan.y()
    if plan.launch is not None:
        plan.launch((x, kept, mask, y), (other,))
    return y


@functools.lru_cache(maxsize=4096)
def token_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    flags: int | None,
    device: torch.device,
) -> Plan:
    """The plan for operands of these layouts, x ``[B, T, dim]`` and mask, and ``flags`` flags of
    each token; without flags that of finite_tokens.
    """
    x, _ = operands
    assert x is not None
    batch, tokens, width = shape
    launch = None
    if batch * tokens:
        block = power_of_2(width)
        rows = TOKENS.rows(block, x[0])
        kernel, config = kernels_tokens.finite_tokens_kernel, TokensConfig(width, block, rows)
        if flags is not None:
            kernel = kernels_tokens.kept_tokens_kernel
            config = TokensConfig(width, block, rows, flags, power_of_2(flags))
        launch = Launch(
            kernel,
            (cdiv(batch * tokens, rows),),
            device,
            (tokens, batch * tokens, *x[1][:2]),
            dict(num_warps=TOKENS.num_warps),
            CONFIG=config,
        )
    return Plan(
        launch, allocator(shape, x[0], device), allocator((batch, tokens), torch.bool, device)
    )


class GatedPlan(NamedTuple):
    """One launch, none where there are no tokens, and its outputs."""

    launch: Launch | None
    y: Allocator
    present: Allocator
    logits: Allocator


class GatedBackwardPlan(NamedTuple):
    """One launch, and the one that adds the partial sums of the weights' and biases' gradients."""

    launch: Launch | None
    add_parts: Launch
    dx: Allocator
    dweight: Allocator
    dbias: Allocator
    parts: Allocator


def gated_tokens(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x with zeros for tokens that are masked or not finite, which are neither, logits)``."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return gated_tokens(x, weight, bias, mask)
    operands = with_contiguous_rows(x), *(contiguous(t) for t in (weight, bias, mask))
    plan = gated_plan(x.shape, len(weight), layouts(*operands), x.device)
    outputs = plan.y(), plan.present(), plan.logits()
    if plan.launch is not None:
        plan.launch((*operands, *outputs))
    return outputs


@functools.lru_cache(maxsize=4096)
def gated_plan(
    shape: tuple[int, ...], logits: int, operands: tuple[Layout | None, ...], device: torch.device
) -> GatedPlan:
    """The plan for operands of these layouts, x ``[B, T, dim]``, weight, bias and mask."""
    x, *_ = operands
    assert x is not None
    batch, tokens, width = shape
    launch = None
    if batch * tokens:
        block = power_of_2(width)
        rows = GATED_TOKENS.rows(block)
        launch = Launch(
            kernels_tokens.gated_tokens_kernel,
            (cdiv(batch * tokens, rows),),
            device,
            (tokens, batch * tokens, *x[1][:2]),
            dict(num_warps=GATED_TOKENS.warps(block)),
            CONFIG=TokensConfig(
                width, block, rows, LOGITS=logits, AT_ONCE=GATED_TOKENS.at_once(block, logits)
            ),
        )
    return GatedPlan(
        launch,
        allocator(shape, x[0], device),
        allocator((batch, tokens), torch.bool, device),
        allocator((batch, tokens, logits), torch.float32, device),
    )


def gated_tokens_backward(
    y: Tensor, present: Tensor, weight: Tensor, dy: Tensor | None, dlogits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias)."""
    if not is_current(y.device):
        with torch.cuda.device(y.device):
            return gated_tokens_backward(y, present, weight, dy, dlogits)
    operands = tuple(contiguous(t) for t in (y, present, weight, dy, dlogits))
    plan = gated_backward_plan(y.shape, len(weight), layouts(*operands), y.device)
    dx, dweight, dbias, parts = plan.dx(), plan.dweight(), plan.dbias(), plan.parts()
    if plan.launch is not None:
        plan.launch((*operands, dx, parts))
    plan.add_parts((parts, dweight, dbias))
    return dx, dweight, dbias


@functools.lru_cache(maxsize=4096)
def gated_backward_plan(
    shape: tuple[int, ...], logits: int, operands: tuple[Layout | None, ...], device: torch.device
) -> GatedBackwardPlan:
    """The plan for operands of these layouts: y ``[B, T, dim]``, present, weight, and the gradients
    of y and of the logits.
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
    return GatedBackwardPlan(
        launch,
        parts_launch(parts, logits * width, logits, device),
        allocator(shape, y[0], device),
        allocator((logits, width), weight[0], device),
        allocator((logits,), weight[0], device),
        allocator((parts, logits * (width + 1)), torch.float32, device),
    )


class CountPlan(NamedTuple):
    """One launch, none where there are no rows or heads, and its outputs."""

    launch: Launch | None
    counts: Allocator
    position: Allocator


def count_tokens(
    written: Tensor,
    skipped: Tensor,
    position: Tensor,
    mask: Tensor | None,
    lost: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens not written now, in all, tokens since the row's start)``."""
    if not is_current(written.device):
        with torch.cuda.device(written.device):
            return count_tokens(written, skipped, position, mask, lost)
    operands = tuple(contiguous(t) for t in (written, skipped, position, mask, lost))
    plan = count_plan(written.shape, mask is not None, lost is not None, written.device)
    outputs = plan.counts(), plan.counts(), plan.position()
    if plan.launch is not None:
        plan.launch((*operands, *outputs))
    return outputs


@functools.lru_cache(maxsize=4096)
def count_plan(
    shape: tuple[int, ...], has_mask: bool, has_lost: bool, device: torch.device
) -> CountPlan:
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
    whole = torch.int64
    return CountPlan(
        launch, allocator((batch, heads), whole, device), allocator((batch,), whole, device)
    )
