"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.mixture_head._core import product_hopper
from fusewright.mixture_head._core.backends import DeviceProperties
from fusewright.mixture_head.grouped import launch as grouped_launch
from fusewright.mixture_head.heads import launch as heads_launch
from fusewright.mixture_head.heads import launch_hopper
from fusewright.mixture_head.mixture import launch as mixture_launch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS = 4096
# What the plan asks of the GPU that is compiled for.
GPU = DeviceProperties(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
product_hopper.device_properties = lambda device: GPU


def launch(components: int, dtype: torch.dtype, softplus: bool, masked: bool, mean: bool) -> None:
    """Forward and backward of the log-likelihood with every gradient."""
    params, y = torch.empty(ROWS, components, 3, dtype=dtype), torch.empty(ROWS)
    mask = torch.empty(ROWS, dtype=torch.bool) if masked else None
    scale = (softplus, -7.0, 5.0, 1e-3)
    value, params_slope, y_slope, factor = mixture_launch.mixture_forward(
        params, y, mask, *scale, mean
    )
    assert params_slope is not None
    assert y_slope is not None
    for y_grad in (True, False):
        mixture_launch.mixture_backward(
            value, factor, mask, params_slope, y_slope, dtype, F32, y_grad
        )


def launch_heads(heads: int, stored: int, dtype: torch.dtype) -> None:
    u, weight = torch.empty(ROWS, heads, stored, dtype=dtype), torch.empty(heads, stored, 3)
    out = heads_launch.silu_heads(u, weight)
    heads_launch.silu_heads_backward(out, u, weight)
    heads_launch.silu_heads_backward_(out, u, weight)


def launch_epilogues(heads: int, stored: int, dtype: torch.dtype) -> None:
    """The second layers in the epilogue of the product of the first ones."""
    if GPU.capability != 90:
        return
    x = torch.empty(ROWS, 512, dtype=dtype)
    hidden, output = torch.empty(heads * stored, 512, dtype=dtype), torch.empty(heads, stored, 3)
    for keeps in (True, False):
        launch_hopper.product_heads(x, hidden, output, keeps)


def launch_groups(stored: int, dtype: torch.dtype) -> None:
    """Rows in groups, forward and backward."""
    x, weight = torch.empty(ROWS, 512, dtype=dtype), torch.empty(10, stored, 512, dtype=dtype)
    ends = torch.empty(10, dtype=torch.int64)
    y = grouped_launch.grouped_linear(x, weight, ends)
    grouped_launch.grouped_linear_backward(y, x, weight, ends, x_grad=True, weight_grad=True)


def one_of_each() -> None:
    """Every kernel once, at the sizes of the model."""
    launch(10, BF16, softplus=True, masked=True, mean=True)
    launch_heads(10, 1376, BF16)
    launch_epilogues(10, 1376, BF16)
    launch_groups(1376, BF16)


def every_line() -> None:
    """Every line of the table in every form; the last one serves any number of components."""
    for components in [int(config.max_components) for config in mixture_launch.FORWARD[:-1]] + [
        100
    ]:
        for dtype in (BF16, F16, F32):
            for form in range(8):
                launch(components, dtype, bool(form & 1), bool(form & 2), form > 3)
    for dtype in (BF16, F16, F32):
        launch_heads(10, 1376, dtype)
        launch_heads(3, 7, dtype)
        launch_groups(1376, dtype)
        launch_groups(7, dtype)
    for dtype in (BF16, F16):
        launch_epilogues(10, 1376, dtype)
        launch_epilogues(3, 8, dtype)
