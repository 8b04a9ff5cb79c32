"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.hyper_connections._core.backends import DeviceProperties
from fusewright.hyper_connections.streams import launch, launch_backward

GPU = DeviceProperties(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
launch_backward.device_properties = lambda device: GPU


def stream_launches(n: int, width: int, *, origin: bool) -> None:
    """All launches of streams: from bf16 to bf16, with all that may arrive."""
    x, bf16 = torch.empty(4096, n, width), torch.empty(4096, width, dtype=torch.bfloat16)
    parts = n * (n + 2)
    phi, alpha, bias = torch.empty(parts, n * width), torch.empty(3), torch.empty(parts)
    u, post, logits, *saved = launch.stream_read(x, phi, alpha, bias, 1e-6, torch.bfloat16)
    launch.stream_write(x, logits, post, bf16, x if origin else None)
    launch_backward.stream_write_backward(x, x, logits, post, bf16)
    arrived = u, post, logits, x, x if origin else None
    launch_backward.stream_read_backward(*arrived, x, phi, alpha, bias, *saved, origin)


def streams_of_hybrids() -> None:
    """Of the model's presets."""
    for width in (64, 512, 4096):
        stream_launches(4, width, origin=width == 512)


def streams_of_all_numbers() -> None:
    for n in (1, 2, 3, 5, 8):
        stream_launches(n, 1000, origin=True)
