"""Tokens that are left out: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ._input_configs import (
    COUNTED_TOKENS,
    GATE_WEIGHTS,
    GATED_TOKENS,
    GATED_TOKENS_BACKWARD,
    TOKENS,
)
from ._input_launch import contiguous, shares_launch, with_contiguous_rows
from ._launch import Allocate, Kind, Launch, is_current, kinds, memory
from ._token_kernels import _count_tokens_kernel, _finite_tokens_kernel, _kept_tokens_kernel
from ._token_logits_kernels import _gated_tokens_backward_kernel, _gated_tokens_kernel

Tensor = torch.Tensor


class Plan(NamedTuple):
    """One launch, none where there are no tokens, and its outputs."""

    launch: Launch | None
    y: Allocate
    present: Allocate


def launch_finite_tokens(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(x with zeros for tokens that are masked or not finite, which are neither)``."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_finite_tokens(x, mask)
    x, mask = with_contiguous_rows(x), contiguous(mask)
    plan = token_plan(_finite_tokens_kernel, x.shape, kinds(x, mask), None, x.device)
    y, present = plan.y(), plan.present()
    if plan.launch is not None:
        plan.launch((x, mask, y, present))
    return y, present


def launch_kept_tokens(x: Tensor, kept: Tensor, mask: Tensor | None, other: float) -> Tensor:
    """x where all of kept is True, ``other`` elsewhere, zeros where it is masked."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_kept_tokens(x, kept, mask, other)
    x, kept, mask = with_contiguous_rows(x), kept.contiguous(), contiguous(mask)
    plan = token_plan(_kept_tokens_kernel, x.shape, kinds(x, mask), kept.shape[-1], x.device)
    y = plan.y()
    if plan.launch is not None:
        plan.launch((x, kept, mask, y), (other,))
    return y


@functools.lru_cache(maxsize=4096)
def token_plan(
    kernel: Any,
    shape: tuple[int, ...],
    operands: tuple[Kind | None, ...],
    flags: int | None,
    device: torch.device,
) -> Plan:
    """The plan for operands of these kinds, x ``[B, T, dim]`` and mask, and as many flags of every
    token.
    """
    x, mask = operands
    assert x is not None
    batch, tokens, width = shape
    launch = None
    if batch * tokens:
        block = triton.next_power_of_2(width)
        rows = TOKENS.rows(block, x[0])
        sizes = (
            {} if flags is None else dict(FLAGS=flags, BLOCK_FLAGS=triton.next_power_of_2(flags))
        )
        launch = Launch(
            kernel,
            (triton.cdiv(batch * tokens, rows),),
            device,
            (tokens, batch * tokens, *x[1][:2]),
            dict(num_warps=TOKENS.num_warps),
            **sizes,
            HAS_MASK=mask is not None,
            WIDTH=width,
            BLOCK_WIDTH=block,
            ROWS=rows,
        )
    return Plan(launch, memory(shape, x[0], device), memory((batch, tokens), torch.bool, device))


class GatedPlan(NamedTuple):
    """One launch, none where there are no tokens, and its outputs."""

    launch: Launch | None
    y: Allocate
    present: Allocate
    logits: Allocate


class GatedBackwardPlan(NamedTuple):
    """One launch, and what adds the shares of the weights' and biases' gradients."""

    launch: Launch | None
    add_shares: Launch
    dx: Allocate
    dweight: Allocate
    dbias: Allocate
    parts: Allocate


def launch_gated_tokens(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x with zeros for tokens that are masked or not finite, which are neither, logits)``."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_gated_tokens(x, weight, bias, mask)
    operands = with_contiguous_rows(x), *(contiguous(t) for t in (weight, bias, mask))
    plan = gated_plan(x.shape, len(weight), kinds(*operands), x.device)
    outputs = plan.y(), plan.present(), plan.logits()
    if plan.launch is not None:
        plan.launch((*operands, *outputs))
    return outputs


@functools.lru_cache(maxsize=4096)
def gated_plan(
    shape: tuple[int, ...], logits: int, operands: tuple[Kind | None, ...], device: torch.device
) -> GatedPlan:
    """The plan for operands of these kinds, x ``[B, T, dim]``, weight, bias and mask."""
    x, _, _, mask = operands
    assert x is not None
    batch, tokens, width = shape
    launch = None
    if batch * tokens:
        block = triton.next_power_of_2(width)
        rows = GATED_TOKENS.rows(block)
        launch = Launch(
            _gated_tokens_kernel,
            (triton.cdiv(batch * tokens, rows),),
            device,
            (tokens, batch * tokens, *x[1][:2]),
            dict(num_warps=GATED_TOKENS.warps(block)),
            HAS_MASK=mask is not None,
            LOGITS=logits,
            AT_ONCE=GATED_TOKENS.at_once(block, logits),
            WIDTH=width,
            BLOCK_WIDTH=block,
            ROWS=rows,
        )
    return GatedPlan(
        launch,
        memory(shape, x[0], device),
        memory((batch, tokens), torch.bool, device),
        memory((batch, tokens, logits), torch.float32, device),
    )


def launch_gated_tokens_backward(
    y: Tensor, present: Tensor, weight: Tensor, dy: Tensor | None, dlogits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias)."""
    if not is_current(y.device):
        with torch.cuda.device(y.device):
            return launch_gated_tokens_backward(y, present, weight, dy, dlogits)
    operands = tuple(contiguous(t) for t in (y, present, weight, dy, dlogits))
    plan = gated_backward_plan(y.shape, len(weight), kinds(*operands), y.device)
    dx, dweight, dbias, parts = plan.dx(), plan.dweight(), plan.dbias(), plan.parts()
    if plan.launch is not None:
        plan.launch((*operands, dx, parts))
    plan.add_shares((parts, dweight, dbias))
    return dx, dweight, dbias


@functools.lru_cache(maxsize=4096)
def gated_backward_plan(
    shape: tuple[int, ...], logits: int, operands: tuple[Kind | None, ...], device: torch.device
) -> GatedBackwardPlan:
    """The plan for operands of these kinds: y ``[B, T, dim]``, present, weight, and the gradients
    of y and of the logits.
    """
    y, _, weight, dy, _ = operands
    assert y is not None
    assert weight is not None
    batch, tokens, width = shape
    config = GATED_TOKENS_BACKWARD
    shares = triton.cdiv(batch * tokens, GATE_WEIGHTS.tokens)
    launch = None
    if batch * tokens:
        block = triton.next_power_of_2(width)
        row_tiles = triton.cdiv(batch * tokens, config.rows(block))
        launch = Launch(
            _gated_tokens_backward_kernel,
            (row_tiles + shares * triton.cdiv(width, GATE_WEIGHTS.columns),),
            device,
            (batch * tokens, row_tiles),
            dict(num_warps=config.warps(block)),
            HAS_DY=dy is not None,
            LOGITS=logits,
            # What a product takes at least.
            BLOCK_LOGITS=16,
            AT_ONCE=config.at_once(block, logits),
            WIDTH=width,
            BLOCK_WIDTH=block,
            ROWS=config.rows(block),
            COLS=GATE_WEIGHTS.columns,
            SHARE=GATE_WEIGHTS.tokens,
        )
    return GatedBackwardPlan(
        launch,
        shares_launch(shares, logits * width, logits, device),
        memory(shape, y[0], device),
        memory((logits, width), weight[0], device),
        memory((logits,), weight[0], device),
        memory((shares, logits * (width + 1)), torch.float32, device),
    )


class CountPlan(NamedTuple):
    """One launch, none where there are no rows or heads, and its outputs."""

    launch: Launch | None
    counts: Allocate
    position: Allocate


def launch_count_tokens(
    written: Tensor,
    skipped: Tensor,
    position: Tensor,
    mask: Tensor | None,
    lost: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens not written now, in all, tokens that came)``."""
    if not is_current(written.device):
        with torch.cuda.device(written.device):
            return launch_count_tokens(written, skipped, position, mask, lost)
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
            _count_tokens_kernel,
            (batch, heads),
            device,
            (tokens, heads),
            dict(num_warps=COUNTED_TOKENS.num_warps),
            HAS_MASK=has_mask,
            HAS_LOST=has_lost,
            BLOCK=COUNTED_TOKENS.size,
        )
    whole = torch.int64
    return CountPlan(launch, memory((batch, heads), whole, device), memory((batch,), whole, device))
