"""A memory of any number of layers in plain torch, and the gradients of its inner loss.

    x_0 = x        z_l = w_l x_(l-1) + b_l        x_l = act(z_l), and x_n = z_n        M(x) = x_n

Weights, momentum and gradients are tuples (w_1, b_1, .., w_n, b_n); of two layers a MemoryWeights,
and one layer is the linear memory W x + b. The gradient of the loss of one row is an outer product
p_l x_(l-1)^T for each layer, p_l being the gradient by z_l.

With ``residual_norm`` M(x) = x + N(x_n), N being a layer norm over the D features without gain:

    N(z) = (z - mean z) / sqrt(var z + eps)    p_n = N'(z_n) applied to the gradient by M(k)

Everything is computed in fp32 (in fp64 for fp64 inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._core.precision import wide
from .weights import Weights, like

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]]
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}

# Farther from zero silu and gelu are 0 or z, in fp64 too. Their formulas have products of z and of
# what autograd hands on, which may overflow, with zeros there.
FAR = 1024.0

# Of the layer norm's variance, as torch's own.
EPS = 1e-5


class Rows(NamedTuple):
    """The inner loss of pairs of a key and a value, layer by layer.

    Attributes:
        inputs: x_(l-1) of every layer, the keys first.
        slopes, curves: act'(z_l) and act''(z_l) of every hidden layer.
        residual: M(k) - v.
        by_x: the gradient of the loss by x_l, of every hidden layer.
        by_z: p_l of every layer; the last is the gradient by M(k), or what the norm makes of it.
    """

    inputs: list[Tensor]
    slopes: list[Tensor]
    curves: list[Tensor]
    residual: Tensor
    by_x: list[Tensor]
    by_z: list[Tensor]


def activated(z: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(act, act', act'') of z for "silu", "relu" or "gelu" (the exact one)."""
    if activation == "relu":
        step = (z > 0.0).to(z.dtype)
        return F.relu(z), step, torch.zeros_like(z)
    near = z.clamp(-FAR, FAR)
    beyond = F.relu(z - FAR)
    if activation == "silu":
        s = torch.sigmoid(near)
        slope = s * (1.0 + near * (1.0 - s))
        return near * s + beyond, slope, s * (1.0 - s) * (2.0 + near * (1.0 - 2.0 * s))
    density = torch.exp(-0.5 * near * near) / math.sqrt(2.0 * math.pi)
    below = 0.5 * torch.erfc(-near / math.sqrt(2.0))
    return near * below + beyond, below + near * density, density * (2.0 - near * near)


def normalised(z: Tensor) -> tuple[Tensor, Tensor]:
    """N(z) and 1 / sqrt(var z + eps) ``[.., 1]``."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return centred * inverse, inverse


def through_norm(g: Tensor, n: Tensor, inverse: Tensor) -> Tensor:
    """The gradient by z, of g by n = N(z)."""
    return inverse * (g - g.mean(-1, keepdim=True) - n * (n * g).mean(-1, keepdim=True))


def memory_read(
    q: Tensor, weights: Weights, *, activation: str = "silu", residual_norm: bool = False
) -> Tensor:
    """M(q) for q [*lead, N, D]."""
    x = wide(q)
    for layer, (w, b) in enumerate(layers_of(weights)):
        x = linear(activated(x, activation)[0] if layer else x, w, b)
    if residual_norm:
        x = wide(q) + normalised(x)[0]
    return x.to(q.dtype)


def rows_of(
    k: Tensor,
    v: Tensor,
    row_weights: Tensor | None,
    weights: Weights,
    factor: float,
    activation: str,
    residual_norm: bool = False,
) -> Rows:
    """The loss is ``factor / 2`` times the sum over rows and features of row_weight residual^2."""
    layers = list(layers_of(weights))
    inputs, slopes, curves = [k], [], []
    z = linear(k, *layers[0])
    for w, b in layers[1:]:
        x, slope, curve = activated(z, activation)
        inputs.append(x)
        slopes.append(slope)
        curves.append(curve)
        z = linear(x, w, b)
    scale = factor if row_weights is None else factor * row_weights.unsqueeze(-1)
    if residual_norm:
        n, inverse = normalised(z)
        residual = k + n - v
        by_last = through_norm(scale * residual, n, inverse)
    else:
        residual = z - v
        by_last = scale * residual
    by_x, by_z = [], [by_last]
    for (w, _), slope in zip(layers[:0:-1], slopes[::-1], strict=True):
        by_x.append(by_z[-1] @ w)
        by_z.append(by_x[-1] * slope)
    return Rows(inputs, slopes, curves, residual, by_x[::-1], by_z[::-1])


def gradients_of(rows: Rows, weights: Weights, factors: Tensor | None = None) -> Weights:
    """The gradient of the loss by the weights; with ``factors [.., N]`` every row's part times
    its factor.
    """
    gradients = []
    for x, p in zip(rows.inputs, rows.by_z, strict=True):
        scaled = p if factors is None else factors.unsqueeze(-1) * p
        gradients += [scaled.mT @ x, scaled.sum(-2)]
    return like(weights, gradients)


def layers_of(weights: Weights) -> Iterator[tuple[Tensor, Tensor]]:
    """(w_l, b_l) of every layer."""
    return zip(weights[::2], weights[1::2], strict=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x weight^T + bias, for every leading index."""
    return x @ weight.mT + bias.unsqueeze(-2)


def over(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each leading index, against x with more axes."""
    return numbers.reshape((*numbers.shape, *(1,) * (x.ndim - numbers.ndim)))
