"""What holds of every op: registration, compilation, determinism, import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fusewright import feed_forward
from fusewright_testkit import Yardstick
from torch.utils.checkpoint import checkpoint

F32, BF16 = torch.float32, torch.bfloat16
SHAPE = (5, 40)
REGISTERED = {"silu_mul", "silu_mul_halves"}


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    assert set(feed_forward.__all__) == {
        "Backend",
        "SwiGLU",
        "__version__",
        "available_backends",
        "silu_mul",
    }
    assert all(hasattr(feed_forward, name) for name in feed_forward.__all__)


def test_import_needs_torch_only_and_works_without_triton():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.feed_forward import SwiGLU, available_backends, silu_mul\n"
        "assert available_backends() == ('reference',)\n"
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "silu_mul(SwiGLU(8, 5)(x), x).square().sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
    )


def test_import_does_not_import_triton():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.feed_forward\nassert ('triton' in sys.modules) == before\n"
    )


def test_registered_ops_pass_opcheck(op, device):
    operands = [t.requires_grad_() for t in op.draw(SHAPE, F32, device)]
    ops = torch.ops.fusewright_feed_forward
    torch.library.opcheck(getattr(ops, op.name).default, operands)
    dy = torch.randn(SHAPE, device=device, requires_grad=True)
    torch.library.opcheck(getattr(ops, f"{op.name}_backward").default, (dy, *operands))


def test_no_other_op_is_registered():
    space = "fusewright_feed_forward"
    found = {name for name in torch._C._dispatch_get_all_op_names() if space in name}
    assert found == {f"{space}::{name}{end}" for name in REGISTERED for end in ("", "_backward")}


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_full_graph_compilation_gives_eager_results(op, dtype, device):
    torch._dynamo.reset()
    compiled = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")
    Yardstick(op.reference, op.draw(SHAPE, dtype, device)).check(compiled)


def test_same_inputs_same_bits(op, device):
    tensors = [t.requires_grad_() for t in op.draw((70, 33), BF16, device)]

    def everything():
        y = op.kernels(*tensors)
        return [y, *torch.autograd.grad(y.square().sum(), tensors)]

    for first, second in zip(everything(), everything(), strict=True):
        assert torch.equal(first, second)


def test_gradient_mode_changes_no_bit_of_the_output(op, device):
    tensors = [t.requires_grad_() for t in op.draw(SHAPE, BF16, device)]
    with torch.no_grad():
        quiet = op.kernels(*tensors)
    assert torch.equal(quiet, op.kernels(*tensors))


def test_checkpointing_changes_no_bit_of_the_gradients(op, device):
    tensors = [t.requires_grad_() for t in op.draw(SHAPE, BF16, device)]

    def squares(call):
        return torch.autograd.grad(call(*tensors).square().sum(), tensors)

    def checkpointed(*args):
        return checkpoint(op.kernels, *args, use_reentrant=False)

    for found, truth in zip(squares(checkpointed), squares(op.kernels), strict=True):
        assert torch.equal(found, truth)
