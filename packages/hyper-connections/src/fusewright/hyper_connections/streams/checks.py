"""Checks of streams and what goes with them, and whether the kernels serve them."""

from __future__ import annotations

import torch

from .._core.backends import Backend, decline, uses_triton
from .._core.checks import check_device, check_floating

Tensor = torch.Tensor

# Streams that the kernels are made for.
WIDEST = 8


def check_streams(name: str, x: Tensor) -> None:
    """Floating streams ``[..., n, C]``, one at least of one column at least."""
    check_floating(name, x)
    if x.ndim < 2 or not (x.shape[-2] and x.shape[-1]):
        raise ValueError(
            f"{name} must be streams [..., n, C], n and C at least 1, got {list(x.shape)}"
        )


def check_beside(name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """A floating tensor of this shape on the streams' device."""
    check_floating(name, tensor)
    if tensor.shape != shape:
        raise ValueError(
            f"{name} must be {list(shape)} for streams {list(x.shape)}, got {list(tensor.shape)}"
        )
    check_device(name, tensor, "x", x)


def check_gates(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> None:
    """Streams, and the parameters that their coefficients are made with."""
    check_streams("x", x)
    n, width = x.shape[-2:]
    check_beside("phi", phi, (n * (n + 2), n * width), x)
    check_beside("alpha", alpha, (3,), x)
    check_beside("bias", bias, (n * (n + 2),), x)


def serves(x: Tensor, backend: Backend) -> bool:
    """Whether the kernels take streams like these."""
    if not uses_triton(x, backend):
        return False
    n = x.shape[-2]
    if n > WIDEST:
        decline(f"the kernels serve up to {WIDEST} streams, not {n}", backend)
    return n <= WIDEST
