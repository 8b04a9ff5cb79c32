"""The forward pass: plans its launch, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._backends import card_of, interpreted
from ._configs import (
    FORWARD,
    FORWARD_PROGRAMS_PER_SM,
    SINGLE_TILE_FORWARD,
    chunk_rows,
    is_single_tile,
    power_of_2,
    single_tile_config,
    tile_config,
)
from ._launch import Allocate, Kind, Launch, is_current, kinds, memory
from ._operands import (
    Shape,
    TileLaunch,
    aligned,
    copied,
    describable,
    grid_of,
    head_strides,
    precision_of,
    present,
    to_copy,
)
from ._single_tile_kernels import _single_tile_forward_kernel
from ._streaming_forward_kernels import _streaming_forward_kernel


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
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Attention of ``q`` [B, Nq, H, D] to ``k`` and ``v`` [B, M, H, D].

    Returns:
        ``(o, lse, softmax, rest)``: o contiguous, like q; lse [B, H, Nq] in fp32, None without
        ``with_lse``. The others are for the backward pass, None without ``keep`` and where keys are
        one tile: softmax [2, B, H, Nq] in fp32, the maximum of each row of scores, in base 2, and
        one over the sum of their exponentials below it; rest, like o, what rounding took from it
        (None for fp32).
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_forward(q, k, v, key_lengths, scale, with_lse, keep)
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
    )
    o = plan.o()
    lse = None if plan.lse is None else plan.lse()
    softmax = None if plan.softmax is None else plan.softmax()
    rest = None if plan.rest is None else plan.rest()
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        plan.launch(operands, (key_lengths, o, lse, softmax, rest), scale)
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
) -> ForwardPlan:
    """The plan for operands of these kinds: q, k, v and key_lengths; ``in_line`` if descriptors may
    start where they do.
    """
    *read, lengths = operands
    batches, queries, heads, width = shape
    dtype = present(read[0])[0]
    few = is_single_tile(keys, width, dtype.itemsize, card_of(device))
    keep = keep and not few
    plan = ForwardPlan(
        None,
        to_copy(read),
        o=memory(shape, dtype, device),
        lse=memory((batches, heads, queries), torch.float32, device) if with_lse else None,
        softmax=memory((2, batches, heads, queries), torch.float32, device) if keep else None,
        rest=memory(shape, dtype, device) if keep and dtype.itemsize < 4 else None,
    )
    if not math.prod(shape):
        return plan
    key_shape = (batches, keys, heads, width)
    given = [
        (x, present(kind)) for x, kind in zip((shape, key_shape, key_shape), read, strict=True)
    ]
    strides = [stride for one in given for stride in head_strides(*one)]
    integers = (*strides, queries, keys, heads)
    constants = dict(D=width, HAS_LENGTHS=lengths is not None, WITH_LSE=with_lse)
    arithmetic = dict(UPCAST=interpreted(), PRECISION=precision)
    if few:
        launch = plan_single_tile(key_shape, integers, constants, arithmetic, dtype, device)
    else:
        spanned = in_line and all(describable(*one) for one in given)
        constants |= dict(HAS_SOFTMAX=keep, HAS_REST=plan.rest is not None)
        launch = plan_streaming(key_shape, integers, constants, arithmetic, dtype, device, spanned)
    return plan._replace(launch=launch)


def plan_single_tile(
    key_shape: Shape,
    integers: tuple[int, ...],
    constants: dict,
    arithmetic: dict,
    dtype: torch.dtype,
    device: torch.device,
) -> TileLaunch:
    batches, keys, heads, width = key_shape
    *_, queries, _, _ = integers
    card = card_of(device)
    config = single_tile_config(SINGLE_TILE_FORWARD, keys, width, dtype.itemsize, card)
    programs = FORWARD_PROGRAMS_PER_SM * card.multiprocessors
    chunk = chunk_rows(batches * heads, queries, config.queries, programs)
    return TileLaunch(
        Launch(
            _single_tile_forward_kernel,
            grid_of(batches * heads * triton.cdiv(queries, chunk)),
            device,
            (*integers, chunk),
            dict(num_warps=config.num_warps),
            **constants,
            **arithmetic,
            BLOCK_Q=config.queries,
            BLOCK_K=power_of_2(keys),
            BLOCK_D=power_of_2(width),
            NUM_STAGES=config.num_stages,
        )
    )


def plan_streaming(
    key_shape: Shape,
    integers: tuple[int, ...],
    constants: dict,
    arithmetic: dict,
    dtype: torch.dtype,
    device: torch.device,
    spanned: bool,
) -> TileLaunch:
    batches, _, heads, width = key_shape
    *_, queries, _, _ = integers
    tasks = batches * heads
    config = tile_config(FORWARD, width, dtype.itemsize, card_of(device), spanned)
    launch = Launch(
        _streaming_forward_kernel,
        grid_of(tasks * triton.cdiv(queries, config.queries)),
        device,
        (*integers, tasks * queries),
        dict(num_warps=config.num_warps),
        **constants,
        DESCRIPTORS=config.descriptors,
        **arithmetic,
        BLOCK_Q=config.queries,
        BLOCK_K=config.keys,
        BLOCK_D=power_of_2(width),
        NUM_STAGES=config.num_stages,
    )
    blocks = (config.queries, config.keys, config.keys)
    return TileLaunch(launch, blocks if config.descriptors else ())
