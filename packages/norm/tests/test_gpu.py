"""What only a GPU can show: graphs, synchronisation, streams, great sizes, the tuned tables."""

from __future__ import annotations

import warnings

import pytest
import torch
from fusewright import norm
from fusewright.norm._core import backends
from fusewright.norm.row_norm import launch, launch_backward, reference
from fusewright_testkit import Yardstick, capture, no_synchronisation

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def gradients(op, tensors):
    y = op.first(op.kernels(*tensors))
    return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]


@pytest.mark.parametrize("shape", [(64, 256), (3000, 1024), (7, 20000)], ids=str)
def test_replayed_graph_gives_eager_bits(op, shape):
    tensors = [t.requires_grad_() for t in op.draw(shape, BF16, "cuda")]
    graph, captured = capture(lambda: gradients(op, tensors))
    for value in captured:
        value.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    expected = gradients(op, tensors)
    assert all(torch.equal(c, e) for c, e in zip(captured, expected, strict=True))


def test_no_call_waits_for_the_gpu(op):
    tensors = [t.requires_grad_() for t in op.draw((300, 512), BF16, "cuda")]
    gradients(op, tensors)
    with no_synchronisation():
        gradients(op, tensors)


@pytest.mark.parametrize(
    "cols", sorted({c.max_cols for c in launch.FORWARD + launch_backward.BACKWARD})
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_every_width_of_the_tables_is_as_near_to_fp64_as_torch(op, cols, dtype):
    # The truth in fp64 takes gigabytes where rows are wide.
    op.check(op.draw((min(3000, (1 << 23) // cols), cols), dtype, "cuda"))


@pytest.mark.large
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


@pytest.mark.large
@pytest.mark.parametrize(("rows", "cols"), [((1 << 16) + 3, (1 << 15) + 8), ((1 << 19) + 3, 4096)])
def test_gradients_reach_rows_past_31_bits_of_elements(rows, cols):
    """A few rows amid a great tensor, the last one among them, whose other rows get no gradient."""
    rest = torch.ones(rows, cols, device="cuda", dtype=BF16)
    chosen = torch.tensor([0, 1, rows // 2, rows - 1], device="cuda")
    x = torch.randn(4, cols, device="cuda", dtype=BF16)
    weight = torch.randn(cols, device="cuda")

    def amid_the_rest(x, weight):
        y = norm.rms_norm(rest.index_copy(0, chosen, x), weight, eps=1e-6, backend="triton")
        return y.index_select(0, chosen)

    Yardstick(lambda *t: reference.rms_norm(*t, eps=1e-6), [x, weight]).check(amid_the_rest)


@pytest.mark.large
def test_full_size_is_as_near_to_fp64_as_torch(op):
    op.check(op.draw((16384, 4096), BF16, "cuda"))


@pytest.mark.parametrize("first", ["aligned", "unaligned"])
def test_alignment_of_one_call_does_not_bind_the_next(op, first, fresh_plans):
    """A plan is made once for a shape; the address is that of each call."""
    shape = (9, 1000)
    tensors = op.draw(shape, BF16, "cuda")
    spare = torch.empty(1 + tensors[0].numel(), device="cuda", dtype=BF16)
    unaligned = spare[1:].view(shape).copy_(tensors[0])
    order = [tensors[0], unaligned] if first == "aligned" else [unaligned, tensors[0]]
    results = [
        gradients(op, [t.detach().requires_grad_() for t in (x, *tensors[1:])])
        for x in (*order, *order)
    ]
    for values in results[1:]:
        assert all(torch.equal(v, e) for v, e in zip(values, results[0], strict=True))


def test_replayed_graph_reads_the_values_of_the_replay(op):
    tensors = [t.requires_grad_() for t in op.draw((64, 256), BF16, "cuda")]
    graph, captured = capture(lambda: gradients(op, tensors))
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected = gradients(op, tensors)
    assert all(torch.equal(c, e) for c, e in zip(captured, expected, strict=True))


def test_auto_takes_the_reference_for_fp64_and_says_so(op, monkeypatch):
    monkeypatch.setattr(backends, "WARNED", set())
    tensors = op.draw((3, 8), torch.float64, "cuda")
    with pytest.warns(RuntimeWarning, match="not torch.float64"):
        y = op.first(op.public(*tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op.public(*tensors)
    assert torch.equal(y, op.first(op.reference(*tensors)))


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
