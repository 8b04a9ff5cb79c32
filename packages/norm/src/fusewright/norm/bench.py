"""What is timed and against whom: ``python -m fusewright.norm.bench`` prints a short table of this
machine's GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import add_rms_norm, layer_norm, reference, rms_norm

EPS = 1e-6
SHAPES = ((1024, 1024), (8192, 512), (16384, 2048), (16384, 4096), (4096, 16384))
# Passes over a tensor of x's size, each input read once and each output written once.
TRAFFIC = {
    "rms_norm": {"fwd": 2, "bwd": 3, "fwd+bwd": 5},
    "add_rms_norm": {"fwd": 4, "bwd": 4, "fwd+bwd": 8},
    "layer_norm": {"fwd": 2, "bwd": 3, "fwd+bwd": 5},
}


class Case(NamedTuple):
    """One op at one size."""

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reference: Callable
    inputs: Callable[[str], list[torch.Tensor]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]


def cases() -> list[Case]:
    """Every op at every shape, in bf16."""
    return [case(op, *shape) for op in TRAFFIC for shape in SHAPES]


def case(op: str, rows: int, cols: int) -> Case:
    dtype = torch.bfloat16
    size = rows * cols * dtype.itemsize
    return Case(
        op=op,
        sizes={"rows": rows, "cols": cols},
        dtype=dtype,
        reference=functools.partial(getattr(reference, op), eps=EPS),
        inputs=functools.partial(inputs, op, rows, cols, dtype),
        bytes_moved={name: passes * size for name, passes in TRAFFIC[op].items()},
        flops={},
    )


def inputs(op: str, rows: int, cols: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """x, then residual for add_rms_norm, then weight, then bias for layer_norm."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    wide = [draw(rows, cols) for _ in range(2 if op == "add_rms_norm" else 1)]
    return wide + [draw(cols) for _ in range(2 if op == "layer_norm" else 1)]


def providers() -> dict[str, dict[str, Callable]]:
    """Ours, torch, torch.compile, and the libraries that are installed here."""
    found = {
        "fusewright": {
            "rms_norm": functools.partial(rms_norm, eps=EPS),
            "add_rms_norm": functools.partial(add_rms_norm, eps=EPS),
            "layer_norm": functools.partial(layer_norm, eps=EPS),
        },
        "torch": torch_ops(),
        "compile": {
            name: torch.compile(op, fullgraph=True, dynamic=False)
            for name, op in torch_ops().items()
        },
    }
    for load in (liger, quack):
        try:
            name, ops = load()
        except ImportError:
            continue
        found[name] = ops
    return found


def torch_ops() -> dict[str, Callable]:
    """The ops as a user of plain torch writes them."""

    def torch_rms_norm(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def torch_add_rms_norm(x, residual, weight):
        total = x + residual
        return torch_rms_norm(total, weight), total

    def torch_layer_norm(x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    return {
        "rms_norm": torch_rms_norm,
        "add_rms_norm": torch_add_rms_norm,
        "layer_norm": torch_layer_norm,
    }


def liger() -> tuple[str, dict[str, Callable]]:
    """Liger-Kernel's functions. Its in-place backward, which overwrites dy, is switched off: a
    timed call is repeated.
    """
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return f"liger-{importlib.metadata.version('liger-kernel')}", {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),
        "add_rms_norm": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(
            x, r, w, EPS, 0.0, "llama", False
        ),
        "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS),
    }


def quack() -> tuple[str, dict[str, Callable]]:
    """QuACK's functions; its layer norm has no backward."""
    from quack.rmsnorm import rmsnorm

    return f"quack-{importlib.metadata.version('quack-kernels')}", {
        "rms_norm": lambda x, w: rmsnorm(x, w, eps=EPS),
        "add_rms_norm": lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True),
    }
