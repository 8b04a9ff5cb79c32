"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.attention import _configs, _problem
from fusewright.attention._backends import Card
from fusewright.attention._backward import launch_backward
from fusewright.attention._forward import launch_forward
from fusewright.attention._problem import Band
from fusewright.attention._rotary_launch import launch_rotary, launch_rotary_backward

# The card that is compiled for.
CARD = Card(
    multiprocessors=132,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
_problem.card_of = lambda device: CARD


def launch(
    keys: int, width: int, dtype: torch.dtype, batches: int = 2, lengths: bool = True
) -> None:
    """Forward and backward of one size."""
    q = torch.empty(batches, 1000, 8, width, dtype=dtype)
    k = torch.empty(batches, keys, 8, width, dtype=dtype)
    lse, softmax = torch.empty(batches, 8, 1000), torch.empty(2, batches, 8, 1000)
    key_lengths = torch.empty(batches, dtype=torch.int32) if lengths else None
    launch_forward(q, k, k, key_lengths, 0.125, True)
    launch_backward(q, lse, q, k, k, key_lengths, q, q, softmax, 0.125)


def launch_window(width: int, dtype: torch.dtype, prefix: int = 17) -> None:
    """Forward and backward of one sequence."""
    x = torch.empty(2, 1000, 8, width, dtype=dtype)
    lse, softmax = torch.empty(2, 8, 1000), torch.empty(2, 2, 8, 1000)
    band = Band(300, prefix)
    launch_forward(x, x, x, None, 0.125, True, band=band)
    launch_backward(x, lse, x, x, x, None, x, x, softmax, 0.125, band)


def launch_rotated(width: int, dtype: torch.dtype, beside: bool = True, kinds: int = 2) -> None:
    """Forward and backward of one sequence, with a shared prefix and with one for each row."""
    rows = torch.empty(4, 512, kinds, 8, width, dtype=dtype)
    cos = torch.empty(512, width // 2)
    for prefix in (torch.empty(16, *rows.shape[2:], dtype=dtype), rows[:, :16], None):
        joint = launch_rotary(rows, cos, cos, rows if beside else None, prefix)
        shared = prefix is not None and prefix.ndim == 4
        launch_rotary_backward(joint, cos, cos, beside, shared)


def one_of_each() -> None:
    """Every kernel once."""
    launch_rotated(40, torch.bfloat16)
    launch(1000, 64, torch.bfloat16)
    launch(64, 64, torch.bfloat16)
    launch_window(64, torch.bfloat16)


def every_line() -> None:
    """Every width and dtype of the tables, powers of 2 and others, with few keys and with many."""
    keys = {line.max_keys for line in _configs.SINGLE_TILE_BACKWARD}
    for width in (8, 16, 32, 40, 64, 80, 128):
        for dtype in (torch.bfloat16, torch.float32):
            launch_window(width, dtype)
            launch_window(width, dtype, prefix=16)
            for number in (1000, 16, *keys):
                launch(number, width, dtype)
                launch(number, width, dtype, batches=256, lengths=False)
    for width in (6, 16, 40, 64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            launch_rotated(width, dtype)
            launch_rotated(width, dtype, beside=False, kinds=1)
