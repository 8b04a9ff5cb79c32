"""What is timed and against whom: ``python -m fusewright_testkit.bench norm``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fusewright.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_linear,
    rms_norm,
    rms_norm_gated,
    rms_norm_linear,
    sinkhorn_knopp,
)
from fusewright.norm.norm_linear import reference as linear_reference
from fusewright.norm.row_norm import reference as norm_reference
from fusewright.norm.sinkhorn import reference as sinkhorn_reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, compiled, installed

# What the names in cases count, in the picture.
WORDS = {"batch": "{} matrices", "n": "{0} by {0}"}
# The picture's ops, and what their cases contain: of the many ones those of 16,384 rows.
PICTURED = {
    "rms_norm": "rows=16384 cols=4096",
    "add_rms_norm": "rows=16384 cols=4096",
    "layer_norm": "rows=16384 cols=4096",
    "rms_norm_gated": "",
    "add_layer_norm": "",
    "sinkhorn_knopp": "",
    "rms_norm_linear": "rows=16384 cols=512",
    "layer_norm_linear": "rows=16384 cols=512",
}
EPS = 1e-6
SHAPES = ((1024, 1024), (8192, 512), (16384, 2048), (16384, 4096), (4096, 16384))
NORM_SHAPES = {
    "rms_norm": SHAPES,
    "add_rms_norm": SHAPES,
    # Heads of 128 columns, as behind linear attention, and whole rows of a model.
    "rms_norm_gated": ((131072, 128), (16384, 2048)),
    "layer_norm": SHAPES,
    "add_layer_norm": SHAPES,
}
# (rows, columns of x, columns of y): a layer of TransformerNP, its least and most rows, a narrower
# and a wider one.
LINEAR = (
    (16384, 512, 1536),
    (1024, 512, 1536),
    (65536, 512, 1536),
    (16384, 512, 512),
    (16384, 256, 1024),
    (16384, 1024, 4096),
)
LINEAR_OPS = "layer_norm_linear", "rms_norm_linear"
MATRICES = ((16384, 4), (1024, 64))
ITERATIONS = 20
# Passes over a tensor of x's size, forward and backward: each input is read once and each output
# written once.
TRAFFIC = {
    "rms_norm": (2, 3),
    "add_rms_norm": (4, 4),
    "rms_norm_gated": (3, 5),
    "layer_norm": (2, 3),
    "add_layer_norm": (4, 4),
    "sinkhorn_knopp": (2, 3),
}

Tensor = torch.Tensor
Norm = Callable[..., Tensor | tuple[Tensor, Tensor]]


def cases() -> list[Case]:
    """Every norm at every shape, alone and with a linear layer, in bf16, and sinkhorn_knopp in
    fp32.
    """
    norms = [norm_case(op, *shape) for op, shapes in NORM_SHAPES.items() for shape in shapes]
    linear = [
        linear_case(op, *sizes)
        for op in ("layer_norm_linear", "rms_norm_linear")
        for sizes in LINEAR
    ]
    return norms + linear + [sinkhorn_case(*sizes) for sizes in MATRICES]


def norm_case(op: str, rows: int, cols: int) -> Case:
    dtype = torch.bfloat16
    size = rows * cols * dtype.itemsize
    return Case(
        op=op,
        sizes={"rows": rows, "cols": cols},
        dtype=dtype,
        reference=functools.partial(getattr(norm_reference, op), eps=EPS),
        inputs=functools.partial(inputs, op, rows, cols, dtype),
        bytes_moved=by_pass(*(passes * size for passes in TRAFFIC[op])),
    )


def linear_case(op: str, rows: int, cols: int, outputs: int) -> Case:
    """The backward pass reads x, y's gradient and weight, and writes the gradients of x and
    weight.
    """
    dtype = torch.bfloat16
    x, y, weight = rows * cols, rows * outputs, outputs * cols
    return Case(
        op=op,
        sizes={"rows": rows, "cols": cols, "outputs": outputs},
        dtype=dtype,
        reference=functools.partial(getattr(linear_reference, op), eps=EPS),
        inputs=functools.partial(linear_inputs, op, rows, cols, outputs, dtype),
        bytes_moved=by_pass(
            dtype.itemsize * (x + y + weight), dtype.itemsize * (2 * x + y + 2 * weight)
        ),
        flops=by_pass(2 * rows * cols * outputs),
    )


def linear_inputs(
    op: str, rows: int, cols: int, outputs: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """x, the norm's weight and, for a layer norm, bias, then the linear layer's weight and bias."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    vectors = [draw(cols) for _ in range(2 if op == "layer_norm_linear" else 1)]
    return [draw(rows, cols), *vectors, draw(outputs, cols) / cols**0.5, draw(outputs)]


def sinkhorn_case(batch: int, n: int) -> Case:
    dtype = torch.float32
    size = batch * n * n * dtype.itemsize
    return Case(
        op="sinkhorn_knopp",
        sizes={"batch": batch, "n": n},
        dtype=dtype,
        reference=functools.partial(
            sinkhorn_reference.sinkhorn_knopp, iterations=ITERATIONS, eps=EPS
        ),
        inputs=lambda device: [torch.randn(batch, n, n, dtype=dtype, device=device)],
        bytes_moved=by_pass(*(passes * size for passes in TRAFFIC["sinkhorn_knopp"])),
    )


def inputs(op: str, rows: int, cols: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, then what is added to it or the gate for rms_norm_gated, then weight, then bias for layer
    norms.
    """
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    wide = [draw(rows, cols) for _ in range(1 if op in ("rms_norm", "layer_norm") else 2)]
    return wide + [draw(cols) for _ in range(2 if "layer_norm" in op else 1)]


def providers() -> dict[str, dict[str, Norm]]:
    """Ours, torch, torch.compile, and the libraries that are installed here, by op."""
    return {
        "fusewright": {
            "rms_norm": functools.partial(rms_norm, eps=EPS),
            "add_rms_norm": functools.partial(add_rms_norm, eps=EPS),
            "rms_norm_gated": functools.partial(rms_norm_gated, eps=EPS),
            "layer_norm": functools.partial(layer_norm, eps=EPS),
            "add_layer_norm": functools.partial(add_layer_norm, eps=EPS),
            "layer_norm_linear": functools.partial(layer_norm_linear, eps=EPS),
            "rms_norm_linear": functools.partial(rms_norm_linear, eps=EPS),
            "sinkhorn_knopp": functools.partial(sinkhorn_knopp, iterations=ITERATIONS, eps=EPS),
        },
        # This package's norm, then torch's product.
        "separate": {
            "layer_norm_linear": lambda x, g, b, *linear: F.linear(
                layer_norm(x, g, b, eps=EPS), *linear
            ),
            "rms_norm_linear": lambda x, g, *linear: F.linear(rms_norm(x, g, eps=EPS), *linear),
        },
        "torch": torch_ops(),
        "compile": {name: compiled(op) for name, op in torch_ops().items()},
        **installed(
            ("liger", "liger-kernel", liger),
            ("quack", "quack-kernels", quack),
            ("fla", "fla-core", fla),
        ),
    }


def torch_ops() -> dict[str, Norm]:
    """The ops as a user of plain torch writes them."""

    def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch_rms_norm(total, weight), total

    def torch_rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return torch_rms_norm(x, weight) * F.silu(gate)

    def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def torch_add_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch_layer_norm(total, weight, bias), total

    def torch_layer_norm_linear(
        x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        return F.linear(torch_layer_norm(x, norm_weight, norm_bias), weight, bias)

    def torch_rms_norm_linear(
        x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        return F.linear(torch_rms_norm(x, norm_weight), weight, bias)

    def torch_sinkhorn_knopp(x: Tensor) -> Tensor:
        matrix = torch.softmax(x, -1)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
        for _ in range(1, ITERATIONS):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
        return matrix

    return {
        "rms_norm": torch_rms_norm,
        "add_rms_norm": torch_add_rms_norm,
        "rms_norm_gated": torch_rms_norm_gated,
        "layer_norm": torch_layer_norm,
        "add_layer_norm": torch_add_layer_norm,
        "layer_norm_linear": torch_layer_norm_linear,
        "rms_norm_linear": torch_rms_norm_linear,
        "sinkhorn_knopp": torch_sinkhorn_knopp,
    }


def liger() -> dict[str, Norm]:
    """Liger-Kernel's functions. Its in-place backward, which overwrites dy, is switched off: a
    timed call is repeated.
    """
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),
        "add_rms_norm": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(
            x, r, w, EPS, 0.0, "llama", False
        ),
        "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS),
    }


def quack() -> dict[str, Norm]:
    """QuACK's functions; its layer norm has no backward."""
    from quack.rmsnorm import rmsnorm

    return {
        "rms_norm": lambda x, w: rmsnorm(x, w, eps=EPS),
        "add_rms_norm": lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True),
    }


def fla() -> dict[str, Norm]:
    """Flash-linear-attention's gated norm."""
    from fla.modules.fused_norm_gate import rms_norm_gated

    return {"rms_norm_gated": lambda x, g, w: rms_norm_gated(x, g, w, None, eps=EPS)}
