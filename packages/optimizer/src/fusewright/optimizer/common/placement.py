"""Where the memory of a parameter is: its device, its mesh, its order.

DTensors are taken by their local shards, complex parameters as pairs of real numbers.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

Tensor = torch.Tensor
# Of the tensors that may stand for a group's numbers.
NUMBER_DTYPES = (torch.float32, torch.float64)


def is_distributed(x: Tensor) -> bool:
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """The memory of this process, as real numbers."""
    if is_distributed(x):
        x = x._local_tensor  # type: ignore[attr-defined]
    return torch.view_as_real(x) if x.is_complex() else x


def mesh_of(x: Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh of a DTensor and its axes that shard it; None of another tensor."""
    if not is_distributed(x):
        return None
    placements = x.placements  # type: ignore[attr-defined]
    # All that is not replicated: FSDP2's shards of sharded tensors are no torch Shard.
    sharded = tuple(axis for axis, how in enumerate(placements) if not how.is_replicate())
    return x.device_mesh, sharded  # type: ignore[attr-defined]


def placement_of(x: Tensor) -> tuple[Any, Any] | None:
    """The mesh of a DTensor and how it lies there; None of another tensor."""
    if not is_distributed(x):
        return None
    return x.device_mesh, x.placements  # type: ignore[attr-defined]


def placed_like(g: Tensor | None, p: Tensor) -> Any:
    """A DTensor's gradient with its parameter's placements: partial sums are all-reduced."""
    if g is None or not (is_distributed(g) and is_distributed(p)):
        return g
    placements = p.placements  # type: ignore[attr-defined]
    if g.placements == placements:  # type: ignore[attr-defined]
        return g
    return g.redistribute(placements=placements)  # type: ignore[attr-defined]


def placed_as(p: Tensor, x: Tensor, axes: tuple[int | None, ...]) -> Tensor:
    """What a process has of a tensor, placed as p where p is a DTensor; ``axes`` are p's of each of
    the tensor's, None of one that p does not have.
    """
    if not is_distributed(p):
        return x
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [
        Shard(axes.index(how.dim)) if how.is_shard() and how.dim in axes else Replicate()
        for how in p.placements  # type: ignore[attr-defined]
    ]
    shape = [n if axis is None else p.shape[axis] for axis, n in zip(axes, x.shape, strict=True)]
    # In the order of its memory here.
    stride, count = [0] * x.ndim, 1
    for axis in sorted(range(x.ndim), key=lambda axis: (x.stride(axis), -axis)):
        stride[axis], count = count, count * max(shape[axis], 1)
    return DTensor.from_local(
        x,
        p.device_mesh,  # type: ignore[attr-defined]
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def summed(g: Tensor) -> Tensor:
    """A DTensor without partial sums, which an all-reduce adds; any other tensor as it is."""
    if not is_distributed(g):
        return g
    placements = g.placements  # type: ignore[attr-defined]
    if not any(how.is_partial() for how in placements):
        return g
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if how.is_partial() else how for how in placements]
    return g.redistribute(placements=whole)  # type: ignore[attr-defined]


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill memory without gaps, in any order of axes."""
    expected = 1
    axes = zip(x.stride(), x.shape, strict=True)
    for stride, length in sorted((s, n) for s, n in axes if n != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= length
    return True


def laid_out_like(x: Tensor, p: Tensor) -> Tensor:
    """x in the order of p's memory."""
    if x.stride() == p.stride() and not x.is_neg():
        return x
    return torch.empty_like(p, dtype=x.dtype).copy_(x)


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the device the current one, on which plans allocate and launch."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def on(device: torch.device, x: Tensor | None) -> Any:
    """x on the device; None for None. Only a copy to the CPU waits for a GPU: the CPU would read
    memory that is not written yet.
    """
    return None if x is None else x.to(device, non_blocking=device.type != "cpu")


def number_on(device: torch.device, x: Any) -> float | Tensor:
    """x itself where it is a tensor that kernels read on this device, else its value."""
    # Users may have replaced it since it was checked; kernels read fp32 and fp64.
    on_device = torch.is_tensor(x) and x.device == device and x.dtype in NUMBER_DTYPES
    return x if on_device else float(x)
