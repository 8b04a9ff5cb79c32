"""Tensor descriptors of what the kernels for Hopper copy in bulk."""

from __future__ import annotations

import torch

from .._core.kernels_gluon import TensorDescriptor, gl


def descriptor(x: torch.Tensor, strides: list[int], rows: int) -> TensorDescriptor:
    """``x`` [B, rows, H, D] in tiles of this many rows of one head."""
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    return TensorDescriptor(x, list(x.shape), strides, [1, rows, 1, x.shape[-1]], layout)


def statistics_descriptor(x: torch.Tensor) -> TensorDescriptor:
    """One number for each query of a head, [B H, tiles * QUERIES], in tiles of QUERIES."""
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 64], layout)


def dq_descriptor(x: torch.Tensor) -> TensorDescriptor:
    """Tiles of dq, [tiles QUERIES, COLUMNS], each in the order of registers."""
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout)
