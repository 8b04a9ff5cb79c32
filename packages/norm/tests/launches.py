"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import os

import torch
from fusewright.norm import _backward, _configs, _sinkhorn
from fusewright.norm._backends import Card
from fusewright.norm._backward import launch_norm_backward
from fusewright.norm._forward import launch_norm_forward
from fusewright.norm._sinkhorn import launch_sinkhorn_backward, launch_sinkhorn_forward

# The stages of a backward pass are cut to the shared memory of the card that is compiled for.
CARD = Card(
    multiprocessors=2,
    shared_bytes=int(os.environ["FUSEWRIGHT_SHARED_KIB"]) << 10,
    capability=int(os.environ["FUSEWRIGHT_CAPABILITY"]),
)
_backward.card_of = _sinkhorn.card_of = lambda device: CARD

ROWS = 4096


def launch(op: str, cols: int, dtype: torch.dtype, rows: int = ROWS) -> None:
    """Forward and backward of one op with every gradient."""
    x, weight = torch.empty(rows, cols, dtype=dtype), torch.empty(cols, dtype=dtype)
    statistics = torch.empty(rows)
    center = op == "layer_norm"
    gated = dict(gate=x, activation="silu") if op == "rms_norm_gated" else {}
    other = x if op == "add_rms_norm" else None
    bias = weight if center else None
    launch_norm_forward(x, other, weight, bias, 1e-6, 0.0, center=center, **gated)
    mean = statistics if center else None
    launch_norm_backward(
        *(x, other, x, weight, bias, mean, statistics, 0.0),
        weight_grad=True,
        bias_grad=center,
        **gated,
    )


def sinkhorn(n: int, dtype: torch.dtype, domain: str) -> None:
    """Forward and backward of sinkhorn_knopp."""
    x = torch.empty(100, n, n, dtype=dtype)
    launch_sinkhorn_forward(x, 20, 1e-6, domain)
    launch_sinkhorn_backward(x, x, 20, 1e-6, domain)


def one_of_each() -> None:
    """Every kernel once: a row in registers, a small tensor, a wide row; small matrices and the
    largest.
    """
    sinkhorn(4, torch.float32, "linear")
    sinkhorn(64, torch.float32, "log")
    launch("add_rms_norm", 4096, torch.bfloat16)
    launch("rms_norm_gated", 128, torch.bfloat16)
    launch("layer_norm", 1000, torch.bfloat16, rows=64)
    launch("layer_norm", 40000, torch.bfloat16)


def every_line() -> None:
    """Every op and dtype at every width of the tables, and beyond."""
    for n in (*(config.max_n for config in _configs.SINKHORN_BACKWARD), 1, 40):
        for domain in ("linear", "log"):
            sinkhorn(n, torch.bfloat16, domain)
    widths = {
        config.max_cols
        for config in (
            *_configs.FORWARD,
            *_configs.FORWARD_ADD,
            *_configs.FORWARD_LAYER,
            *_configs.BACKWARD,
        )
    }
    for cols in (*sorted(widths), 40000):
        for op in ("rms_norm", "add_rms_norm", "rms_norm_gated", "layer_norm"):
            for dtype in (torch.bfloat16, torch.float32):
                launch(op, cols, dtype)
                launch(op, cols, dtype, rows=64)
