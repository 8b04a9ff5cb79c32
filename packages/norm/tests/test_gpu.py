"""What only a card can show: graphs, synchronisation, streams, great sizes, the tuned tables."""

from __future__ import annotations

import pytest
import torch
from fusewright import norm
from fusewright.norm import _configs

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def gradients(op, tensors):
    y = op.first(op.kernels(*tensors))
    return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]


@pytest.mark.parametrize("shape", [(64, 256), (3000, 1024), (7, 20000)], ids=str)
def test_replayed_graph_gives_eager_bits(op, shape):
    tensors = [t.requires_grad_() for t in op.draw(shape, BF16, "cuda")]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = gradients(op, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = gradients(op, tensors)
    for value in captured:
        value.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(c, e) for c, e in zip(captured, expected, strict=True))


def test_no_call_waits_for_the_card(op):
    tensors = [t.requires_grad_() for t in op.draw((300, 512), BF16, "cuda")]
    gradients(op, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(op, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cols", sorted({c.max_cols for c in _configs.FORWARD + _configs.BACKWARD}))
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_every_width_of_the_tables_is_as_near_to_fp64_as_torch(op, cols, dtype):
    op.check(op.draw((3000, cols), dtype, "cuda"))


def test_tensor_past_31_bits_of_elements():
    rows, cols = (1 << 16) + 3, (1 << 15) + 8
    x = torch.randn(rows, cols, device="cuda", dtype=BF16)
    chosen = [0, 1, rows // 2, rows - 1]
    y = norm.rms_norm(x, eps=1e-6, backend="triton")
    assert torch.equal(y[chosen], norm.rms_norm(x[chosen], eps=1e-6, backend="triton"))
    del y
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(norm.rms_norm(leaf, eps=1e-6, backend="triton"), leaf, x.detach())
    few = x.detach()[chosen].requires_grad_()
    (truth,) = torch.autograd.grad(
        norm.rms_norm(few, eps=1e-6, backend="triton"), few, few.detach()
    )
    assert torch.equal(dx[chosen], truth)


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
    for values in found:
        assert all(torch.equal(v, e) for v, e in zip(values, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_the_tensor(op):
    tensors = [t.requires_grad_() for t in op.draw((30, 512), BF16, "cuda:1")]
    first = gradients(op, tensors)
    again = gradients(op, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_inductor_compiles_forward_and_backward(op):
    torch._dynamo.reset()
    tensors = [t.requires_grad_() for t in op.draw((300, 512), torch.float32, "cuda")]
    compiled = torch.compile(op.kernels, fullgraph=True)
    y = op.first(compiled(*tensors))
    found = [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]
    expected = gradients(op, tensors)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
