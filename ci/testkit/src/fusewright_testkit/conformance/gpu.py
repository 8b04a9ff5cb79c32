"""What only a GPU can show of an operation: graphs, synchronisation, streams, devices."""

from __future__ import annotations

import pytest
import torch

from ..graphs import capture, no_synchronisation
from .cases import over
from .records import everything, is_float, same_bits


def leaves_of(op, device="cuda"):
    return op.leaves(op.gpu[0], op.gpu_dtypes[0], device)


@over("gpu")
@pytest.mark.gpu
def test_replayed_graph_gives_eager_bits_of_the_values_of_the_replay(op, sizes, dtype):
    leaves = op.leaves(sizes, dtype, "cuda")
    others = op.sample(sizes, dtype, "cuda")
    graph, captured = capture(lambda: everything(op.kernels, leaves))
    for _ in range(2):
        for value in captured:
            if is_float(value):
                value.detach().fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(captured, everything(op.kernels, leaves))
        with torch.no_grad():
            for x, other in zip(leaves, others, strict=True):
                if x is not None:
                    x.copy_(other)


@over("gpu")
@pytest.mark.gpu
def test_no_call_waits_for_the_gpu(op, sizes):
    leaves = op.leaves(sizes, op.gpu_dtypes[0], "cuda")
    everything(op.kernels, leaves)
    torch.cuda.synchronize()
    with no_synchronisation():
        everything(op.kernels, leaves)


@over("gpu")
@pytest.mark.gpu
def test_calls_on_two_streams_do_not_disturb_one_another(op, sizes):
    leaves = op.leaves(sizes, op.gpu_dtypes[0], "cuda")
    expected = everything(op.kernels, leaves)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(everything(op.kernels, leaves))
    torch.cuda.synchronize()
    assert all(same_bits(values, expected) for values in found)


@pytest.mark.parametrize("first", ["aligned", "unaligned"])
def test_alignment_of_one_call_does_not_bind_the_next(op, first, device, fresh_plans):
    """A plan is made once for a shape; the address is that of each call."""
    sizes = op.gpu[0] if device == "cuda" else op.small
    leaves = op.leaves(sizes, op.low, device)
    x = leaves[0].detach()
    spare = torch.empty(1 + x.numel(), device=device, dtype=x.dtype)
    unaligned = spare[1:].view(x.shape).copy_(x).requires_grad_()
    order = [leaves[0], unaligned] if first == "aligned" else [unaligned, leaves[0]]
    results = [everything(op.kernels, [x, *leaves[1:]]) for x in (*order, *order)]
    assert all(same_bits(values, results[0]) for values in results[1:])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_the_tensor(op):
    leaves = leaves_of(op, "cuda:1")
    assert same_bits(everything(op.kernels, leaves), everything(op.kernels, leaves))


@pytest.mark.gpu
def test_inductor_compiles_forward_and_backward(op):
    torch._dynamo.reset()
    leaves = leaves_of(op)
    compiled = torch.compile(op.kernels, fullgraph=True)
    assert same_bits(everything(compiled, leaves), everything(op.kernels, leaves))
