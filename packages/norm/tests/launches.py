"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.norm._core.backends import DeviceProperties
from fusewright.norm.norm_linear import launch as linear
from fusewright.norm.norm_linear import launch_hopper
from fusewright.norm.row_norm import launch as forward
from fusewright.norm.row_norm import launch_backward as backward
from fusewright.norm.sinkhorn import launch as sinkhorn

# The stages of a backward pass are cut to the shared memory of the GPU that is compiled for.
GPU = DeviceProperties(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
backward.device_properties = sinkhorn.device_properties = lambda device: GPU
launch_hopper.device_properties = lambda device: GPU

ROWS = 4096


def launch(op: str, cols: int, dtype: torch.dtype, rows: int = ROWS) -> None:
    """Forward and backward of one op with every gradient."""
    x, weight = torch.empty(rows, cols, dtype=dtype), torch.empty(cols, dtype=dtype)
    statistics = torch.empty(rows)
    center = op in ("layer_norm", "add_layer_norm")
    gated = dict(gate=x, activation="silu") if op == "rms_norm_gated" else {}
    other = x if op in ("add_rms_norm", "add_layer_norm") else None
    bias = weight if center else None
    forward.norm_forward(x, other, weight, bias, 1e-6, 0.0, center=center, **gated)
    mean = statistics if center else None
    backward.norm_backward(
        *(x, other, x, weight, bias, mean, statistics, 0.0),
        weight_grad=True,
        bias_grad=center,
        **gated,
    )


def sinkhorn_passes(n: int, dtype: torch.dtype, domain: str) -> None:
    """Forward and backward of sinkhorn_knopp."""
    x = torch.empty(100, n, n, dtype=dtype)
    sinkhorn.sinkhorn_forward(x, 20, 1e-6, domain)
    sinkhorn.sinkhorn_backward(x, x, 20, 1e-6, domain)


def launch_linear(
    cols: int,
    outputs: int,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    affine: bool = True,
) -> None:
    """A norm and the linear layer behind it; what other GPUs launch is a norm, and a product on
    the CPU.
    """
    if GPU.capability != 90:
        return
    x, weight = torch.empty(rows, cols, dtype=dtype), torch.empty(outputs, cols, dtype=dtype)
    of_norm, bias = (torch.empty(n, dtype=dtype) if affine else None for n in (cols, outputs))
    for center, norm_bias in ((True, of_norm), (False, None)):
        linear.norm_linear_forward(x, of_norm, norm_bias, weight, bias, 1e-6, 0.0, center)
        rstd = torch.empty(rows)
        backward.norm_backward(
            *(x, None, x, of_norm, norm_bias, rstd if center else None, rstd, 0.0),
            weight_grad=affine,
            bias_grad=norm_bias is not None,
            y_dtype=dtype,
        )


def one_of_each() -> None:
    """Every kernel once: a row in registers, a small tensor, a wide row; small matrices and the
    largest.
    """
    sinkhorn_passes(4, torch.float32, "linear")
    sinkhorn_passes(64, torch.float32, "log")
    launch("add_rms_norm", 4096, torch.bfloat16)
    launch("rms_norm_gated", 128, torch.bfloat16)
    launch("layer_norm", 1000, torch.bfloat16, rows=64)
    launch("layer_norm", 40000, torch.bfloat16)
    launch_linear(256, 512, rows=16384)


def every_line() -> None:
    """Every op and dtype at every width of the tables, and beyond."""
    for line in launch_hopper.FASTER:
        sizes = line.fewest_outputs, line.fewest_rows
        launch_linear(line.max_cols, *sizes)
        launch_linear(line.max_cols - 56, *sizes, dtype=torch.float16, affine=False)
    for n in (*(config.max_n for config in sinkhorn.SINKHORN_BACKWARD), 1, 40):
        for domain in ("linear", "log"):
            sinkhorn_passes(n, torch.bfloat16, domain)
    widths = {
        config.max_cols
        for config in (
            *forward.FORWARD,
            *forward.FORWARD_ADD,
            *forward.FORWARD_LAYER,
            *backward.BACKWARD,
        )
    }
    for cols in (*sorted(widths), 40000):
        for op in ("rms_norm", "add_rms_norm", "rms_norm_gated", "layer_norm", "add_layer_norm"):
            for dtype in (torch.bfloat16, torch.float32):
                launch(op, cols, dtype)
                launch(op, cols, dtype, rows=64)
