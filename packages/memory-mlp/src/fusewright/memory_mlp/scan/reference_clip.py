"""Clip and guard of the scan in plain torch: gradients of tokens are scaled down to a norm; a chunk
after which the memory is not finite is not taken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..common.reference import Rows, over, rows_of
from ..common.weights import Weights, mapped

Tensor = torch.Tensor

# The gradient of |M(k) - v|^2 by M(k) is this times the residual.
FACTOR = 2.0


def clipped_rows(
    k: Tensor,
    v: Tensor,
    written: Tensor | None,
    weights: Weights,
    activation: str,
    residual_norm: bool,
    max_grad_norm: float,
) -> tuple[Rows, Tensor]:
    """``rows_of`` with each row's gradients by the layers, ``by_z``, scaled to the norm
    ``max_grad_norm`` of the row's gradient over all tensors of the memory, where it is larger; and
    by what, ``[.., N]``. Of a row whose norm is not finite nothing is left: a factor of 0.
    """
    with torch.no_grad():
        unchecked = rows_of(k, v, None, weights, FACTOR, activation, residual_norm)
        norm = norms_of(unchecked)
        clipped = norm > max_grad_norm
        if written is not None:
            clipped = clipped & written
        factors = torch.where(clipped, max_grad_norm / norm, 1.0)
        finite = norm.isfinite() & (factors > 0.0)
        # The gradient of a row of nothing is no row's: autograd would multiply it by 0.
        lost = ~finite if written is None else ~finite & written
        clipped, factors = clipped & finite, torch.where(lost, 0.0, factors)
        size = unchecked.by_z[-1].abs().amax(-1)
        size = torch.where(clipped & (size > 0.0), size, 1.0)
    k, v = (torch.where(finite.unsqueeze(-1), x, 0.0) for x in (k, v))
    # A clipped gradient is the same whatever it is multiplied by before. So each begins with a size
    # of 1, and its norm, over its own value, is 1: no derivative has the square of an outlier.
    rows = rows_of(k, v, 1.0 / size, weights, FACTOR, activation, residual_norm)
    norm = torch.where(clipped, norms_of(rows), 1.0)
    value = norm.detach()
    scale = torch.where(clipped, max_grad_norm / value / (norm / value), (~lost).to(norm.dtype))
    return rows._replace(by_z=[scale.unsqueeze(-1) * p for p in rows.by_z]), factors


def norms_of(rows: Rows) -> Tensor:
    """The norm of every row's gradient over all tensors of a memory: of layer l it is |p_l| times
    that of (x_(l-1), 1), the one being the bias.
    """
    layers = zip(rows.inputs, rows.by_z, strict=True)
    parts = [length(p) * length(F.pad(x, (0, 1), value=1.0)) for x, p in layers]
    return length(torch.stack(parts, -1))


def length(x: Tensor) -> Tensor:
    """The norm over the last axis: the squares do not overflow, and the derivative at 0 is 0."""
    largest = x.detach().abs().amax(-1)
    largest = torch.where(largest > 0.0, largest, 1.0)
    squares = (x / largest.unsqueeze(-1)).square().sum(-1)
    some = squares != 0.0
    return largest * torch.where(some, torch.where(some, squares, 1.0).sqrt(), 0.0)


def are_finite(weights: Weights, momentum: Weights) -> Tensor:
    """``[*lead]``: whether all numbers of a memory are."""
    lead = weights[1].ndim - 1
    parts = [x.detach().isfinite().flatten(lead).all(-1) for x in (*weights, *momentum)]
    return torch.stack(parts).all(0)


def kept_where(taken: Tensor, new: Weights, old: Weights) -> Weights:
    """``new`` for the memories that ``taken [*lead]`` names, ``old`` for the others."""
    return mapped(lambda x, y: torch.where(over(taken, x), x, y), new, old)


def lost_tokens(factors: Tensor, taken: Tensor, written: Tensor | None) -> Tensor:
    """``[*lead]``: how many of the tokens that were to be written have a factor of 0, or a chunk
    that was not taken; all ``[*lead, N]``.
    """
    lost = (factors == 0.0) | ~taken
    return (lost if written is None else lost & written).sum(-1)
