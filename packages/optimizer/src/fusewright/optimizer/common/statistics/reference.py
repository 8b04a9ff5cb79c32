r"""The statistics of the learned optimizers in plain torch, and the features that they share.

With g the gradient and x the parameter, decays beta, and rows and columns the two longest axes
(of fewer than two axes r_i = c_i is of each element, without a mean):

    m_i' = beta_i m_i + (1 - beta_i) g                           i = 1, 2, 3
    v'   = beta v + (1 - beta) g^2
    r_i' = beta_i r_i + (1 - beta_i) mean_{longest axis} (g^2 + 1e-30), c_i' over the second longest

    R_i = max(r_i / (mean r_i + 1e-9), 1e-9)^-1/2    mean over the second longest axis
    C_i = max(c_i, 1e-9)^-1/2

All of it can be differentiated in all operands, decays and statistics included. Of a DTensor's rows
``shards`` takes the means over all of them.

Metz et al., Practical tradeoffs between memory, compute, and performance in learned optimizers,
arXiv 2203.11860, and AdafacMLPLOpt of google/learned_optimization; the factored mean of squares is
that of Shazeer and Stern, Adafactor, arXiv 1804.04235.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..._core.precision import wide_dtype
from ..placement import local, placed_as

Tensor = torch.Tensor
# Of the momenta, of the square, and of rows and columns; a network may learn to change them.
START_DECAYS = (0.9, 0.99, 0.999), (0.999,), (0.9, 0.99, 0.999)


class Statistics(NamedTuple):
    """What a learned optimizer keeps of a parameter.

    Attributes:
        step: how many steps were taken, 0-d fp32.
        momenta: ``[3, *shape]``.
        square: ``[*shape]``.
        row: ``[3, *shape without the longest axis]``; ``[3, *shape]`` where there are fewer than
            two axes.
        column: ``[3, *shape without the second longest]``; ``[0]`` there.
    """

    step: Tensor
    momenta: Tensor
    square: Tensor
    row: Tensor
    column: Tensor


class Weights(NamedTuple):
    """Of the network: ``[32, 39 + extra]``, ``[32]``, ``[32, 32]``, ``[32]``, ``[2, 32]`` and
    ``[2]``.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    w3: Tensor
    b3: Tensor


class Decays(NamedTuple):
    """Of the momenta ``[3]``, of the square ``[1]`` and of rows and columns ``[3]``."""

    momentum: Tensor
    square: Tensor
    factored: Tensor


def factored_axes(shape: Sequence[int]) -> tuple[int, int] | None:
    """The second longest axis and the longest, the later of equals the longer; None of fewer than
    two.
    """
    # Not NumPy's argsort, which PyLO asks: its order of equals depends on the CPU.
    if len(shape) < 2:
        return None
    ordered = sorted(range(len(shape)), key=lambda axis: shape[axis])
    return ordered[-2], ordered[-1]


def exchanges_axes(shape: Sequence[int], *, velo: bool) -> bool:
    """Whether features take the row for the column, and the column for the row: those of VeLO where
    the two longest axes are of one length, but for the first two of four. Its public weights were
    trained on matrices [inputs, outputs], which are [outputs, inputs] here.
    """
    axes = factored_axes(shape)
    if not velo or axes is None or shape[axes[0]] != shape[axes[1]]:
        return False
    return (len(shape), *axes) != (4, 0, 1)


def new_statistics(p: Tensor) -> Statistics:
    """Of a parameter before its first step, in the order of its memory; those of a DTensor are
    sharded where they have its sharded axis.
    """
    dtype = wide_dtype(p)
    axes = factored_axes(p.shape)
    shapes = [tuple(range(p.ndim))] * 2
    if axes is not None:
        second, longest = axes
        shapes = [tuple(axis for axis in range(p.ndim) if axis != x) for x in (longest, second)]
    row, column = (zeros_like_axes(p, kept, dtype) for kept in shapes)
    return Statistics(
        torch.zeros((), dtype=torch.float32, device=p.device),
        zeros_like_axes(p, tuple(range(p.ndim)), dtype),
        torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format),
        row,
        column if axes is not None else torch.zeros(0, dtype=dtype, device=p.device),
    )


def on_meta(p: Tensor) -> Tensor:
    """A parameter of the same shape, strides and placement without memory."""
    memory = local(p)
    meta = torch.empty_strided(memory.shape, memory.stride(), dtype=p.dtype, device="meta")
    return placed_as(p, meta, tuple(range(p.ndim)))


def zeros_like_axes(p: Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros ``[3, *axes of p]``, each of the three in the order of p's memory, and placed as p."""
    order, memory = memory_order(p, axes), local(p)
    shape = 3, *(memory.shape[axis] for axis in order)
    zeros = torch.zeros(shape, dtype=dtype, device=memory.device)
    zeros = zeros.permute(0, *(1 + order.index(axis) for axis in axes))
    return placed_as(p, zeros, (None, *axes))


def memory_order(p: Tensor, axes: Sequence[int]) -> list[int]:
    """The axes in the order of memory, the outermost first."""
    strides: tuple[int, ...] = p.stride()
    return sorted(axes, key=lambda axis: (-strides[axis], axis))


def advanced(
    statistics: Statistics,
    g: Tensor,
    decays: Decays,
    means: tuple[Tensor, Tensor] | None = None,
) -> Statistics:
    """Statistics after one more gradient; ``means`` are those of ``squares`` over the longest axis
    and the second longest, where g has some rows of a tensor of several axes.
    """
    if not g.numel() and means is None:
        return statistics._replace(step=statistics.step + 1.0)
    dtype = statistics.square.dtype
    g = g.to(dtype)
    row, column = statistics.row, statistics.column
    if means is None:
        g2, axes = squares(g), factored_axes(g.shape)
        if axes is None:
            row = mixed(row, g2, decays.factored)
        else:
            second, longest = axes
            means = g2.mean(longest), g2.mean(second)
    if means is not None:
        row, column = (
            mixed(kept, mean, decays.factored)
            for kept, mean in zip((row, column), means, strict=True)
        )
    return Statistics(
        statistics.step + 1.0,
        mixed(statistics.momenta, g, decays.momentum),
        mixed(statistics.square[None], g.square(), decays.square)[0],
        row,
        column,
    )


def squares(g: Tensor) -> Tensor:
    """Of which rows and columns are means."""
    return g.square() + 1e-30


def mixed(kept: Tensor, new: Tensor, decays: Tensor) -> Tensor:
    """beta_i kept_i + (1 - beta_i) new for the decays along the first axis."""
    betas = decays.view(-1, *[1] * new.ndim)
    # Near 1 a narrow beta has lost the digits of 1 - beta.
    return betas.to(kept.dtype) * kept + (1.0 - betas).to(kept.dtype) * new


def lines(
    shape: Sequence[int], statistics: Statistics, *, velo: bool
) -> tuple[Tensor, Tensor, int] | None:
    """r_i and c_i of a tensor of this shape, of which there may be some rows, expandable to it, and
    the axis over which the rows are averaged; None of fewer than two axes.
    """
    row, column = statistics.row, statistics.column
    axes = factored_axes(shape)
    if axes is None:
        return None
    second, longest = (1 + axis for axis in axes)
    if exchanges_axes(shape, velo=velo):
        row, column, second, longest = column, row, longest, second
    return row.unsqueeze(longest), column.unsqueeze(second), second


def factors(
    shape: Sequence[int], statistics: Statistics, mean: Tensor | None, *, velo: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """r_i and c_i, expandable to the shape, and the factors of g and m_i: R_i C_i; of fewer than
    two axes (r_i + 1e-9)^-1/2 for g and (r_i + eps)^-1/2 for m_i, eps 0 for VeLO. ``mean`` is that
    of r_i, which is taken here where it is None.
    """
    found = lines(shape, statistics, velo=velo)
    if found is None:
        row = statistics.row
        of_momenta = (row + (0.0 if velo else 1e-6)).rsqrt()
        return row, row, (row + 1e-9).clamp(min=1e-9).rsqrt(), of_momenta
    row, column, second = found
    if mean is None:
        mean = row.mean(second, keepdim=True)
    row_factor = (row / (mean + 1e-9)).clamp(min=1e-9).rsqrt()
    both = row_factor * column.clamp(min=1e-9).rsqrt()
    return row, column, both, both


def element_features(
    p: Tensor,
    g: Tensor,
    statistics: Statistics,
    *,
    velo: bool,
    shape: Sequence[int] | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """``[*shape, 28]`` before their normalisation, from statistics that have seen g; of VeLO
    ``[*shape, 30]``, with two of g more. Where p is some rows of a tensor, ``shape`` is the
    tensor's, and ``mean`` that of ``factors``, if rows are averaged over its rows.
    """
    dtype = statistics.square.dtype
    p, g = p.to(dtype), g.to(dtype)
    m, v = statistics.momenta, statistics.square
    s = (v + 1e-6).rsqrt()
    row, column, of_gradient, of_momenta = factors(
        p.shape if shape is None else shape, statistics, mean, velo=velo
    )
    clipped, scaled = ([g.clamp(-0.1, 0.1)], [g * s]) if velo else ([], [])
    features = [
        *(g, *clipped, p, *m, v, *(m * s), s, *(g * of_gradient), *scaled),
        *(*row, *column, *(row + 1e-8).rsqrt(), *(column + 1e-8).rsqrt(), *(m * of_momenta)),
    ]
    return torch.stack([x.expand(p.shape) for x in features], -1)


def normalised(features: Tensor, square: Tensor | None = None) -> Tensor:
    """Each of ``[*shape, features]`` divided by its root mean square over the tensor; ``square`` is
    the mean square, which is taken here where it is None.
    """
    if square is None:
        square = features.square()
        if features.ndim > 1:
            square = square.mean(tuple(range(features.ndim - 1)), keepdim=True)
    return features * (square + 1e-5).rsqrt()


def perceptron(features: Tensor, weights: Weights) -> Tensor:
    """``[*shape, outputs]``: of two hidden layers with ReLU."""
    w1, b1, w2, b2, w3, b3 = (x.to(features.dtype) for x in weights)
    h = F.relu(F.linear(features, w1, b1))
    return F.linear(F.relu(F.linear(h, w2, b2)), w3, b3)
