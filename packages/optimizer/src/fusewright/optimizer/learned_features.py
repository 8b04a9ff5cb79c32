r"""The learned optimizer of small_fc_lopt in plain torch: statistics, features, network, update.

With g the gradient and x the parameter, decays beta, and rows and columns the two longest axes
(of fewer than two axes r_i = c_i is of every element, without a mean):

    m_i' = beta_i m_i + (1 - beta_i) g                           i = 1, 2, 3
    v'   = beta v + (1 - beta) g^2
    r_i' = beta_i r_i + (1 - beta_i) mean_{longest axis} (g^2 + 1e-30), c_i' over the second longest

28 features of every element, each divided by its root mean square over the tensor,
f / sqrt(mean f^2 + 1e-5), then 11 of time, tanh(t / tau - 1), then what the caller adds:

    g, x, m_i, v, m_i s, s, g R_i C_i, r_i, c_i, (r_i + 1e-8)^-1/2, (c_i + 1e-8)^-1/2, m_i R_i C_i

    s   = (v + 1e-6)^-1/2
    R_i = max(r_i / (mean r_i + 1e-9), 1e-9)^-1/2    mean over the second longest axis
    C_i = max(c_i, 1e-9)^-1/2

with (r_i + 1e-9)^-1/2 beside g and (r_i + 1e-6)^-1/2 beside m_i for R_i C_i of fewer than two axes.

    (d, e) = W3 relu(W2 relu(W1 f + b1) + b2) + b3        update = d exp(exp_mult e) step_mult

    x' = (1 - lr wd) x - lr update

t counts steps from 0, and decays are learned by an offset o: beta = 1 - (1 - beta0) exp(10 o), held
in [0, 1]. Everything here can be differentiated in everything, decays and statistics included.

Metz et al., Practical tradeoffs between memory, compute, and performance in learned optimizers,
arXiv 2203.11860, and AdafacMLPLOpt of google/learned_optimization; Janson et al., PyLO, arXiv
2506.10315; the factored mean of squares is that of Shazeer and Stern, Adafactor, arXiv 1804.04235.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
MOMENTUM_DECAYS = (0.9, 0.99, 0.999)
SQUARE_DECAYS = (0.999,)
FACTORED_DECAYS = (0.9, 0.99, 0.999)
TIMESCALES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000)
# Those of an element, and with those of time.
ELEMENT_FEATURES = 28
FEATURES = ELEMENT_FEATURES + len(TIMESCALES)


class Statistics(NamedTuple):
    """What the learned optimizer keeps of a parameter.

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
    if len(shape) < 2:
        return None
    ordered = sorted(range(len(shape)), key=lambda axis: shape[axis])
    return ordered[-2], ordered[-1]


def decays_of(momentum: Tensor, square: Tensor, factored: Tensor) -> Decays:
    """Decays from their learned offsets."""
    starts = (MOMENTUM_DECAYS, SQUARE_DECAYS, FACTORED_DECAYS)
    found = []
    for start, offset in zip(starts, (momentum, square, factored), strict=True):
        # As an fp64 number, which a start near 1 needs.
        rest = numbers_on(offset.device, [1.0 - x for x in start])
        found.append((1.0 - rest * torch.exp(10.0 * offset.double())).clamp(0.0, 1.0))
    return Decays(*found)


def numbers_on(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """In fp64, without a copy that the host waits for."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.float64)
    return torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in numbers])


def new_statistics(p: Tensor) -> Statistics:
    """Of a parameter before its first step, in the order of its memory."""
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
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


def zeros_like_axes(p: Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Three tensors of some of p's axes in one, each in the order of p's memory."""
    order = memory_order(p, axes)
    found = torch.zeros((3, *(p.shape[axis] for axis in order)), dtype=dtype, device=p.device)
    return found.permute(0, *(1 + order.index(axis) for axis in axes))


def memory_order(p: Tensor, axes: Sequence[int]) -> list[int]:
    """The axes as they follow each other in memory, the slowest first."""
    strides: tuple[int, ...] = p.stride()
    return sorted(axes, key=lambda axis: (-strides[axis], axis))


def advanced(statistics: Statistics, g: Tensor, decays: Decays) -> Statistics:
    """Statistics after one more gradient."""
    if not g.numel():
        return statistics._replace(step=statistics.step + 1.0)
    dtype = statistics.square.dtype
    g = g.to(dtype)
    g2 = g.square() + 1e-30
    axes = factored_axes(g.shape)
    row, column = statistics.row, statistics.column
    if axes is None:
        row = mixed(row, g2, decays.factored)
    else:
        second, longest = axes
        row = mixed(row, g2.mean(longest), decays.factored)
        column = mixed(column, g2.mean(second), decays.factored)
    return Statistics(
        statistics.step + 1.0,
        mixed(statistics.momenta, g, decays.momentum),
        mixed(statistics.square[None], g.square(), decays.square)[0],
        row,
        column,
    )


def mixed(kept: Tensor, new: Tensor, decays: Tensor) -> Tensor:
    """beta_i kept_i + (1 - beta_i) new for the decays along the first axis."""
    betas = decays.view(-1, *[1] * new.ndim)
    # Near 1 a narrow beta has lost what 1 - beta is.
    return betas.to(kept.dtype) * kept + (1.0 - betas).to(kept.dtype) * new


def element_features(p: Tensor, g: Tensor, statistics: Statistics) -> Tensor:
    """``[*shape, 28]`` before their normalisation, from statistics that have seen g."""
    dtype = statistics.square.dtype
    p, g = p.to(dtype), g.to(dtype)
    m, v = statistics.momenta, statistics.square
    s = (v + 1e-6).rsqrt()
    row, column, of_gradient, of_momenta = factors(p.shape, statistics, 1e-6)
    found = [
        *(g, p, *m, v, *(m * s), s, *(g * of_gradient)),
        *(*row, *column, *(row + 1e-8).rsqrt(), *(column + 1e-8).rsqrt(), *(m * of_momenta)),
    ]
    return torch.stack([x.expand(p.shape) for x in found], -1)


def factors(
    shape: Sequence[int], statistics: Statistics, beside: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """r_i and c_i of each element, or what can be expanded to them, and what g and m_i are
    multiplied by; of fewer than two axes that is (r_i + beside)^-1/2 for m_i.
    """
    row, column = statistics.row, statistics.column
    axes = factored_axes(shape)
    if axes is None:
        return row, row, (row + 1e-9).clamp(min=1e-9).rsqrt(), (row + beside).rsqrt()
    second, longest = (1 + axis for axis in axes)
    row, column = row.unsqueeze(longest), column.unsqueeze(second)
    mean = row.mean(second, keepdim=True)
    row_factor = (row / (mean + 1e-9)).clamp(min=1e-9).rsqrt()
    both = row_factor * column.clamp(min=1e-9).rsqrt()
    return row, column, both, both


def normalised(features: Tensor) -> Tensor:
    """Each of ``[*shape, features]`` divided by its root mean square over the tensor."""
    square = features.square()
    if features.ndim > 1:
        square = square.mean(tuple(range(features.ndim - 1)), keepdim=True)
    return features * (square + 1e-5).rsqrt()


def time_features(t: Tensor) -> Tensor:
    """``[..., 11]`` of counts of steps that were taken before."""
    return torch.tanh(t.double()[..., None] / numbers_on(t.device, TIMESCALES) - 1.0)


def update_of(
    weights: Weights,
    p: Tensor,
    g: Tensor,
    statistics: Statistics,
    extra: Tensor | None,
    exp_mult: float,
    step_mult: float,
) -> Tensor:
    """``[*shape]``: what lr times is taken off p, from statistics that have seen g; ``extra`` is
    broadcast to ``[*shape, extra features]``.
    """
    features = normalised(element_features(p, g, statistics))
    dtype = features.dtype
    time = time_features(statistics.step - 1.0).to(dtype).expand(*p.shape, -1)
    inputs = [features, time]
    if extra is not None:
        inputs.append(extra.to(dtype).expand(*p.shape, -1))
    w1, b1, w2, b2, w3, b3 = (x.to(dtype) for x in weights)
    h = F.relu(F.linear(torch.cat(inputs, -1), w1, b1))
    h = F.relu(F.linear(h, w2, b2))
    direction, magnitude = F.linear(h, w3, b3).unbind(-1)
    return direction * torch.exp(exp_mult * magnitude) * step_mult
