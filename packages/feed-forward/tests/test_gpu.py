"""What only a GPU can show: great sizes, the layer."""

from __future__ import annotations

import pytest
import torch
from fusewright.feed_forward import FeedForward, SwiGLU, silu_mul
from fusewright.feed_forward.gating.silu_mul import silu_mul_halves
from fusewright.feed_forward.perceptron import launch_hopper
from fusewright.feed_forward.swiglu import reference
from fusewright_testkit import Yardstick, no_synchronisation
from fusewright_testkit.conformance import everything, same_bits

from .operations import FeedForwardOp

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (4096, 1376),
        (1000, 1000),
        (4095, 1365),
        pytest.param(8192, 5504, marks=pytest.mark.large),
        (1 << 20, 3),
    ],
)
def test_full_size_is_as_near_to_fp64_as_torch(op, rows, cols, dtype):
    op.check(op.draw((rows, cols), dtype, "cuda"))


@pytest.mark.parametrize("kind", [FeedForward, SwiGLU])
def test_no_step_of_a_layer_waits_for_the_gpu(kind):
    layer = kind(64, 100, backend="triton", device="cuda")
    x = torch.randn(30, 64, device="cuda")

    def step():
        layer(x).sum().backward()

    step()
    torch.cuda.synchronize()
    with no_synchronisation():
        step()


@pytest.mark.large
@pytest.mark.parametrize(("rows", "cols"), [((1 << 16) + 3, (1 << 15) + 8), ((1 << 19) + 3, 4096)])
def test_tensors_past_31_bits_of_elements(rows, cols):
    chosen = [0, 1, rows // 2, rows - 1]
    gate, up = (torch.randn(rows, cols, device="cuda", dtype=BF16).requires_grad_() for _ in "gu")
    y = silu_mul(gate, up, backend="triton")
    few = [t.detach()[chosen].requires_grad_() for t in (gate, up)]
    truth = silu_mul(*few, backend="triton")
    assert torch.equal(y[chosen], truth)
    dy = y.detach()
    grads = torch.autograd.grad(y, (gate, up), dy)
    expected = torch.autograd.grad(truth, few, dy[chosen])
    assert all(torch.equal(g[chosen], e) for g, e in zip(grads, expected, strict=True))


@pytest.mark.large
def test_halves_of_a_tensor_past_31_bits_of_elements():
    rows, cols = (1 << 18) + 3, 4096 + 8
    chosen = [0, 1, rows // 2, rows - 1]
    joint = torch.randn(rows, 2 * cols, device="cuda", dtype=BF16).requires_grad_()
    y = silu_mul_halves(joint, backend="triton")
    few = joint.detach()[chosen].requires_grad_()
    truth = silu_mul_halves(few, backend="triton")
    assert torch.equal(y[chosen], truth)
    dy = y.detach()
    (djoint,) = torch.autograd.grad(y, joint, dy)
    (expected,) = torch.autograd.grad(truth, few, dy[chosen])
    assert torch.equal(djoint[chosen], expected)


def test_programs_that_begin_amid_rows_give_the_bits_of_the_table(op, many_programs):
    def gradients(tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        return everything(op.kernels, leaves, [torch.ones_like(op.kernels(*leaves))])

    tensors = op.draw((301, 1000), BF16, "cuda")
    found = gradients(tensors)
    for index in (0, 150, 300):
        values = gradients([t[index] for t in tensors])
        assert same_bits([value[index] for value in found], values)


def test_layer_in_bf16_is_as_near_to_fp64_as_torch():
    layer = SwiGLU(512, 1365, backend="triton", device="cuda", dtype=BF16)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    inputs = [torch.randn(2000, 512, device="cuda", dtype=BF16), *layer.parameters()]
    Yardstick(reference.swiglu, inputs).check(call)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("sizes", [(8192, 512, 1376, 512), (1001, 512, 1365, 512)], ids=str)
def test_feed_forward_at_full_size_is_as_near_to_fp64_as_torch(sizes, dtype):
    op = FeedForwardOp()
    op.check(op.draw(sizes, dtype, "cuda"))


@pytest.mark.large
def test_hidden_layer_past_31_bits_of_elements(monkeypatch):
    # Few rows take the kernels that many take.
    monkeypatch.setattr(launch_hopper, "FASTER", launch_hopper.Faster(0.0, 0.0))
    op, rows = FeedForwardOp(), (1 << 21) + 3
    chosen = [0, 1, rows // 2, rows - 1]
    x, *weights = op.draw((rows, 16, 1024, 16), BF16, "cuda")
    x.requires_grad_()
    y = op.kernels(x, *weights)
    few = x.detach()[chosen].requires_grad_()
    truth = op.kernels(few, *weights)
    torch.testing.assert_close(y[chosen], truth)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (expected,) = torch.autograd.grad(truth, few, torch.ones_like(truth))
    torch.testing.assert_close(dx[chosen], expected)
