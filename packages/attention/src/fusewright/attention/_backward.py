"""The backward pass: plans its launches, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._backends import card_of, interpreted
from ._configs import (
    ADD_CHUNKS,
    BACKWARD_PROGRAMS_PER_SM,
    DKDV,
    DQ,
    SINGLE_TILE_BACKWARD,
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
from ._single_tile_kernels import _add_chunks_kernel, _single_tile_backward_kernel
from ._streaming_backward_kernels import _streaming_dkdv_kernel, _streaming_dq_kernel

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SingleTile(NamedTuple):
    """One launch for all gradients."""

    gradients: TileLaunch


class SingleTileChunks(NamedTuple):
    """One launch for dq and the shares of dk and dv from each chunk of queries, and one that adds
    these.
    """

    gradients: TileLaunch
    add_chunks: Launch
    shares: Allocate


class Streaming(NamedTuple):
    """One launch for dq, and for delta, which the next needs: dk and dv."""

    dq: TileLaunch
    dkdv: TileLaunch
    delta: Allocate


class BackwardPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or keys), which of do, q, k
    and v it copies first, and its memory.
    """

    launches: SingleTile | SingleTileChunks | Streaming | None
    copies: tuple[bool, ...]
    dq: Allocate
    dk: Allocate
    dv: Allocate


def launch_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    o: torch.Tensor | None,
    rest: torch.Tensor | None,
    softmax: torch.Tensor | None,
    scale: float,
) -> Gradients:
    """Gradients ``(dq, dk, dv)``, contiguous, from those of o and lse.

    Args:
        do: gradient of o.
        dlse: gradient of lse, or None.
        q, k, v, key_lengths, scale: as in the forward pass.
        o, rest, softmax: what the forward pass returned; not read where keys are one tile.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_backward(do, dlse, q, k, v, key_lengths, o, rest, softmax, scale)
    dlse, key_lengths = (None if x is None else x.contiguous() for x in (dlse, key_lengths))
    operands = do, q, k, v
    plan = backward_plan(
        q.shape,
        k.shape[1],
        kinds(*operands, key_lengths),
        dlse is not None,
        aligned(*operands),
        precision_of(q.dtype),
        q.device,
    )
    dq, dk, dv = plan.dq(), plan.dk(), plan.dv()
    if plan.copies:
        operands = copied(operands, plan.copies)
    match plan.launches:
        case SingleTile(gradients):
            gradients(operands, (dlse, key_lengths, dq, dk, dv), scale)
        case SingleTileChunks(gradients, add_chunks, shares):
            dk_shares, dv_shares = shares(), shares()
            gradients(operands, (dlse, key_lengths, dq, dk_shares, dv_shares), scale)
            add_chunks((dk_shares, dv_shares, dk, dv))
        case Streaming(launch_dq, launch_dkdv, allocate_delta):
            delta = allocate_delta()
            launch_dq(operands, (dlse, key_lengths, o, rest, softmax, delta, dq), scale)
            launch_dkdv(operands, (key_lengths, softmax, delta, dk, dv), scale)
        case None:
            for grad in (dq, dk, dv):
                grad.zero_()
    return dq, dk, dv


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Kind | None, ...],
    has_dlse: bool,
    in_line: bool,
    precision: str,
    device: torch.device,
) -> BackwardPlan:
    """The plan for operands of these kinds: do, q, k, v and key_lengths; ``in_line`` if descriptors
    may start where they do.
    """
    *read, lengths = operands
    batches, queries, heads, width = shape
    key_shape = (batches, keys, heads, width)
    dtype = present(read[1])[0]
    grads = [memory(x, dtype, device) for x in (shape, key_shape, key_shape)]
    plan = BackwardPlan(None, to_copy(read), *grads)
    if not math.prod(shape) or not keys:
        return plan
    shapes = (shape, shape, key_shape, key_shape)
    given = [(x, present(kind)) for x, kind in zip(shapes, read, strict=True)]
    strides = [stride for one in given for stride in head_strides(*one)]
    integers = (*strides, queries, keys, heads)
    constants = dict(D=width, HAS_LENGTHS=lengths is not None)
    arithmetic = dict(UPCAST=interpreted(), PRECISION=precision)
    if is_single_tile(keys, width, dtype.itemsize, card_of(device)):
        constants["HAS_DLSE"] = has_dlse
        launches = plan_single_tile(key_shape, integers, constants, arithmetic, dtype, device)
        return plan._replace(launches=launches)
    spanned = in_line and all(describable(*one) for one in given)
    return plan._replace(
        launches=plan_streaming(
            key_shape, integers, constants, has_dlse, arithmetic, dtype, device, spanned
        )
    )


def plan_single_tile(
    key_shape: Shape,
    integers: tuple[int, ...],
    constants: dict,
    arithmetic: dict,
    dtype: torch.dtype,
    device: torch.device,
) -> SingleTile | SingleTileChunks:
    batches, keys, heads, width = key_shape
    *_, queries, _, _ = integers
    card = card_of(device)
    config = single_tile_config(SINGLE_TILE_BACKWARD, keys, width, dtype.itemsize, card)
    programs = BACKWARD_PROGRAMS_PER_SM * card.multiprocessors
    chunk = chunk_rows(batches * heads, queries, config.queries, programs)
    chunks = triton.cdiv(queries, chunk)
    launch = Launch(
        _single_tile_backward_kernel,
        grid_of(batches * heads * chunks),
        device,
        (*integers, batches, chunk),
        dict(num_warps=config.num_warps),
        **constants,
        **arithmetic,
        BLOCK_Q=config.queries,
        BLOCK_K=power_of_2(keys),
        BLOCK_D=power_of_2(width),
        NUM_STAGES=config.num_stages,
    )
    if chunks == 1:
        return SingleTile(TileLaunch(launch))
    size = math.prod(key_shape)
    add_chunks = Launch(
        _add_chunks_kernel,
        grid_of(triton.cdiv(size, ADD_CHUNKS.block)),
        device,
        (size, chunks),
        dict(num_warps=ADD_CHUNKS.num_warps),
        BLOCK=ADD_CHUNKS.block,
    )
    shares = memory((chunks, *key_shape), torch.float32, device)
    return SingleTileChunks(TileLaunch(launch), add_chunks, shares)


def plan_streaming(
    key_shape: Shape,
    integers: tuple[int, ...],
    constants: dict,
    has_dlse: bool,
    arithmetic: dict,
    dtype: torch.dtype,
    device: torch.device,
    spanned: bool,
) -> Streaming:
    batches, keys, heads, width = key_shape
    *_, queries, _, _ = integers
    tasks = batches * heads

    def tile_launch(kernel, table, grid_rows, **more):
        config = tile_config(table, width, dtype.itemsize, card_of(device), spanned)
        launch = Launch(
            kernel,
            grid_of(tasks * grid_rows(config)),
            device,
            (*integers, tasks * queries),
            dict(num_warps=config.num_warps),
            **constants,
            **more,
            DESCRIPTORS=config.descriptors,
            **arithmetic,
            BLOCK_Q=config.queries,
            BLOCK_K=config.keys,
            BLOCK_D=power_of_2(width),
            NUM_STAGES=config.num_stages,
        )
        blocks = (config.queries, config.queries, config.keys, config.keys)
        return TileLaunch(launch, blocks if config.descriptors else ())

    return Streaming(
        tile_launch(
            _streaming_dq_kernel,
            DQ,
            lambda config: triton.cdiv(queries, config.queries),
            HAS_DLSE=has_dlse,
            HAS_REST=dtype.itemsize < 4,
        ),
        tile_launch(_streaming_dkdv_kernel, DKDV, lambda config: triton.cdiv(keys, config.keys)),
        memory((batches, heads, queries), torch.float32, device),
    )
