"""The backward pass: plans its launches, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from ._configs import (
    ADD_CHUNKS,
    BACKWARD_PROGRAMS_PER_SM,
    DKDV,
    DQ,
    SINGLE_TILE_BACKWARD,
    WINDOW_DKDV,
    WINDOW_DQ,
    TileConfig,
    chunk_rows,
    single_tile_config,
    tile_config,
)
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._operands import Shape
from ._problem import Band, Problem, TileLaunch, aligned, grid_of, precision_of, problem_of
from ._single_tile_kernels import _add_chunks_kernel, _single_tile_backward_kernel
from ._streaming_backward_kernels import _streaming_dkdv_kernel, _streaming_dq_kernel
from ._window_backward_kernels import _window_dkdv_kernel, _window_dq_kernel

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


class Banded(NamedTuple):
    """As Streaming; dk and dv of a prefix come as shares of chunks of queries, which one more
    launch adds. Without a prefix there is neither.
    """

    dq: TileLaunch
    dkdv: TileLaunch
    delta: Allocate
    add_chunks: Launch | None
    shares: Allocate | None


class BackwardPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or keys), which of do, q, k
    and v it copies first, and its memory.
    """

    launches: SingleTile | SingleTileChunks | Streaming | Banded | None
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
    band: Band | None = None,
) -> Gradients:
    """Gradients ``(dq, dk, dv)``, contiguous, from those of o and lse.

    Args:
        do: gradient of o.
        dlse: gradient of lse, or None.
        q, k, v, key_lengths, scale, band: as in the forward pass.
        o, rest, softmax: what the forward pass returned; not read where keys are one tile.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_backward(do, dlse, q, k, v, key_lengths, o, rest, softmax, scale, band)
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
        band,
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
        case Banded(launch_dq, launch_dkdv, allocate_delta, add_chunks, allocate_shares):
            delta = allocate_delta()
            launch_dq(operands, (dlse, o, rest, softmax, delta, dq), scale)
            # Without a prefix nothing is written to the shares.
            dk_shares = dk if allocate_shares is None else allocate_shares()
            dv_shares = dv if allocate_shares is None else allocate_shares()
            launch_dkdv(operands, (softmax, delta, dk_shares, dv_shares, dk, dv), scale)
            if add_chunks is not None:
                add_chunks((dk_shares, dv_shares, dk, dv))
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
    band: Band | None,
) -> BackwardPlan:
    """The plan for operands of these kinds: do, q, k, v and key_lengths; ``in_line`` if descriptors
    may start where they do.
    """
    problem = problem_of(shape, keys, operands, in_line, precision, device, band)
    key_shape = (problem.batches, keys, problem.heads, problem.width)
    grads = [memory(x, problem.dtype, device) for x in (shape, key_shape, key_shape)]
    plan = BackwardPlan(None, problem.copies, *grads)
    if not math.prod(shape) or not keys:
        return plan
    if problem.single_tile:
        return plan._replace(launches=plan_single_tile(problem, has_dlse))
    if problem.band is None:
        return plan._replace(launches=plan_streaming(problem, has_dlse))
    return plan._replace(launches=plan_banded(problem, problem.band.prefix, has_dlse))


def plan_single_tile(problem: Problem, has_dlse: bool) -> SingleTile | SingleTileChunks:
    config = single_tile_config(SINGLE_TILE_BACKWARD, problem)
    programs = BACKWARD_PROGRAMS_PER_SM * problem.card.multiprocessors
    chunk = chunk_rows(problem.all_heads, problem.queries, config.queries, programs)
    chunks = triton.cdiv(problem.queries, chunk)
    launch = TileLaunch(
        _single_tile_backward_kernel,
        problem,
        config,
        problem.all_heads * chunks,
        (problem.batches, chunk),
        HAS_DLSE=has_dlse,
    )
    if chunks == 1:
        return SingleTile(launch)
    return SingleTileChunks(launch, *plan_shares(problem, chunks, problem.keys))


def plan_shares(problem: Problem, chunks: int, keys: int) -> tuple[Launch, Allocate]:
    """What adds the shares of dk and dv that chunks of queries have of the first ``keys`` keys, and
    the memory of one of the two.
    """
    head_rows = problem.heads * problem.width
    task_size = keys * head_rows
    blocks = triton.cdiv(task_size, ADD_CHUNKS.block)
    launch = Launch(
        _add_chunks_kernel,
        grid_of(problem.batches * blocks),
        problem.device,
        (problem.batches * task_size, task_size, problem.keys * head_rows, chunks),
        dict(num_warps=ADD_CHUNKS.num_warps),
        BLOCK=ADD_CHUNKS.block,
    )
    share = (chunks, problem.batches, keys, problem.heads, problem.width)
    return launch, memory(share, torch.float32, problem.device)


def dq_launch(kernel: Any, problem: Problem, config: TileConfig, has_dlse: bool) -> TileLaunch:
    """One program for every tile of queries of every head."""
    return TileLaunch(
        kernel,
        problem,
        config,
        problem.all_heads * triton.cdiv(problem.queries, config.queries),
        (problem.all_heads * problem.queries,),
        HAS_DLSE=has_dlse,
        HAS_REST=problem.dtype.itemsize < 4,
    )


def plan_streaming(problem: Problem, has_dlse: bool) -> Streaming:
    rows = problem.all_heads * problem.queries
    of_keys = tile_config(DKDV, problem)
    return Streaming(
        dq_launch(_streaming_dq_kernel, problem, tile_config(DQ, problem), has_dlse),
        TileLaunch(
            _streaming_dkdv_kernel,
            problem,
            of_keys,
            problem.all_heads * triton.cdiv(problem.keys, of_keys.keys),
            (rows,),
        ),
        memory((problem.batches, problem.heads, problem.queries), torch.float32, problem.device),
    )


def plan_banded(problem: Problem, prefix: int, has_dlse: bool) -> Banded:
    rows = problem.all_heads * problem.queries
    of_keys = tile_config(WINDOW_DKDV, problem)
    prefix_tiles = triton.cdiv(prefix, of_keys.keys)
    programs = BACKWARD_PROGRAMS_PER_SM * problem.card.multiprocessors
    tiles_of_all = problem.all_heads * max(prefix_tiles, 1)
    chunk = chunk_rows(tiles_of_all, problem.queries, of_keys.queries, programs)
    chunks = triton.cdiv(problem.queries, chunk)
    key_tiles = triton.cdiv(problem.keys - prefix, of_keys.keys)
    add_chunks, shares = plan_shares(problem, chunks, prefix) if prefix else (None, None)
    return Banded(
        dq_launch(_window_dq_kernel, problem, tile_config(WINDOW_DQ, problem), has_dlse),
        TileLaunch(
            _window_dkdv_kernel,
            problem,
            of_keys,
            problem.all_heads * (prefix_tiles * chunks + key_tiles),
            (rows, problem.batches, chunk),
        ),
        memory((problem.batches, problem.heads, problem.queries), torch.float32, problem.device),
        add_chunks,
        shares,
    )
