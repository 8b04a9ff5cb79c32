"""What is timed and against whom: ``python -m fusewright_testkit.bench feed-forward``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fusewright.feed_forward import feed_forward, gated_feed_forward, silu_mul
from fusewright.feed_forward.gating import reference as gating_reference
from fusewright.feed_forward.perceptron import reference as perceptron_reference
from fusewright.feed_forward.swiglu import reference as layer_reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, compiled, installed

# What the names in cases count, in the picture.
WORDS = {"L": "{} rows", "D": "width {}", "F": "{} hidden units"}
SHAPES = ((1024, 1024), (4096, 1376), (8192, 4096), (16384, 5504))
# Rows, width, hidden width and what it is stored as.
LAYERS = ((4096, 512, 1365, 1376), (8192, 2048, 5504, 5504))
PERCEPTRONS = ((8192, 512, 1365, 1376), (44000, 512, 1365, 1376))

Tensor = torch.Tensor
Op = Callable[..., Tensor]


def cases() -> list[Case]:
    """The gating and both whole layers at every size, in bf16."""
    return [
        *(gating_case(*shape) for shape in SHAPES),
        *(layer_case(*layer) for layer in LAYERS),
        *(layer_case(*layer, gated=False) for layer in PERCEPTRONS),
    ]


def gating_case(rows: int, cols: int) -> Case:
    dtype = torch.bfloat16
    size = rows * cols * dtype.itemsize
    return Case(
        op="silu_mul",
        sizes={"rows": rows, "cols": cols},
        dtype=dtype,
        reference=gating_reference.silu_mul,
        inputs=functools.partial(gating_inputs, rows, cols, dtype),
        # Each input is read once and each output written once.
        bytes_moved=by_pass(3 * size, 5 * size),
    )


def gating_inputs(rows: int, cols: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """gate and up."""
    return [torch.randn(rows, cols, dtype=dtype, device=device) for _ in range(2)]


def layer_case(rows: int, width: int, hidden: int, stored: int, *, gated: bool = True) -> Case:
    dtype = torch.bfloat16
    products = 3 if gated else 2
    # The hidden layer is no input and no output.
    size = (2 * rows * width + products * stored * width) * dtype.itemsize
    # Of the width that is used.
    flops = 2 * rows * width * products * hidden
    reference = layer_reference.swiglu if gated else perceptron_reference.feed_forward
    return Case(
        op="SwiGLU" if gated else "feed_forward",
        sizes={"L": rows, "D": width, "F": hidden},
        dtype=dtype,
        reference=reference,
        inputs=functools.partial(layer_inputs, rows, width, hidden, stored, products, dtype),
        bytes_moved=by_pass(size),
        flops=by_pass(flops),
    )


def layer_inputs(
    rows: int, width: int, hidden: int, stored: int, products: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """x, and the weights of all products, stored padded: those of x as one."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    of_x = draw(products - 1, stored, width) / width**0.5
    output = draw(width, stored) / hidden**0.5
    of_x[:, hidden:] = 0.0
    output[:, hidden:] = 0.0
    return [draw(rows, width), of_x.flatten(0, 1), output]


def providers() -> dict[str, dict[str, Op]]:
    """Ours, torch, torch.compile, and Liger-Kernel where it is installed, by op."""
    plain: dict[str, Op] = {
        "silu_mul": torch_silu_mul,
        "SwiGLU": layer_of(torch_silu_mul_halves),
        "feed_forward": layer_of(F.silu),
    }
    return {
        "fusewright": {
            "silu_mul": silu_mul,
            "SwiGLU": gated_feed_forward,
            "feed_forward": feed_forward,
        },
        "torch": plain,
        "compile": {name: compiled(op) for name, op in plain.items()},
        **installed(("liger", "liger-kernel", liger)),
    }


def torch_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gating as a user of plain torch writes it."""
    return F.silu(gate) * up


def torch_silu_mul_halves(joint: Tensor) -> Tensor:
    return torch_silu_mul(*joint.chunk(2, -1))


def layer_of(activation: Op) -> Op:
    """The layer around SiLU of the first product, or a gating of the halves of a joint one."""

    def layer(x: Tensor, weight: Tensor, output_weight: Tensor) -> Tensor:
        return F.linear(activation(F.linear(x, weight)), output_weight)

    return layer


def liger() -> dict[str, Op]:
    """Liger-Kernel's functions. Its backward of two tensors overwrites gate and up by their
    gradients: as many bytes move, and a timed call that is repeated computes with other numbers.
    """
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    return {
        "silu_mul": lambda gate, up: LigerSiLUMulFunction.apply(gate, up),
        "SwiGLU": layer_of(lambda joint: LigerFusedGateUpSiLUMulFunction.apply(joint)),
    }
