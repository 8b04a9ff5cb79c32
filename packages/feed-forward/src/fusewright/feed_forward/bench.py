"""What is timed and against whom: ``python -m fusewright.feed_forward.bench`` prints a short table
of this machine's GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F

from . import reference, silu_mul
from .silu_mul import silu_mul_halves

SHAPES = ((1024, 1024), (4096, 1376), (8192, 4096), (16384, 5504))
# Rows, width, hidden width and what it is stored as.
LAYERS = ((4096, 512, 1365, 1376), (8192, 2048, 5504, 5504))
# Passes over a tensor of gate's size, each input read once and each output written once.
TRAFFIC = {"fwd": 3, "bwd": 5, "fwd+bwd": 8}

Tensor = torch.Tensor
Op = Callable[..., Tensor]


class Case(NamedTuple):
    """One op at one size."""

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reference: Op
    inputs: Callable[[str], list[Tensor]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]


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
        reference=reference.silu_mul,
        inputs=functools.partial(gating_inputs, rows, cols, dtype),
        bytes_moved={name: passes * size for name, passes in TRAFFIC.items()},
        flops={},
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
        reference=reference.swiglu,
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
    found = {
        "fusewright": {"silu_mul": silu_mul, "SwiGLU": layer_of(silu_mul_halves)},
        "torch": plain,
        "compile": {name: compiled(op) for name, op in plain.items()},
    }
    try:
        name, ops = liger()
    except ImportError:
        return found
    return found | {name: ops}


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


def main() -> int:
    """Print what each op and its peers take on this machine's GPU."""
    if not torch.cuda.is_available():
        print(
            "fusewright.feed_forward.bench: needs a CUDA device, and torch sees none",
            file=sys.stderr,
        )
        return 1
    # A compiled backward pass may otherwise not run twice over one forward pass.
    torch._functorch.config.donated_buffer = False
    rivals = providers()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16. Microseconds of one")
    print("call with a cold L2 cache, in small cases the host's time to launch it included.")
    print(f"{'':9}{'sizes':>18}     ", *(f"{name:>12}" for name in rivals))
    for case in cases():
        size = " × ".join(map(str, case.sizes.values()))
        times = [microseconds(name, ops.get(case.op), case) for name, ops in rivals.items()]
        for direction, column in zip(("fwd", "bwd"), zip(*times, strict=True), strict=True):
            told = (f"{time:12.1f}" if time else f"{'-':>12}" for time in column)
            print(f"{case.op:9}{size:>18} {direction:4}", *told, flush=True)
    return 0


def microseconds(
    provider: str, op: Op | None, case: Case
) -> tuple[float, float] | tuple[None, None]:
    """Medians of one forward and one backward pass; None where a peer has no such op or cannot run
    it here.
    """
    from triton.testing import do_bench

    if op is None:
        return None, None
    leaves = [x.requires_grad_() for x in case.inputs("cuda")]
    try:
        y = op(*leaves)
        dy = torch.randn_like(y)
        with torch.no_grad():
            forward = do_bench(lambda: op(*leaves), return_mode="median")
        backward = do_bench(
            lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), return_mode="median"
        )
    except Exception as error:
        if provider == "fusewright":
            raise
        print(f"{provider} did not run {case.op}: {type(error).__name__}", file=sys.stderr)
        return None, None
    return 1e3 * forward, 1e3 * backward


if __name__ == "__main__":
    sys.exit(main())
