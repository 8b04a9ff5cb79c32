"""What holds of every op: registration, compilation, determinism, import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fusewright import norm
from fusewright.norm.row_norm import reference
from fusewright_testkit import Yardstick
from torch.utils.checkpoint import checkpoint

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
SHAPE = (5, 40)

# The registered ops with arguments after the operands, forward and backward.
REGISTERED = {
    "rms_norm": (1, 1, (1e-6, 1.0)),
    "add_rms_norm": (2, 1, (1e-6, 0.0)),
    "rms_norm_gated": (2, 1, (1e-6, 0.0, "silu")),
    "layer_norm": (1, 2, (1e-6, F32)),
}


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    assert set(norm.__all__) == {
        "Backend",
        "LayerNorm",
        "RMSNorm",
        "RMSNormGated",
        "__version__",
        "add_rms_norm",
        "available_backends",
        "layer_norm",
        "rms_norm",
        "rms_norm_gated",
        "sinkhorn_knopp",
    }
    assert all(hasattr(norm, name) for name in norm.__all__)


def test_import_needs_torch_only_and_works_without_triton():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.norm import RMSNorm, available_backends, layer_norm\n"
        "assert available_backends() == ('reference',)\n"
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "layer_norm(RMSNorm(8)(x)).square().sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
    )


def test_import_does_not_import_triton():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.norm\nassert ('triton' in sys.modules) == before\n"
    )


@pytest.mark.parametrize("name", REGISTERED)
@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "no-vectors"])
def test_registered_ops_pass_opcheck(name, vectors, device):
    rows, count, options = REGISTERED[name]
    operands = [torch.randn(SHAPE, device=device, requires_grad=True) for _ in range(rows)]
    weights = [torch.randn(SHAPE[1], device=device, requires_grad=True) for _ in range(count)]
    forward = getattr(torch.ops.fusewright_norm, name).default
    torch.library.opcheck(forward, (*operands, *(weights if vectors else [None] * count), *options))


@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "no-vectors"])
def test_registered_backward_ops_pass_opcheck(vectors, device):
    x, dy = (torch.randn(SHAPE, device=device, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(SHAPE[1], device=device) if vectors else None for _ in range(2))
    mean, rstd = torch.randn(SHAPE[0], device=device), torch.rand(SHAPE[0], device=device)
    ops = torch.ops.fusewright_norm
    torch.library.opcheck(
        ops.rms_norm_backward.default, (dy, None, x, weight, rstd, 1e-6, 0.0, vectors)
    )
    torch.library.opcheck(ops.rms_norm_backward.default, (dy, x, x, weight, rstd, 1e-6, 0.0, False))
    torch.library.opcheck(
        ops.rms_norm_gated_backward.default,
        (dy, x, dy, weight, rstd, 1e-6, 0.0, "sigmoid", vectors),
    )
    torch.library.opcheck(
        ops.layer_norm_backward.default,
        (dy, x, weight, bias, mean, rstd, 1e-6, vectors, vectors),
    )


def test_no_other_op_is_registered():
    found = {name for name in torch._C._dispatch_get_all_op_names() if "fusewright_norm" in name}
    others = {"rms_norm_backward", "rms_norm_gated_backward", "layer_norm_backward"}
    others |= {"sinkhorn_knopp", "sinkhorn_knopp_backward"}
    assert found == {f"fusewright_norm::{name}" for name in {*REGISTERED, *others}}


@pytest.mark.parametrize("name", REGISTERED)
def test_reference_gradients_are_the_derivatives(name):
    rows, count, _ = REGISTERED[name]
    tensors = [torch.randn(3, 5, dtype=F64, requires_grad=True) for _ in range(rows)]
    tensors += [torch.randn(5, dtype=F64, requires_grad=True) for _ in range(count)]

    def call(*args):
        return getattr(reference, name)(*args, eps=1e-6)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_full_graph_compilation_gives_eager_results(op, dtype, device):
    torch._dynamo.reset()
    compiled = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")
    Yardstick(op.reference, op.draw(SHAPE, dtype, device)).check(compiled)


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def test_same_inputs_same_bits(op, device):
    tensors = [t.requires_grad_() for t in op.draw((70, 33), BF16, device)]

    def everything():
        y = op.first(op.kernels(*tensors))
        return [y, *torch.autograd.grad(y.square().sum(), tensors)]

    for first, second in zip(everything(), everything(), strict=True):
        assert torch.equal(first, second)


def test_gradient_mode_changes_no_bit_of_the_outputs(op, device):
    tensors = [t.requires_grad_() for t in op.draw(SHAPE, BF16, device)]
    with torch.no_grad():
        quiet = op.first(op.kernels(*tensors))
    assert torch.equal(quiet, op.first(op.kernels(*tensors)))


def test_checkpointing_changes_no_bit_of_the_gradients(op, device):
    tensors = [t.requires_grad_() for t in op.draw(SHAPE, BF16, device)]

    def squares(call):
        return torch.autograd.grad(op.first(call(*tensors)).square().sum(), tensors)

    def checkpointed(*args):
        return checkpoint(op.kernels, *args, use_reentrant=False)

    assert same_bits(squares(checkpointed), squares(op.kernels))


def test_rows_do_not_see_one_another(op, device):
    tensors = [t.requires_grad_() for t in op.draw(SHAPE, F32, device)]
    poisoned = [t.detach().clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        poisoned[0][2] = float("nan")

    def rows(leaves):
        y = op.first(op.kernels(*leaves))
        return y, torch.autograd.grad(y.square().sum(), leaves[0])[0]

    for found, truth in zip(rows(poisoned), rows(tensors), strict=True):
        assert found[2].isnan().all()
        others = [0, 1, 3, 4]
        assert torch.equal(found[others], truth[others])
