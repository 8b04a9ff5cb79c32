"""Tensor descriptors of what the kernel for Hopper copies in bulk."""

from __future__ import annotations

import torch

from .._core.kernels_gluon import TensorDescriptor, gl


def descriptor(x: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A matrix in tiles of ``rows`` and ``cols``."""
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, cols], layout)
