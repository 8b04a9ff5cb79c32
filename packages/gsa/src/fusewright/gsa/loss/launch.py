"""The launches of indexer_kl_loss: configurations and plans. One chunk of the rows after the other
has its scores and target in memory that the next chunk overwrites.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import Launch, Layout, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import input_precision
from ..common.launches import (
    MAX_ROW_STRIDE,
    Shape,
    TileConfig,
    chunks_of_rows,
    config_for,
    grid_of,
    tile_constants,
)
from ..common.ranges import rows_that_see
from ..indexer.launch import scores_backward, scores_forward
from ..sparse.launch_unions import Members, members_of

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class RowConfig(NamedTuple):
    """One program reads a row ``block`` numbers at a time."""

    block: int
    num_warps: int


# Read from the top; the first line that fits serves. Both are unmeasured.
TARGET = (
    TileConfig(128, 2, queries=64, keys=128, num_warps=8, num_stages=2, hopper=True),
    TileConfig(256, 2, queries=64, keys=64, num_warps=8, num_stages=1, hopper=True),
    TileConfig(256, 2, queries=32, keys=32, num_warps=4, num_stages=1),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)
DIVERGENCE = RowConfig(block=2048, num_warps=4)
# The scores of a chunk of rows, which stay in the L2 cache of a GPU.
SCORES_AT_A_TIME = 1 << 23
# The rows of a chunk are a multiple of this number, but for the last chunk's.
ROWS = 64


def divergence(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    bias: Tensor,
    temperature: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    count: Tensor | None,
    ranges: Tensor | None,
    index_scale: float,
    scale: float,
    causal: bool,
    q_offset: int,
    form: str = "gated",
    slopes: bool = True,
) -> tuple[Tensor | None, ...]:
    """``(loss, dq_index, dk_index, dw, dbias, dtemperature)``: the mean divergence and, with
    ``slopes``, its gradients, all in fp32.
    """
    batches, queries, all_keys = *q.shape[:2], k.shape[1]
    q_offset = min(q_offset, all_keys)
    q, k = (x if rows_are_near(x) else x.contiguous() for x in (q, k))
    temperature = temperature.detach().float().contiguous()
    of_indices: tuple[Any, ...] = ()
    if indices is not None:
        indices = indices if indices.stride(-1) == 1 else indices.contiguous()
        of_indices = (indices.shape, layouts(indices, count), q.device)

    def fits(first: int, last: int) -> bool:
        keys = min(all_keys, q_offset + last) if causal else all_keys
        return batches * (last - first) * keys <= SCORES_AT_A_TIME

    # Of each chunk: divergences of its rows, dtemperature, dq, dw and dbias.
    parts: list[tuple[Tensor, ...]] = []
    dk = torch.zeros(k_index.shape, dtype=torch.float32, device=q.device)
    for first, last in chunks_of_rows(queries if batches and all_keys else 0, ROWS, fits):
        keys = min(all_keys, q_offset + last) if causal else all_keys
        offset = q_offset + first
        part = (q_index[:, first:last], k_index[:, :keys], w[:, first:last], bias)
        of_rows = None if ranges is None else ranges[:, first:last].contiguous()
        scores = scores_forward(*part, of_rows, index_scale, causal, offset, form)
        target = torch.empty_like(scores)
        attention = (q[:, first:last], k[:, :keys], lse[:, :, first:last], of_rows)
        write_target(*attention, target, scale, causal, offset)
        bits = None
        if indices is not None:
            bits = bits_plan(*of_indices, keys, first, last - first).of(indices, count)
        rows = torch.empty(2, batches, last - first, dtype=torch.float32, device=q.device)
        sizes = (last - first, keys, offset)
        kind = (causal, ranges is not None, slopes)
        launch = divergence_plan(batches, sizes, *kind, first, of_indices, q.device)
        selection = (indices, count, bits, of_rows)
        launch((scores, target, *selection, temperature, rows[0], rows[1] if slopes else None))
        if slopes:
            # The launch has replaced the scores by their gradients.
            dq, dk_part, dw, dbias = scores_backward(
                scores, *part, of_rows, index_scale, causal, offset, form, wide=True
            )
            dk[:, :keys] += dk_part
            parts.append((rows[0], rows[1], dq, dw, dbias))
        else:
            parts.append((rows[0],))
    if not parts:
        shapes = (temperature.shape, q_index.shape, k_index.shape, w.shape, bias.shape, ())
        return tuple(torch.zeros(x, dtype=torch.float32, device=q.device) for x in shapes)
    row_weight: float | Tensor = 1.0 / (batches * queries)
    if ranges is not None:
        row_weight = 1.0 / rows_that_see(ranges, causal, q_offset)
    divergences, *others = zip(*parts, strict=True)
    loss = torch.cat(divergences, 1).sum() * row_weight
    if not slopes:
        return loss, None, None, None, None, None
    dtemperature, dq, dw = map(functools.partial(torch.cat, dim=1), others[:3])
    factor = temperature * row_weight
    dbias = torch.stack(others[3]).sum(0)
    return (
        loss,
        dq * factor,
        dk * factor,
        dw * factor,
        dbias * factor,
        dtemperature.sum() * row_weight,
    )


def rows_are_near(x: Tensor) -> bool:
    """Whether the kernels can read q or k as it is."""
    return x.stride(-1) == 1 and x.stride(1) <= MAX_ROW_STRIDE


@functools.lru_cache(maxsize=4096)
def bits_plan(
    shape: Shape,
    operands: tuple[Layout, Layout | None],
    device: torch.device,
    keys: int,
    first: int,
    part: int,
) -> Members:
    """The bits of the first ``keys`` keys that ``part`` rows from ``first`` on have selected, of
    indices of this shape; ``operands``: layouts of indices and count.
    """
    strides = selection_strides(operands)
    strides = (strides[0], 0, strides[1], strides[2], 0, strides[3])
    return members_of(shape[0], 1, keys, shape[-1], strides, device, first, part)


def selection_strides(operands: tuple[Layout, Layout | None]) -> tuple[int, ...]:
    """The strides of sequences and rows, of indices and of count."""
    indices, count = operands
    return (*indices[1][:2], *((0, 0) if count is None else count[1]))


def write_target(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    ranges: Tensor | None,
    target: Tensor,
    scale: float,
    causal: bool,
    offset: int,
) -> None:
    """Write the sum of the heads' probabilities of every row and key."""
    sizes = (q.shape, k.shape, causal, ranges is not None, offset)
    launch = target_plan(*sizes, layouts(q, k, lse), input_precision(q.dtype), q.device)
    launch((q, k, lse, ranges, target), (scale,))


@functools.lru_cache(maxsize=4096)
def target_plan(
    shape: Shape,
    key_shape: Shape,
    causal: bool,
    ranged: bool,
    offset: int,
    operands: tuple[Layout, ...],
    precision: str,
    device: torch.device,
) -> Launch:
    """The launch for operands of these layouts, q, k and lse; ``ranged``: whether there are ranges,
    for which a kernel of its own is compiled.
    """
    q, k, lse = operands
    batches, queries, heads, width = shape
    keys, key_heads = key_shape[1:3]
    config = config_for(TARGET, width, q[0].itemsize, device)
    tiles = cdiv(queries, config.queries) * cdiv(keys, config.keys)
    return Launch(
        kernels.target_kernel,
        grid_of(batches * tiles),
        device,
        (*q[1][:-1], *k[1][:-1], *lse[1], queries, keys, heads, heads // key_heads, offset),
        dict(num_warps=config.num_warps, num_stages=config.num_stages),
        CONFIG=tile_constants(width, causal, precision, config),
    )


@functools.lru_cache(maxsize=4096)
def divergence_plan(
    batches: int,
    sizes: tuple[int, int, int],
    causal: bool,
    ranged: bool,
    slopes: bool,
    first: int,
    of_indices: tuple[Any, ...],
    device: torch.device,
) -> Launch:
    """The launch for these ``sizes``: rows, keys, and the offset; and for indices of this shape and
    these layouts, whose rows start at ``first``. ``ranged``: as in :func:`target_plan`.
    """
    selection = (0,) * 8
    if of_indices:
        shape, operands, _ = of_indices
        bits = bits_plan(*of_indices, sizes[1], first, sizes[0])
        places = (first, shape[-1], bits.shape[-1], bits.marks)
        selection = (*selection_strides(operands), *places)
    return Launch(
        kernels.divergence_kernel,
        grid_of(batches * sizes[0]),
        device,
        (*sizes, *selection),
        dict(num_warps=DIVERGENCE.num_warps),
        CAUSAL=causal,
        BLOCK=DIVERGENCE.block,
    )
