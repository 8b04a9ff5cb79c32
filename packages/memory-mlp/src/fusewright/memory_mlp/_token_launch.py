"""Tokens that are left out: plans, allocates and launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ._input_configs import TOKENS
from ._input_launch import contiguous, with_contiguous_rows
from ._launch import Allocate, Kind, Launch, is_current, kinds, memory
from ._token_kernels import _finite_tokens_kernel, _kept_tokens_kernel

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
