"""What is timed and against whom: ``python -m fusewright_testkit.bench feed-forward``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fusewright.feed_forward import silu_mul
from fusewright.feed_forward.gating import reference as gating_reference
from fusewright.feed_forward.gating.silu_mul import silu_mul_halves
from fusewright.feed_forward.swiglu import reference as layer_reference
from fusewright_testkit import Case
from fusewright_testkit.cases import by_pass, compiled, installed

SHAPES = ((1024, 1024), (4096, 1376), (8192, 4096), (16384, 5504))
# Rows, width, hidden width and what it is stored as.
LAYERS = ((4096, 512, 1365, 1376), (8192, 2048, 5504, 5504))

Tensor = torch.Tensor
Op = Callable[..., Tensor]


def cases() -> list[Case]:
    """The gating and the whole layer at every size, in bf16."""
    return [gating_case(*shape) for shape in SHAPES] + [layer_case(*layer) for layer in LAYERS]


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


def layer_case(rows: int, width: int, hidden: int, stored: int) -> Case:
    dtype = torch.bfloat16
    # The hidden layer is no input and no output.
    size = (2 * rows * width + 3 * stored * width) * dtype.itemsize
    # Of the width that is used.
    flops = 2 * rows * width * 3 * hidden
    return Case(
        op="SwiGLU",
        sizes={"L": rows, "D": width, "F": hidden},
        dtype=dtype,
        reference=layer_reference.swiglu,
        inputs=functools.partial(layer_inputs, rows, width, hidden, stored, dtype),
        bytes_moved=by_pass(size),
        flops=by_pass(flops),
    )


def layer_inputs(
    rows: int, width: int, hidden: int, stored: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """x, and the weights of both products, stored padded."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    joint, output = draw(2, stored, width) / width**0.5, draw(width, stored) / hidden**0.5
    joint[:, hidden:] = 0.0
    output[:, hidden:] = 0.0
    return [draw(rows, width), joint.flatten(0, 1), output]


def providers() -> dict[str, dict[str, Op]]:
    """Ours, torch, torch.compile, and Liger-Kernel where it is installed, by op."""
    plain: dict[str, Op] = {"silu_mul": torch_silu_mul, "SwiGLU": layer_of(torch_silu_mul_halves)}
    return {
        "fusewright": {"silu_mul": silu_mul, "SwiGLU": layer_of(silu_mul_halves)},
        "torch": plain,
        "compile": {name: compiled(op) for name, op in plain.items()},
        **installed(("liger", "liger-kernel", liger)),
    }


def torch_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gating as a user of plain torch writes it."""
    return F.silu(gate) * up


def torch_silu_mul_halves(joint: Tensor) -> Tensor:
    return torch_silu_mul(*joint.chunk(2, -1))


def layer_of(gating: Op) -> Op:
    """The layer around a gating of the halves of the joint product."""

    def swiglu(x: Tensor, joint_weight: Tensor, output_weight: Tensor) -> Tensor:
        return F.linear(gating(F.linear(x, joint_weight)), output_weight)

    return swiglu


def liger() -> dict[str, Op]:
    """Liger-Kernel's functions. Its backward of two tensors overwrites gate and up by their
    gradients: as many bytes move, and a timed call that is repeated computes with other numbers.
    """
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    return {
        "silu_mul": lambda gate, up: LigerSiLUMulFunction.apply(gate, up),
        "SwiGLU": layer_of(lambda joint: LigerFusedGateUpSiLUMulFunction.apply(joint)),
    }
