r"""The memory of any number of layers, in plain torch: what the module runs where layers is not 2.

    x_0 = x        z_l = w_l x_(l-1) + b_l        x_l = act(z_l), and x_n = z_n        M(x) = x_n

Weights, momentum and gradients are tuples (w_1, b_1, .., w_n, b_n); one layer is the linear memory
W x + b. A token's gradient is one outer product p_l x_(l-1)^T for each layer, p_l being the
gradient of the loss by z_l, so that the scan's chunks read as those of two layers do, layer by
layer.

Functions, shapes and results are those of memory_read, memory_update and memory_scan; everything is
computed in fp32 (in fp64 for fp64 keys), whatever autocast holds, and differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ._backends import without_autocast
from .reference import activated, clip, linear, loss_factor, over, wide
from .scan_reference import FACTOR, Decays, decays_of

Tensor = torch.Tensor
Weights = tuple[Tensor, ...]


class DeepUpdate(NamedTuple):
    """As MemoryUpdate."""

    weights: Weights
    momentum: Weights
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


class DeepScan(NamedTuple):
    """As MemoryScan."""

    y: Tensor
    weights: Weights
    momentum: Weights


class DeepRows(NamedTuple):
    """What the inner loss knows of every pair of key and value.

    Attributes:
        inputs: x_(l-1) of every layer.
        by_z: p_l of every layer; the last is the gradient by M(k).
        residual: M(k) - v.
    """

    inputs: list[Tensor]
    by_z: list[Tensor]
    residual: Tensor


def memory_read(q: Tensor, weights: Weights, *, activation: str = "silu") -> Tensor:
    """M(q) for q ``[B, T, heads, D]``."""
    with without_autocast(q.device):
        x = wide(q.transpose(1, 2))
        for layer, (w, b) in enumerate(layers_of(weights)):
            x = linear(x if layer == 0 else activated(x, activation)[0], w, b)
        return x.transpose(1, 2).to(q.dtype)


def memory_update(
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    row_weights: Tensor | None = None,
    *,
    activation: str = "silu",
    reduction: str = "sum",
    max_grad_norm: float | None = None,
) -> DeepUpdate:
    """One pooled step for every leading index; k, v ``[*lead, N, D]``."""
    lead = alpha.ndim
    with without_autocast(k.device):
        k, v = wide(k), wide(v)
        with torch.no_grad():
            _, came_loss, came_squares = descent(
                k, v, weights, row_weights, activation, reduction, lead
            )
        finite = came_squares.sqrt().isfinite()

        def used(x: Tensor) -> Tensor:
            """Autograd multiplies a skipped memory's gradients, zeros, by what is not finite."""
            return torch.where(over(finite, x), x, 0.0)

        gradient, loss, squares = descent(
            *(used(k), used(v), tuple(map(used, weights))),
            None if row_weights is None else used(row_weights),
            *(activation, reduction, lead),
        )
        rho, _ = clip(squares, max_grad_norm)
        keep, decay, step = 1.0 - used(alpha), used(eta), used(theta) * rho
        moved = [
            over(decay, s) * used(s) - over(step, g) * g
            for s, g in zip(momentum, gradient, strict=True)
        ]
        written = [over(keep, w) * used(w) + s for w, s in zip(weights, moved, strict=True)]
        new_weights, new_momentum = (
            tuple(torch.where(over(finite, x), x, y) for x, y in zip(new, old, strict=True))
            for new, old in ((written, weights), (moved, momentum))
        )
        loss = torch.where(finite, loss, came_loss)
        return DeepUpdate(new_weights, new_momentum, loss, came_squares.sqrt(), ~finite)


def descent(
    k: Tensor,
    v: Tensor,
    weights: Weights,
    row_weights: Tensor | None,
    activation: str,
    reduction: str,
    lead: int,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """(the gradient of the loss by the weights, the loss, the gradient's norm squared)."""
    factor: float | Tensor = loss_factor(reduction, k)
    if row_weights is not None:
        factor = factor * row_weights.unsqueeze(-1)
    rows = rows_of(k, v, weights, factor, activation)
    gradient = list(gradients_of(rows))
    loss = 0.5 * (rows.by_z[-1] * rows.residual).flatten(lead).sum(-1)
    squares = torch.stack([g.square().flatten(lead).sum(-1) for g in gradient]).sum(0)
    return gradient, loss, squares


def memory_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    write_mask: Tensor,
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
) -> DeepScan:
    """Write every token and read it; q, k, v ``[B, T, heads, D]``, the mask and the gates
    ``[B, T, heads]``.
    """
    with without_autocast(q.device):
        dtype = q.dtype
        q, k, v = (wide(x.transpose(1, 2)) for x in (q, k, v))
        gates = [wide(gate.transpose(1, 2)) for gate in (alpha, eta, theta)]
        written = write_mask.transpose(1, 2)
        k, v = (torch.where(written.unsqueeze(-1), x, 0.0) for x in (k, v))
        out = []
        for start in range(0, k.shape[-2], chunk):
            part = slice(start, start + chunk)
            alpha, eta, theta = (gate[..., part] for gate in gates)
            decays = decays_of(alpha, eta, theta, written[..., part])
            rows = rows_of(k[..., part, :], v[..., part, :], weights, FACTOR, activation)
            out.append(reads_of(q[..., part, :], rows, weights, momentum, decays, activation, read))
            weights, momentum = chunk_end(rows, weights, momentum, decays)
        y = torch.cat(out, -2) if out else q
        return DeepScan(y.transpose(1, 2).to(dtype), weights, momentum)


def rows_of(
    k: Tensor, v: Tensor, weights: Weights, factor: float | Tensor, activation: str
) -> DeepRows:
    """The loss is the sum over rows and features of factor / 2 times the squared residual."""
    layers = list(layers_of(weights))
    inputs, slopes = [k], []
    z = linear(k, *layers[0])
    for w, b in layers[1:]:
        x, slope, _ = activated(z, activation)
        inputs.append(x)
        slopes.append(slope)
        z = linear(x, w, b)
    residual = z - v
    by_z = [factor * residual]
    for (w, _), slope in zip(layers[:0:-1], slopes[::-1], strict=True):
        by_z.append((by_z[-1] @ w) * slope)
    return DeepRows(inputs, by_z[::-1], residual)


def gradients_of(rows: DeepRows, share: Tensor | None = None) -> Weights:
    """The gradient of the loss by the weights, every row's part times its share."""
    found = []
    for x, p in zip(rows.inputs, rows.by_z, strict=True):
        shared = p if share is None else share.unsqueeze(-1) * p
        found += [shared.mT @ x, shared.sum(-2)]
    return tuple(found)


def reads_of(
    q: Tensor,
    rows: DeepRows,
    weights: Weights,
    momentum: Weights,
    decays: Decays,
    activation: str,
    read: str,
) -> Tensor:
    """What the queries of one chunk read."""
    seen, keep, carry = decays.gamma, decays.keep, decays.carry
    if read == "before":
        # Every query reads what the token before it has left.
        seen = F.pad(seen, (0, 0, 1, 0))[..., :-1, :]
        keep, carry = F.pad(keep, (1, 0), value=1.0)[..., :-1], F.pad(carry, (1, 0))[..., :-1]
    x = q
    pairs = zip(layers_of(weights), layers_of(momentum), rows.inputs, rows.by_z, strict=True)
    for layer, (old, moving, keys, p) in enumerate(pairs):
        if layer > 0:
            x = activated(x, activation)[0]
        kept = keep.unsqueeze(-1) * linear(x, *old) + carry.unsqueeze(-1) * linear(x, *moving)
        # The ones carry the biases.
        x = kept - ((x @ keys.mT + 1.0) * seen) @ p
    return x


def chunk_end(
    rows: DeepRows, weights: Weights, momentum: Weights, decays: Decays
) -> tuple[Weights, Weights]:
    """Weights and momentum after the chunk's last token."""
    keep, carry, decay = decays.keep[..., -1], decays.carry[..., -1], decays.decay[..., -1]
    shares = gradients_of(rows, decays.gamma[..., -1, :])
    ended = [
        over(keep, w) * w + over(carry, s) * s - g
        for w, s, g in zip(weights, momentum, shares, strict=True)
    ]
    shares = gradients_of(rows, decays.nu[..., -1, :])
    moved = [over(decay, s) * s - g for s, g in zip(momentum, shares, strict=True)]
    return tuple(ended), tuple(moved)


def layers_of(weights: Weights) -> Iterator[tuple[Tensor, Tensor]]:
    """(w_l, b_l) of every layer."""
    return zip(weights[::2], weights[1::2], strict=True)
