"""Means and standard deviations of columns of tasks, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.transformer_np.layers import within


def scales_of(rows: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every column, those of `Column.of`: 1 where all values are
    equal.

    Args:
        rows: ``[B, n, columns]``.
        lengths: ``[B]``, how many rows of a task count; None means n.

    Returns:
        ``[B, 1, columns]`` each.
    """
    if lengths is None:
        mean = rows.mean(1, keepdim=True)
        variance = (rows - mean).square().mean(1, keepdim=True)
        low, high = rows.aminmax(dim=1, keepdim=True)
    else:
        counts = within(rows, lengths).unsqueeze(-1)
        number = counts.sum(1, keepdim=True).clamp(min=1)
        mean = torch.where(counts, rows, 0.0).sum(1, keepdim=True) / number
        squares = torch.where(counts, rows - mean, 0.0).square()
        variance = squares.sum(1, keepdim=True) / number
        low = torch.where(counts, rows, torch.inf).amin(1, keepdim=True)
        high = torch.where(counts, rows, -torch.inf).amax(1, keepdim=True)
    spread = variance.sqrt()
    # Of equal numbers the mean may be rounded to another one.
    varies = (spread > 0.0) & (low < high)
    return mean, torch.where(varies, spread, 1.0)


def standardised(rows: Tensor) -> Tensor:
    """``rows [B, n, columns]`` with mean 0 and variance 1 over the rows of each task."""
    mean, scale = scales_of(rows)
    return (rows - mean) / scale
