"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import itertools
import os

import torch
from fusewright.feed_forward._core import product_hopper
from fusewright.feed_forward._core.backends import DeviceProperties
from fusewright.feed_forward.gating import launch as gating
from fusewright.feed_forward.narrow import launch as narrow
from fusewright.feed_forward.perceptron import launch as perceptron
from fusewright.feed_forward.perceptron import launch_hopper

BF16 = torch.bfloat16
DTYPES = (BF16, torch.float16, torch.float32)
GPU = DeviceProperties(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
product_hopper.device_properties = narrow.device_properties = lambda device: GPU


def launch(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Forward and backward of two tensors, each one run of elements."""
    gate, up = torch.empty(2, rows, cols, dtype=dtype)
    gating.silu_mul_backward(gating.silu_mul(gate, up), gate, up)


def launch_halves(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Forward and backward of the halves of one tensor, whose rows have gaps between them."""
    joint = torch.empty(rows, 2 * cols, dtype=dtype)
    gating.silu_mul_halves_backward(gating.silu_mul_halves(joint), joint)


def launch_heads(dtype: torch.dtype) -> None:
    """Forward and backward of rows that two strides reach."""
    gate, up = (torch.empty(8, 64, 12, 128, dtype=dtype)[:, :, 0] for _ in range(2))
    gating.silu_mul_backward(gating.silu_mul(gate, up).transpose(0, 1), gate, up)


def launch_silu(rows: int, cols: int, dtype: torch.dtype) -> None:
    """SiLU of a hidden layer, and its derivative."""
    u, h = torch.empty(2, rows, cols, dtype=dtype)
    perceptron.silu(u, h)
    perceptron.silu_backward(h, u)


def launch_epilogues(rows: int, dtype: torch.dtype, cols: int = 512) -> None:
    """SiLU in the epilogue of a product, with u and without, and its derivative."""
    if GPU.capability != 90:
        return
    x, hidden_weight = torch.empty(rows, cols, dtype=dtype), torch.empty(1376, cols, dtype=dtype)
    u = torch.empty(rows, 1376, dtype=dtype)
    for keeps in (True, False):
        launch_hopper.product_silu(x, hidden_weight, keeps)
    launch_hopper.product_silu_backward(x, hidden_weight.mT.contiguous(), u)


def launch_narrow(inner: int, dtype: torch.dtype, result: torch.dtype) -> None:
    """SiLU of few columns, and its derivative, with the gradient of x and without."""
    x, weight = torch.empty(4096, inner, dtype=dtype), torch.empty(512, inner, dtype=dtype)
    dh = torch.empty_like(narrow.silu_linear(x, weight, result))
    for x_grad in (True, False):
        narrow.silu_linear_backward(dh, x, weight, x_grad, True)


def one_of_each() -> None:
    """Every kernel in both forms, at the sizes of a model."""
    launch(4096, 5504, BF16)
    launch_halves(4096, 5504, BF16)
    launch_silu(4096, 1376, BF16)
    launch_epilogues(4096, BF16)
    launch_narrow(11, torch.float32, BF16)


def every_form() -> None:
    """Every dtype, lengths that allow 16 bytes at a time and such that do not, rows of any kind."""
    launch_epilogues(4096, torch.float16)
    # The most slices of which those of two tiles have room, and one.
    for cols in (384, 64):
        launch_epilogues(4096, BF16, cols)
    for dtype, cols in itertools.product(DTYPES, (5504, 1000, 1365, 3)):
        launch(4096, cols, dtype)
        launch(1, cols, dtype)
        launch_halves(4096, cols, dtype)
        launch_heads(dtype)
        launch_silu(4096, cols, dtype)
    for dtype, inner in itertools.product(DTYPES, (64, 20, 1)):
        launch_narrow(inner, dtype, dtype)
