"""What the tests of kernels compile for cards that are not there."""

from __future__ import annotations

import torch
from fusewright_models import _stream_launches as streams
from fusewright_models._fixed_point_kernels import advance, undo


def steps_of_states() -> None:
    """One on and one back, with and without halving."""
    delta = torch.empty(4096)
    state = torch.zeros(4096, dtype=torch.int32)
    saturated = torch.zeros((), dtype=torch.bool)
    for earlier in (None, state):
        _, _, dropped = advance(state, earlier, delta, 0.5, 2.0**20, saturated)
        undo(state, earlier, delta, 0.5, 2.0**20, dropped)


def stream_launches(n: int, width: int, *, origin: bool) -> None:
    """All launches of streams: from bf16 to bf16, with all that may arrive."""
    x, bf16 = torch.empty(4096, n, width), torch.empty(4096, width, dtype=torch.bfloat16)
    parts = n * (n + 2)
    phi, alpha, bias = torch.empty(parts, n * width), torch.empty(3), torch.empty(parts)
    u, post, logits, s_hat, scale = streams.launch_read(x, phi, alpha, bias, torch.bfloat16)
    streams.launch_write(x, logits, post, bf16, x if origin else None)
    streams.launch_write_backward(x, x, logits, post, bf16)
    arrived = x, x if origin else None, origin
    streams.launch_read_backward(u, post, logits, *arrived, x, phi, alpha, bias, s_hat, scale)


def streams_of_hybrids() -> None:
    """Of the model's presets."""
    for width in (64, 512, 4096):
        stream_launches(4, width, origin=width == 512)


def streams_of_all_numbers() -> None:
    for n in (1, 2, 3, 5, 8):
        stream_launches(n, 1000, origin=True)
