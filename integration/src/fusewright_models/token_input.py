"""What language models ask of the tokens that they are given."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tokens(tokens: Tensor, device: torch.device, *, least: int = 0) -> None:
    """Refuse what a model on this device cannot read, before anything is computed.

    Args:
        tokens: ``[B, T]``; ``[B, T + 1]`` where a row is to have ``least`` of them.

    Raises:
        TypeError: they are no tensor of integers.
        ValueError: their shape or device is another.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"wanted tokens as a tensor; got {type(tokens).__name__}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"wanted tokens in int64 or int32; got {tokens.dtype}")
    if tokens.ndim != 2 or tokens.shape[1] < least:
        wanted = "[B, T]" if not least else f"[B, T + 1], at least {least} in a row"
        raise ValueError(f"wanted tokens {wanted}; got {list(tokens.shape)}")
    if tokens.device != device:
        raise ValueError(
            f"wanted tokens on the model's device, {device}; got them on {tokens.device}"
        )
