"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import math
import os

import torch
from fusewright.deltanet._core.backends import DeviceProperties
from fusewright.deltanet.convolution import launch as convolution
from fusewright.deltanet.gated_norm import launch as gated_norm
from fusewright.deltanet.rule import launch as rule
from fusewright.deltanet.rule.launch_backward import rule_backward
from fusewright.deltanet.rule.launch_step import step_forward

# So many that the lines of the most programs are taken.
GPU = DeviceProperties(
    multiprocessors=132,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
rule.device_properties = convolution.device_properties = lambda device: GPU

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def launch(
    dtype: torch.dtype,
    keys: int = 128,
    width: int = 128,
    *,
    heads: tuple[int, int] = (8, 8),
    batch: int = 4,
    lengths: bool = False,
    starts: bool = True,
    first: int = 0,
    gap: int = 0,
) -> None:
    """Forward and backward with every gradient; q and v begin ``first`` numbers into their memory
    and have ``gap`` numbers between heads.
    """

    def within(*shape: int) -> torch.Tensor:
        wide = *shape[:-1], shape[-1] + gap
        memory = torch.empty(first + math.prod(wide), dtype=dtype)
        return memory[first:].view(wide)[..., : shape[-1]]

    q = within(batch, 128, heads[0], keys)
    v = within(batch, 128, heads[1], width)
    g = torch.empty(batch, 128, heads[1])
    cu_seqlens = torch.tensor([0, 128]) if lengths else None
    state = torch.empty(batch, heads[1], keys, width) if starts else None
    operands = (q, q, v, g, g, state, cu_seqlens)
    o, end, *saved = rule.rule_forward(*operands, 0.1)
    rule_backward(o, end, *operands, *saved, 0.1)


def launch_one_step(dtype: torch.dtype, keys: int = 128, width: int = 128) -> None:
    q, v = torch.empty(2, 2, keys, dtype=dtype), torch.empty(2, 4, width, dtype=dtype)
    gate = torch.empty(2, 4)
    step_forward(q, q, v, gate, gate, torch.empty(2, 4, keys, width), 0.1)


def launch_the_layer(dtype: torch.dtype, heads: int = 8, width: int = 128) -> None:
    """The launches of a layer before and after the rule."""
    x, weight = torch.empty(2, 64, heads * width, dtype=dtype), torch.empty(heads * width, 4)
    for unit in (0, heads):
        convolution.convolution_forward(x, weight, None, None, unit)
        for rows in (x, torch.empty(4, 4096, *x.shape[2:], dtype=dtype)):
            convolution.convolution_backward(rows, rows, weight, None, None, unit)
    rows, gain = x.view(2, 64, heads, width), torch.empty(width)
    gated_norm.norm_forward(rows, gain, rows, 1e-5)
    gated_norm.norm_backward(rows, rows, gain, rows, 1e-5)


def one_of_each() -> None:
    """Every kernel once, at the width of a model's heads."""
    launch(BF16)
    launch_one_step(BF16)
    launch_the_layer(BF16)


def every_launch() -> None:
    """Widths of 32 to 256 in bf16, values wider than keys, shared heads, sequences, few heads."""
    for width in (32, 64, 96, 256):
        launch(BF16, width, width)
    launch(BF16, 256, 512 // 2)
    launch(BF16, 64, 128, heads=(4, 8))
    launch(BF16, batch=1, lengths=True, starts=False)
    launch(BF16, batch=64)
    launch(BF16, batch=1, first=1)
    launch(BF16, 64, 64, batch=1, gap=8)
    launch(F16)
    launch_one_step(BF16, 256, 256)
    launch_the_layer(BF16, 4, 256)
    launch_the_layer(F32)


def every_exact_launch() -> None:
    """fp32, whose operands are twice as large, in both precisions."""
    for precision in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = precision
        for width in (64, 128, 256):
            launch(F32, width, width)
    launch_one_step(F32)
