"""The forward pass: plans its launch, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._configs import (
    FORWARD,
    FORWARD_PROGRAMS_PER_SM,
    SINGLE_TILE_FORWARD,
    WINDOW_FORWARD,
    chunk_rows,
    single_tile_config,
    tile_config,
)
from ._launch import Allocate, Kind, copied, is_current, kinds, made, memory
from ._operands import Shape
from ._problem import Band, Problem, TileLaunch, aligned, precision_of, problem_of
from ._single_tile_kernels import _single_tile_forward_kernel
from ._streaming_forward_kernels import _streaming_forward_kernel
from ._window_forward_kernels import _window_forward_kernel


class ForwardPlan(NamedTuple):
    """One forward pass: what it launches (nothing where there are no queries), which of q, k and v
    it copies first, and the memory of its outputs.
    """

    launch: TileLaunch | None
    copies: tuple[bool, ...]
    o: Allocate
    lse: Allocate | None
    softmax: Allocate | None
    rest: Allocate | None


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    scale: float,
    with_lse: bool,
    keep: bool = True,
    band: Band | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Attention of ``q`` [B, Nq, H, D] to ``k`` and ``v`` [B, M, H, D]: to every key that a task
    has, or to those in a band.

    Returns:
        ``(o, lse, softmax, rest)``: o contiguous, like q; lse [B, H, Nq] in fp32, None without
        ``with_lse``. The others are for the backward pass, None without ``keep`` and where keys are
        one tile: softmax [2, B, H, Nq] in fp32, the maximum of each row of scores, in base 2, and
        one over the sum of their exponentials below it; rest, like o, what rounding took from it
        (None for fp32).
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_forward(q, k, v, key_lengths, scale, with_lse, keep, band)
    if key_lengths is not None:
        key_lengths = key_lengths.contiguous()
    operands = q, k, v
    plan = forward_plan(
        q.shape,
        k.shape[1],
        kinds(*operands, key_lengths),
        with_lse,
        keep,
        aligned(*operands),
        precision_of(q.dtype),
        q.device,
        band,
    )
    o = plan.o()
    lse, softmax, rest = made(plan.lse), made(plan.softmax), made(plan.rest)
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        outputs = o, lse, softmax, rest
        plan.launch(operands, (key_lengths, *outputs) if band is None else outputs, scale)
    return o, lse, softmax, rest


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Kind | None, ...],
    with_lse: bool,
    keep: bool,
    in_line: bool,
    precision: str,
    device: torch.device,
    band: Band | None,
) -> ForwardPlan:
    """The plan for operands of these kinds: q, k, v and key_lengths; ``in_line`` if descriptors may
    start where they do.
    """
    problem = problem_of(shape, keys, operands, in_line, precision, device, band)
    rows = (problem.batches, problem.heads, problem.queries)
    keep = keep and not problem.single_tile
    narrow = problem.dtype.itemsize < 4
    plan = ForwardPlan(
        None,
        problem.copies,
        o=memory(shape, problem.dtype, device),
        lse=memory(rows, torch.float32, device) if with_lse else None,
        softmax=memory((2, *rows), torch.float32, device) if keep else None,
        rest=memory(shape, problem.dtype, device) if keep and narrow else None,
    )
    if not math.prod(shape):
        return plan
    if problem.single_tile:
        return plan._replace(launch=plan_single_tile(problem, with_lse))
    return plan._replace(launch=plan_streaming(problem, with_lse, keep))


def plan_single_tile(problem: Problem, with_lse: bool) -> TileLaunch:
    config = single_tile_config(SINGLE_TILE_FORWARD, problem)
    programs = FORWARD_PROGRAMS_PER_SM * problem.card.multiprocessors
    chunk = chunk_rows(problem.all_heads, problem.queries, config.queries, programs)
    return TileLaunch(
        _single_tile_forward_kernel,
        problem,
        config,
        problem.all_heads * triton.cdiv(problem.queries, chunk),
        (chunk,),
        WITH_LSE=with_lse,
    )


def plan_streaming(problem: Problem, with_lse: bool, keep: bool) -> TileLaunch:
    banded = problem.band is not None
    config = tile_config(WINDOW_FORWARD if banded else FORWARD, problem)
    return TileLaunch(
        _window_forward_kernel if banded else _streaming_forward_kernel,
        problem,
        config,
        problem.all_heads * triton.cdiv(problem.queries, config.queries),
        (problem.all_heads * problem.queries,),
        WITH_LSE=with_lse,
        HAS_SOFTMAX=keep,
        HAS_REST=keep and problem.dtype.itemsize < 4,
    )
