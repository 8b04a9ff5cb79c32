"""The norm of all gradients, and their clipping: one launch adds squares, one takes the root and,
where that is wanted, scales.

    norm = sqrt(sum g^2)    g' = g min(1, max_norm / (norm + 1e-6))

Squares and their sum are fp64, in a fixed order: no gradient is too large or too small for its
square.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ._backends import Backend, check_backend, decline, launchers, uses_triton
from ._checks import check_clipped
from ._members import current, is_dense, local, mesh_of, on
from ._parts import total_squares

Tensor = torch.Tensor


class Gradients:
    """Some on one device; squares and clipping in plain torch."""

    def __init__(self, gradients: list[Tensor], device: torch.device) -> None:
        self.gradients, self.device = gradients, device

    def squares(self) -> list:
        """Sums of squares in fp64, ``[shares]``, by the mesh that they are of."""
        return [(mesh_of(g), local(g).double().square().sum().view(1)) for g in self.gradients]

    def norm_of(self, squares: Tensor) -> Tensor:
        return squares.sum().sqrt().float()

    def clip(self, squares: Tensor, max_norm: float) -> Tensor:
        """Scale in place; returns the norm."""
        norm = squares.sum().sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
        for g in self.gradients:
            mine = local(g)
            mine.copy_(mine.to(torch.promote_types(g.dtype, torch.float32)) * factor)
        return norm.float()


def parts_of(gradients: Iterable[Tensor], backend: Backend) -> list:
    """What takes the norm of each, by device and by whether kernels serve."""
    found: dict[tuple, list[Tensor]] = {}
    for g in gradients:
        mine = local(g)
        with_kernels = uses_triton(mine, backend)
        if with_kernels and not is_dense(mine):
            decline("a gradient has gaps in its memory", backend)
            with_kernels = False
        mesh = mesh_of(g)
        key = (mine.device, with_kernels, mine.dtype, mesh) if with_kernels else (mine.device,)
        found.setdefault(key, []).append(g)
    parts: list = []
    for key, some in found.items():
        with current(key[0]):
            if len(key) == 1:
                parts.append(Gradients(some, key[0]))
            else:
                parts.append(
                    launchers().KernelGradients(list(map(local, some)), mesh_of(some[0]), key[0])
                )
    return parts


@torch.no_grad()
def grad_norm(tensors: Tensor | Iterable[Tensor], *, backend: Backend = "auto") -> Tensor:
    """The L2 norm of all tensors together, as if they were one.

    Args:
        tensors: floating or complex, of any shapes, dtypes and devices; of DTensors all shards.
        backend: "auto" takes the kernels for CUDA tensors and plain torch for others; "triton"
            raises where the kernels cannot serve.

    Returns:
        0-d fp32 on the first tensor's device, without waiting for it; zero for no tensors.

    Raises:
        TypeError: a tensor is not floating or complex, or not strided.
        RuntimeError: backend is "triton" and the kernels cannot serve a tensor.
    """
    check_backend(backend)
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    check_clipped(given)
    if not given:
        return torch.zeros((), dtype=torch.float32)
    parts = parts_of(given, backend)
    squares = total_squares(parts)
    with current(parts[0].device):
        return parts[0].norm_of(squares)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, backend: Backend = "auto"
) -> Tensor:
    """Scale the gradients of all parameters in place, so that their norm together is at most
    ``max_norm``; torch.nn.utils.clip_grad_norm_'s formula for the L2 norm.

    Args:
        parameters: those without a gradient are passed by.
        max_norm: at least 0.
        backend: as ``grad_norm`` has it.

    Returns:
        The norm before, 0-d fp32 on the first gradient's device, without waiting for it; zero where
        there is no gradient. Where it is not finite the gradients become what torch makes of them:
        zero and NaN after inf, NaN after NaN.

    Raises:
        TypeError: a gradient is not floating or complex, or not strided.
        ValueError: max_norm is negative or NaN.
        RuntimeError: backend is "triton" and the kernels cannot serve a gradient.
    """
    check_backend(backend)
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0.0:
        raise ValueError(f"max_norm must be a number of at least 0, got {max_norm!r}")
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [p.grad for p in given if p.grad is not None]
    check_clipped(gradients)
    if not gradients:
        return torch.zeros((), dtype=torch.float32)
    parts = parts_of(gradients, backend)
    squares = total_squares(parts)
    norms = []
    for part in parts:
        with current(part.device):
            norms.append(part.clip(on(part.device, squares), float(max_norm)))
    return norms[0]
