"""What is timed and against whom: ``python -m fusewright_testkit.bench feed-forward``."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable

import torch
import torch._dynamo
import torch.nn.functional as F
from fusewright.feed_forward import silu_mul
from fusewright.feed_forward.gating import reference as gating_reference
from fusewright.feed_forward.gating.silu_mul import silu_mul_halves
from fusewright.feed_forward.swiglu import reference as layer_reference
from fusewright_testkit import Case

SHAPES = ((1024, 1024), (4096, 1376), (8192, 4096), (16384, 5504))
# Rows, width, hidden width and what it is stored as.
LAYERS = ((4096, 512, 1365, 1376), (8192, 2048, 5504, 5504))
# Passes over a tensor of gate's size, each input read once and each output written once.
TRAFFIC = {"fwd": 3, "bwd": 5, "fwd+bwd": 8}

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
        bytes_moved={name: passes * size for name, passes in TRAFFIC.items()},
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
        bytes_moved={"fwd": size, "bwd": 2 * size, "fwd+bwd": 3 * size},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops},
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
    # Every case is compiled with and without gradients, more often than torch allows by default.
    limit = 4 * (len(SHAPES) + len(LAYERS))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    ops_of = {
        "fusewright": {"silu_mul": silu_mul, "SwiGLU": layer_of(silu_mul_halves)},
        "torch": plain,
        "compile": {name: compiled(op) for name, op in plain.items()},
    }
    try:
        name, ops = liger()
    except ImportError:
        return ops_of
    return ops_of | {name: ops}


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


def liger() -> tuple[str, dict[str, Op]]:
    """Liger-Kernel's functions. Its backward of two tensors overwrites gate and up by their
    gradients: as many bytes move, and a timed call that is repeated computes with other numbers.
    """
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    return f"liger-{importlib.metadata.version('liger-kernel')}", {
        "silu_mul": lambda gate, up: LigerSiLUMulFunction.apply(gate, up),
        "SwiGLU": layer_of(lambda joint: LigerFusedGateUpSiLUMulFunction.apply(joint)),
    }
