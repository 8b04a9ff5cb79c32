"""What is timed and against whom: ``python -m fusewright.norm.bench`` prints a short table of this
machine's GPU.
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

from . import add_rms_norm, layer_norm, reference, rms_norm, rms_norm_gated, sinkhorn_knopp

EPS = 1e-6
SHAPES = ((1024, 1024), (8192, 512), (16384, 2048), (16384, 4096), (4096, 16384))
NORM_SHAPES = {
    "rms_norm": SHAPES,
    "add_rms_norm": SHAPES,
    # Heads of 128 columns, as behind linear attention, and whole rows of a model.
    "rms_norm_gated": ((131072, 128), (16384, 2048)),
    "layer_norm": SHAPES,
}
MATRICES = ((16384, 4), (1024, 64))
ITERATIONS = 20
# Passes over a tensor of x's size, each input read once and each output written once.
TRAFFIC = {
    "rms_norm": {"fwd": 2, "bwd": 3, "fwd+bwd": 5},
    "add_rms_norm": {"fwd": 4, "bwd": 4, "fwd+bwd": 8},
    "rms_norm_gated": {"fwd": 3, "bwd": 5, "fwd+bwd": 8},
    "layer_norm": {"fwd": 2, "bwd": 3, "fwd+bwd": 5},
    "sinkhorn_knopp": {"fwd": 2, "bwd": 3, "fwd+bwd": 5},
}

Tensor = torch.Tensor
Norm = Callable[..., Tensor | tuple[Tensor, Tensor]]


class Case(NamedTuple):
    """One op at one size."""

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reference: Norm
    inputs: Callable[[str], list[Tensor]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]


def cases() -> list[Case]:
    """Every norm at every shape, in bf16, and sinkhorn_knopp in fp32."""
    norms = [norm_case(op, *shape) for op, shapes in NORM_SHAPES.items() for shape in shapes]
    return norms + [sinkhorn_case(*sizes) for sizes in MATRICES]


def norm_case(op: str, rows: int, cols: int) -> Case:
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


def sinkhorn_case(batch: int, n: int) -> Case:
    dtype = torch.float32
    size = batch * n * n * dtype.itemsize
    return Case(
        op="sinkhorn_knopp",
        sizes={"batch": batch, "n": n},
        dtype=dtype,
        reference=functools.partial(reference.sinkhorn_knopp, iterations=ITERATIONS, eps=EPS),
        inputs=lambda device: [torch.randn(batch, n, n, dtype=dtype, device=device)],
        bytes_moved={name: passes * size for name, passes in TRAFFIC["sinkhorn_knopp"].items()},
        flops={},
    )


def inputs(op: str, rows: int, cols: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, then residual for add_rms_norm or gate for rms_norm_gated, then weight, then bias for
    layer_norm.
    """
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    wide = [draw(rows, cols) for _ in range(2 if op in ("add_rms_norm", "rms_norm_gated") else 1)]
    return wide + [draw(cols) for _ in range(2 if op == "layer_norm" else 1)]


def providers() -> dict[str, dict[str, Norm]]:
    """Ours, torch, torch.compile, and the libraries that are installed here, by op."""
    found: dict[str, dict[str, Norm]] = {
        "fusewright": {
            "rms_norm": functools.partial(rms_norm, eps=EPS),
            "add_rms_norm": functools.partial(add_rms_norm, eps=EPS),
            "rms_norm_gated": functools.partial(rms_norm_gated, eps=EPS),
            "layer_norm": functools.partial(layer_norm, eps=EPS),
            "sinkhorn_knopp": functools.partial(sinkhorn_knopp, iterations=ITERATIONS, eps=EPS),
        },
        "torch": torch_ops(),
        "compile": compiled_ops(),
    }
    for load in (liger, quack, fla):
        try:
            name, ops = load()
        except ImportError:
            continue
        found[name] = ops
    return found


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
        "sinkhorn_knopp": torch_sinkhorn_knopp,
    }


def compiled_ops() -> dict[str, Norm]:
    """The same through torch.compile, each shape compiled for itself."""
    # Every shape is compiled with and without gradients, more often than torch allows by default.
    limit = 4 * len(SHAPES)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    return {
        name: torch.compile(op, fullgraph=True, dynamic=False) for name, op in torch_ops().items()
    }


def liger() -> tuple[str, dict[str, Norm]]:
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


def quack() -> tuple[str, dict[str, Norm]]:
    """QuACK's functions; its layer norm has no backward."""
    from quack.rmsnorm import rmsnorm

    return f"quack-{importlib.metadata.version('quack-kernels')}", {
        "rms_norm": lambda x, w: rmsnorm(x, w, eps=EPS),
        "add_rms_norm": lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True),
    }


def fla() -> tuple[str, dict[str, Norm]]:
    """Flash-linear-attention's gated norm."""
    from fla.modules.fused_norm_gate import rms_norm_gated

    return f"fla-{importlib.metadata.version('fla-core')}", {
        "rms_norm_gated": lambda x, g, w: rms_norm_gated(x, g, w, None, eps=EPS)
    }


def main() -> int:
    """Print what each op and its peers take on this machine's GPU."""
    if not torch.cuda.is_available():
        print("fusewright.norm.bench: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 1
    # A compiled backward pass may otherwise not run twice over one forward pass.
    torch._functorch.config.donated_buffer = False
    rivals = providers()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 (sinkhorn_knopp")
    print("fp32). Microseconds of one call with a cold L2 cache, in small cases the host's time to")
    print("launch it included.")
    print(f"{'':15}{'rows × cols':>15}     ", *(f"{name:>12}" for name in rivals))
    for case in cases():
        size = " × ".join(map(str, case.sizes.values()))
        times = [microseconds(name, ops.get(case.op), case) for name, ops in rivals.items()]
        for direction, column in zip(("fwd", "bwd"), zip(*times, strict=True), strict=True):
            told = (f"{time:12.1f}" if time else f"{'-':>12}" for time in column)
            print(f"{case.op:15}{size:>15} {direction:4}", *told, flush=True)
    return 0


def microseconds(
    provider: str, op: Norm | None, case: Case
) -> tuple[float, float] | tuple[None, None]:
    """Medians of one forward and one backward pass; None where a peer has no such op or cannot run
    it here.
    """
    from triton.testing import do_bench

    if op is None:
        return None, None
    leaves = [x.requires_grad_() for x in case.inputs("cuda")]
    try:
        result = op(*leaves)
        outputs = result if isinstance(result, tuple) else (result,)
        grads = [torch.randn_like(y) for y in outputs]
        with torch.no_grad():
            forward = do_bench(lambda: op(*leaves), return_mode="median")
        backward = do_bench(
            lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True),
            return_mode="median",
        )
    except Exception as error:
        if provider == "fusewright":
            raise
        print(f"{provider} did not run {case.op}: {type(error).__name__}", file=sys.stderr)
        return None, None
    return 1e3 * forward, 1e3 * backward


if __name__ == "__main__":
    sys.exit(main())
