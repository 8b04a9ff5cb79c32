"""What only a GPU can show: graphs, synchronisation, streams, great sizes, alignment."""

from __future__ import annotations

import warnings

import pytest
import torch
from fusewright.feed_forward import SwiGLU, silu_mul
from fusewright.feed_forward._core import backends
from fusewright.feed_forward.gating.silu_mul import silu_mul_halves
from fusewright.feed_forward.swiglu import reference
from fusewright_testkit import Yardstick, capture, no_synchronisation

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def gradients(op, tensors):
    y = op.kernels(*tensors)
    return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


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


@pytest.mark.parametrize("shape", [(64, 256), (3000, 1024), (7, 20001)], ids=str)
def test_replayed_graph_gives_eager_bits(op, shape):
    tensors = [t.requires_grad_() for t in op.draw(shape, BF16, "cuda")]
    graph, captured = capture(lambda: gradients(op, tensors))
    for value in captured:
        value.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    expected = gradients(op, tensors)
    assert same_bits(captured, expected)


def test_replayed_graph_reads_the_values_of_the_replay(op):
    tensors = [t.requires_grad_() for t in op.draw((64, 256), BF16, "cuda")]
    graph, captured = capture(lambda: gradients(op, tensors))
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, gradients(op, tensors))


def test_no_call_waits_for_the_gpu(op):
    tensors = [t.requires_grad_() for t in op.draw((300, 512), BF16, "cuda")]
    layer = SwiGLU(64, 100, backend="triton", device="cuda")
    x = torch.randn(30, 64, device="cuda")

    def step():
        gradients(op, tensors)
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


@pytest.mark.parametrize("first", ["aligned", "unaligned"])
def test_alignment_of_one_call_does_not_bind_the_next(op, first, fresh_plans):
    """A plan is made once for a shape; the address is that of each call."""
    tensors = op.draw((9, 1000), BF16, "cuda")
    spare = torch.empty(1 + tensors[0].numel(), device="cuda", dtype=BF16)
    unaligned = spare[1:].view(tensors[0].shape).copy_(tensors[0])
    order = [tensors[0], unaligned] if first == "aligned" else [unaligned, tensors[0]]
    results = [
        gradients(op, [t.detach().requires_grad_() for t in (x, *tensors[1:])])
        for x in (*order, *order)
    ]
    assert all(same_bits(values, results[0]) for values in results[1:])


def test_programs_that_begin_amid_rows_give_the_bits_of_the_table(op, many_programs):
    tensors = [t.requires_grad_() for t in op.draw((301, 1000), BF16, "cuda")]
    found = gradients(op, tensors)
    rows = [gradients(op, [t.detach()[i].requires_grad_() for t in tensors]) for i in (0, 150, 300)]
    for index, values in zip((0, 150, 300), rows, strict=True):
        assert same_bits([value[index] for value in found], values)


def test_calls_on_two_streams_do_not_disturb_one_another(op):
    tensors = [t.requires_grad_() for t in op.draw((3000, 1024), BF16, "cuda")]
    expected = gradients(op, tensors)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(gradients(op, tensors))
    torch.cuda.synchronize()
    assert all(same_bits(values, expected) for values in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_the_tensor(op):
    tensors = [t.requires_grad_() for t in op.draw((30, 512), BF16, "cuda:1")]
    assert same_bits(gradients(op, tensors), gradients(op, tensors))


def test_auto_takes_the_reference_for_fp64_and_says_so(op, monkeypatch):
    monkeypatch.setattr(backends, "WARNED", set())
    tensors = op.draw((3, 8), torch.float64, "cuda")
    with pytest.warns(RuntimeWarning, match="not torch.float64"):
        y = op.public(*tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op.public(*tensors)
    assert torch.equal(y, op.reference(*tensors))


def test_inductor_compiles_forward_and_backward(op):
    torch._dynamo.reset()
    tensors = [t.requires_grad_() for t in op.draw((300, 512), F32, "cuda")]
    y = torch.compile(op.kernels, fullgraph=True)(*tensors)
    found = [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]
    assert same_bits(found, gradients(op, tensors))


def test_layer_in_bf16_is_as_near_to_fp64_as_torch():
    layer = SwiGLU(512, 1365, backend="triton", device="cuda", dtype=BF16)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    inputs = [torch.randn(2000, 512, device="cuda", dtype=BF16), *layer.parameters()]
    Yardstick(reference.swiglu, inputs).check(call)
