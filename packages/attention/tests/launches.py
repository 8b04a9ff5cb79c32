"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.attention._core.backends import DeviceProperties
from fusewright.attention.common import problem
from fusewright.attention.common.outputs import WORD
from fusewright.attention.positions import launch as rotary
from fusewright.attention.positions import launch_apply
from fusewright.attention.rectangular import launch as forward
from fusewright.attention.rectangular import launch_backward as backward
from fusewright.attention.window import launch as window

# The GPU that is compiled for.
GPU = DeviceProperties(
    multiprocessors=132,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
problem.device_properties = lambda device: GPU
# Columns and dtype.
PACKED_THAT_SPILL = (
    (16, torch.float32),
    (32, torch.bfloat16),
    (32, torch.float32),
    (128, torch.float32),
)


def launch(
    keys: int,
    width: int,
    dtype: torch.dtype,
    batches: int = 2,
    lengths: bool = True,
    key_heads: int = 8,
    sinks: bool = False,
    values: int | None = None,
) -> None:
    """Forward and backward of one size."""
    q = torch.empty(batches, 1000, 8, width, dtype=dtype)
    k = torch.empty(batches, keys, key_heads, width, dtype=dtype)
    lse, softmax = torch.empty(batches, 8, 1000), torch.empty(2, batches, 8, 1000)
    key_lengths = torch.empty(batches, dtype=torch.int32) if lengths else None
    of_heads = torch.empty(8) if sinks else None
    do, v = (x.new_empty(*x.shape[:3], values or width) for x in (q, k))
    forward.attention_forward(q, k, v, key_lengths, of_heads, 0.125, True)
    backward.attention_backward(
        do, lse, q, k, v, key_lengths, of_heads, do, words(do), softmax, 0.125
    )


def words(o: torch.Tensor) -> torch.Tensor:
    """What rounding took from o, in its words."""
    return o.new_empty((*o.shape[:-1], o.shape[-1] // WORD), dtype=torch.int32)


def launch_apart(width: int) -> None:
    """Tasks with gaps between them, which no tensor descriptor spans."""
    q = torch.empty(2, 1008, 8, width, dtype=torch.bfloat16)[:, :1000]
    lse, softmax = torch.empty(2, 8, 1000), torch.empty(2, 2, 8, 1000)
    forward.attention_forward(q, q, q, None, None, 0.125, True)
    backward.attention_backward(q, lse, q, q, q, None, None, q, words(q), softmax, 0.125)


def launch_hopper(
    lse: bool = True,
    width: int = 64,
    lengths: bool = False,
    key_heads: int = 8,
    sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """The passes of warp groups, with parts of their last tiles, which only Hopper has."""
    q = torch.empty(4, 2700, 8, width, dtype=dtype)
    k = torch.empty(4, 3200, key_heads, width, dtype=dtype)
    key_lengths = torch.empty(4, dtype=torch.int32) if lengths else None
    of_heads = torch.empty(8) if sinks else None
    forward.attention_forward(q, k, k, key_lengths, of_heads, 0.125, lse, True)
    if lse:
        softmax = torch.empty(2, 4, 8, 2700)
        backward.attention_backward(
            q, None, q, k, k, key_lengths, of_heads, q, words(q), softmax, 0.125
        )


def launch_hopper_together() -> None:
    """More keys than the cache holds."""
    q, k = (torch.empty(1, rows, 8, 64, dtype=torch.bfloat16) for rows in (1000, 70000))
    forward.attention_forward(q, k, k, None, None, 0.125, True)


def launch_window(
    width: int,
    dtype: torch.dtype,
    prefix: int = 17,
    key_heads: int = 8,
    sinks: bool = False,
    values: int | None = None,
    documents: int = 0,
) -> None:
    """Forward and backward of one sequence, or of one that is packed from documents."""
    x = torch.empty(2, 1000, 8, width, dtype=dtype)
    k = torch.empty(2, 1000, key_heads, width, dtype=dtype)
    lse, softmax = torch.empty(2, 8, 1000), torch.empty(2, 2, 8, 1000)
    band = window.Band(300, prefix)
    of_heads = torch.empty(8) if sinks else None
    do, v = (y.new_empty(*y.shape[:3], values or width) for y in (x, k))
    bounds = torch.empty(2, documents + 1, dtype=torch.int32) if documents else None
    window.attention_forward(x, k, v, bounds, of_heads, band, 0.125, True)
    window.attention_backward(
        do, lse, x, k, v, bounds, of_heads, do, words(do), softmax, band, 0.125
    )


def launch_hopper_single_tile(
    keys: int, lengths: bool = False, lse: bool = True, dtype: torch.dtype = torch.bfloat16
) -> None:
    """The passes of warp groups over few keys, where there are such."""
    q, k = (torch.empty(64, n, 8, 64, dtype=dtype) for n in (500, keys))
    of_rows = torch.empty(64, 8, 500) if lse else None
    n = torch.empty(64, dtype=torch.int32) if lengths else None
    forward.attention_forward(q, k, k, n, None, 0.125, lse)
    backward.attention_backward(q, of_rows, q, k, k, n, None, None, None, None, 0.125)


def launch_window_hopper(width: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
    """The passes of warp groups."""
    x = torch.empty(4, 4096, 8, width, dtype=dtype)
    softmax, band = torch.empty(2, 4, 8, 4096), window.Band(512, 0)
    for lse in (False, True):
        window.attention_forward(x, x, x, None, None, band, 0.125, lse)
    if width == 64:
        window.attention_backward(x, None, x, x, x, None, None, x, words(x), softmax, band, 0.125)


def launch_rotary(width: int, dtype: torch.dtype, beside: bool = True, kinds: int = 2) -> None:
    """Forward and backward of one sequence, with a shared prefix and with one for each row."""
    rows = torch.empty(4, 512, kinds, 8, width, dtype=dtype)
    cos = torch.empty(512, width // 2)
    for prefix in (torch.empty(16, *rows.shape[2:], dtype=dtype), rows[:, :16], None):
        joint = rotary.rotary_forward(rows, cos, cos, rows if beside else None, prefix)
        shared = prefix is not None and prefix.ndim == 4
        rotary.rotary_backward(joint, cos, cos, beside, shared)


def launch_apply_rotary(width: int, dtype: torch.dtype) -> None:
    """Forward and backward, of all columns and of some, with both kinds of pairs."""
    x = torch.empty(4, 512, 8, width, dtype=dtype)
    for half in {width // 2, 1}:
        cos = torch.empty(4, 512, half)
        for interleaved in (False, True):
            for back in (False, True):
                launch_apply.apply_rotary(x, cos, cos, interleaved, back)


def one_of_each() -> None:
    """Every kernel once."""
    launch_rotary(40, torch.bfloat16)
    launch_apply_rotary(40, torch.bfloat16)
    launch(1000, 64, torch.bfloat16)
    launch_hopper()
    launch_hopper(width=128, dtype=torch.float16)
    launch_window_hopper()
    launch_hopper_single_tile(64, lengths=True)
    launch_hopper_single_tile(128)
    launch(64, 64, torch.bfloat16)
    launch_window(64, torch.bfloat16)
    launch_window(64, torch.bfloat16, sinks=True)
    launch_window(64, torch.bfloat16, documents=9)


def grouped(sinks: bool = False) -> None:
    """Every kernel with heads that share keys."""
    for width in (40, 64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32)[: 2 if width <= 128 else 1]:
            launch(1000, width, dtype, key_heads=2, sinks=sinks)
            launch(64 if width <= 128 else 16, width, dtype, key_heads=2, sinks=sinks)
            launch_window(width, dtype, key_heads=2, sinks=sinks)
        if width <= 128:
            launch_window(width, torch.bfloat16, key_heads=2, sinks=sinks, documents=9)
    for width in (64, 128):
        for lengths in (False, True):
            launch_hopper(width=width, lengths=lengths, key_heads=2, sinks=sinks)
    launch_hopper(width=128, lengths=True, key_heads=2, sinks=sinks, dtype=torch.float16)


def with_sinks() -> None:
    """Every kernel with sinks, and with heads that share keys or without."""
    grouped(sinks=True)
    for width in (64, 128):
        launch(1000, width, torch.bfloat16, sinks=True)
        launch(64, width, torch.bfloat16, sinks=True)
        launch_window(width, torch.bfloat16, sinks=True)
        launch_hopper(width=width, sinks=True)


def spilling() -> None:
    """What spills: values wider than keys, and narrower ones, as those of latent attention; and
    wide heads in fp32. Of packed documents, on some GPU, also some heads of other widths, and those
    that share keys in fp32 or are wide.
    """
    for width, dtype in PACKED_THAT_SPILL:
        launch_window(width, dtype, documents=9)
    launch_window(256, torch.bfloat16, key_heads=2, sinks=True, documents=9)
    for width in (40, 64, 128):
        launch_window(width, torch.float32, key_heads=2, sinks=True, documents=9)
    for width in (136, 256):
        launch_window(width, torch.float32)
        for keys in (16, 1000):
            launch(keys, width, torch.float32)
            launch(keys, width, torch.float32, sinks=True, key_heads=2)
    for width, values in ((64, 128), (192, 128), (128, 256)):
        for dtype in (torch.bfloat16, torch.float32):
            launch(1000, width, dtype, values=values, sinks=True, key_heads=2)
            launch(16, width, dtype, values=values, sinks=True, key_heads=2)
            launch_window(width, dtype, values=values, sinks=True, key_heads=2)


def every_line() -> None:
    """Every width and dtype of the tables, powers of 2 and others, with few keys and with many."""
    grouped()
    with_sinks()
    for width in (64, 128):
        launch_hopper(width=width)
        launch_hopper(False, width)
        launch_hopper(width=width, lengths=True)
        launch_hopper(width=width, dtype=torch.float16)
    launch_hopper_together()
    for number in (3, 20, 64, 100, 128):
        for lengths in (False, True):
            for lse in (False, True):
                launch_hopper_single_tile(number, lengths, lse)
        launch_hopper_single_tile(number, dtype=torch.float16)
    for width in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            launch_window_hopper(width, dtype)
    keys = {line.max_keys for line in backward.SINGLE_TILE_BACKWARD}
    for width in (8, 16, 32, 40, 64, 80, 128, 136, 256):
        for dtype in (torch.bfloat16, torch.float32)[: 2 if width <= 128 else 1]:
            launch_window(width, dtype)
            launch_window(width, dtype, prefix=16)
            if (width, dtype) not in PACKED_THAT_SPILL:
                launch_window(width, dtype, documents=9)
            for number in (1000, 16, *keys):
                launch(number, width, dtype)
                launch(number, width, dtype, batches=256, lengths=False)
    for width in (32, 64, 128):
        launch_apart(width)
    for width in (6, 16, 40, 64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            launch_rotary(width, dtype)
            launch_rotary(width, dtype, beside=False, kinds=1)
            launch_apply_rotary(width, dtype)


def all_lines() -> None:
    """Every line of the tables, those that spill included."""
    every_line()
    spilling()
