"""The norm of all gradients, and their clipping: one launch adds squares, a second one takes the
root and, for clipping, scales.

    norm = sqrt(sum g^2)    g' = g min(1, max_norm / (norm + 1e-6))

Squares and their sum are fp64, in a fixed order: no square overflows or vanishes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .._core.backends import Backend, check_backend, decline, uses_triton
from .._core.checks import checked_real
from ..common.checks import check_elements
from ..common.placement import current, is_dense, local, mesh_of, on, summed
from ..common.step import total_squares
from ..common.tables import same
from . import launch
from .reference import ReferenceGradients

Tensor = torch.Tensor


@torch.no_grad()
def grad_norm(tensors: Tensor | Iterable[Tensor], *, backend: Backend = "auto") -> Tensor:
    """The L2 norm of all tensors together, as if they were one.

    Args:
        tensors: floating or complex, of any shapes, dtypes and devices; of DTensors all shards,
            and the sum of partial sums.
        backend: "auto" takes the kernels for CUDA tensors and plain torch for others; "triton"
            raises where the kernels cannot serve.

    Returns:
        0-d fp32 on the first tensor's device, without waiting for it; zero for no tensors.

    Raises:
        TypeError: a tensor is not floating or complex, or not strided.
        RuntimeError: backend is "triton" and the kernels cannot serve a tensor.
    """
    check_backend(backend)
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    check_gradients(gradients)
    if not gradients:
        return torch.zeros((), dtype=torch.float32)
    parts = parts_of(map(summed, gradients), backend)
    squares = total_squares(parts)
    with current(parts[0].device):
        return parts[0].norm_of(squares)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Scale the gradients of all parameters in place, so that their norm together is at most
    ``max_norm``: torch.nn.utils.clip_grad_norm_, with the L2 norm in fp64.

    Args:
        parameters: those without a gradient are skipped.
        max_norm: at least 0; a tensor of one number is not read by the host: plain torch scales.
        norm_type: p of the norm, above 0, infinity too; plain torch takes another norm than L2.
        error_if_nonfinite: raise where the norm is not finite, before anything is scaled; the host
            waits for the norm.
        foreach: as torch has it, where plain torch takes the norm.
        backend: as ``grad_norm`` has it.

    Returns:
        The norm before, 0-d fp32 on the first gradient's device, without waiting for it; zero where
        there is no gradient. Where it is not finite the gradients become what torch makes of them:
        zero and NaN after inf, NaN after NaN.

    Raises:
        TypeError: a gradient is not floating or complex, or not strided; max_norm or norm_type is
            no number.
        ValueError: max_norm is negative or NaN, or a tensor of several numbers; norm_type is not
            above 0.
        RuntimeError: backend is "triton" and the kernels cannot serve a gradient or the norm; or
            the norm is not finite, where that is an error.
    """
    check_backend(backend)
    if isinstance(max_norm, Tensor):
        if max_norm.numel() != 1:
            raise ValueError(f"max_norm must be one number, got shape {list(max_norm.shape)}")
    elif not checked_real("max_norm", max_norm) >= 0.0:
        raise ValueError(f"max_norm must be a number of at least 0, got {max_norm!r}")
    if not checked_real("norm_type", norm_type) > 0.0:
        raise ValueError(f"norm_type must be a number above 0, got {norm_type!r}")
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    check_gradients(gradients)
    if not gradients:
        return torch.zeros((), dtype=torch.float32)
    if norm_type != 2.0:
        if backend == "triton":
            decline(f"the norm is that of p = {norm_type}", backend)
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
        norm = getattr(norm, "full_tensor", lambda: norm)()
        if error_if_nonfinite:
            check_finite(norm)
        return scaled_to(gradients, norm, max_norm).float()
    whole = list(map(summed, gradients))
    parts = parts_of(whole, backend)
    squares = total_squares(parts)
    # Partial sums are scaled where they are.
    by_torch = isinstance(max_norm, Tensor) or not same(whole, gradients)
    if error_if_nonfinite or by_torch:
        with current(parts[0].device):
            norm = squares.sum().sqrt()
        if error_if_nonfinite:
            check_finite(norm)
        if by_torch:
            return scaled_to(gradients, norm, max_norm).float()
    norms = []
    for part in parts:
        with current(part.device):
            norms.append(part.clip(on(part.device, squares), float(max_norm)))
    return norms[0]


def check_finite(norm: Tensor) -> None:
    value = norm.item()  # sync: error_if_nonfinite says that it waits
    if not math.isfinite(value):
        raise RuntimeError(f"wanted gradients with a finite norm, got {value}")


def scaled_to(gradients: list[Tensor], norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Scale by plain torch; returns the norm."""
    if isinstance(max_norm, Tensor):
        max_norm = on(norm.device, max_norm.detach()).reshape(())
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    groups: dict[torch.device, list[Tensor]] = {}
    for g in map(local, gradients):
        groups.setdefault(g.device, []).append(g)
    for device, group in groups.items():
        torch._foreach_mul_(group, on(device, factor))
    return norm


def check_gradients(gradients: list[Tensor]) -> None:
    for g in gradients:
        # A call takes longer than the test, and each step has as many as parameters.
        if g.layout is not torch.strided or not (g.is_floating_point() or g.is_complex()):
            check_elements("a gradient", g, complex_too=True)


def parts_of(gradients: Iterable[Tensor], backend: Backend) -> list:
    """The gradients by device and by what serves them, as ``total_squares`` takes them."""
    groups: dict[tuple, list[Tensor]] = {}
    for g in gradients:
        memory = local(g)
        with_kernels = uses_triton(memory, backend)
        if with_kernels and not is_dense(memory):
            decline("a gradient has gaps in its memory", backend)
            with_kernels = False
        device, mesh = memory.device, mesh_of(g)
        key = (device, with_kernels, memory.dtype, mesh) if with_kernels else (device,)
        groups.setdefault(key, []).append(g)
    parts: list = []
    for (device, *kernels), group in groups.items():
        with current(device):
            if kernels:
                memories = list(map(local, group))
                parts.append(launch.KernelGradients(memories, mesh_of(group[0]), device))
            else:
                parts.append(ReferenceGradients(group, device))
    return parts
