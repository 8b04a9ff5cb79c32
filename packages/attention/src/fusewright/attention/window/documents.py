"""Documents that are packed into a sequence, and padding around them, as the kernels and the
reference take them.

Bounds are [B, N + 1], int32: document d of a row of the batch has its rows behind the prefix from
bounds[d] to bounds[d + 1]. Nothing here reads them on the host.
"""

from __future__ import annotations

import torch

from .._core.launches import cdiv

Tensor = torch.Tensor

# What else a sequence has, in tiles of its own: the prefix, and padding on both sides.
BESIDE_DOCUMENTS = 3


def bounds_of(cu_seqlens: Tensor | None, key_lengths: Tensor | None, rows: int) -> Tensor | None:
    """The bounds of ``rows`` rows behind the prefix, in order and range; None where all are of one
    document.
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens if cu_seqlens.ndim == 2 else cu_seqlens.unsqueeze(0)
        return bounds.clamp(0, rows).cummax(-1).values.int()
    if key_lengths is not None:
        return torch.nn.functional.pad(key_lengths.clamp(0, rows).unsqueeze(-1), (1, 0)).int()
    return None


def count_tiles(rows: int, size: int, documents: int) -> int:
    """How many tiles of ``size`` cover ``rows`` rows; of so many documents, at most."""
    return rows // size + documents + BESIDE_DOCUMENTS if documents else cdiv(rows, size)
