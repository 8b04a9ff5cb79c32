"""What only a GPU can show before and behind the memory: sizes, graphs, synchronisation."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory
from fusewright.memory_mlp.inputs import reference
from fusewright.memory_mlp.inputs import tokens as token_ops
from fusewright_testkit import capture, no_synchronisation
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows, tokens, D: as many as a layer has, and a rest.
FIRST = 4, 515, 64


def everything(op, leaves):
    """Outputs and gradients."""
    outputs = op.kernels(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])]


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("history_dtype", [BF16, F32])
def test_full_size_is_as_near_to_fp64_as_torch(input_op, dtype, history_dtype):
    op = input_op.having(heads=5)
    op.check(op.draw(*FIRST, dtype, "cuda", history_dtype=history_dtype))


@pytest.mark.parametrize("width", [1, 8, 40, 64, 100, 128])
@pytest.mark.parametrize("taps", [0, 1, 2, 4, 8])
def test_every_width_and_window_is_as_near_to_fp64_as_torch(input_op, width, taps):
    op = input_op.having(taps=taps, key_norm="rms", theta=None if taps else 0.1)
    op.check(op.draw(2, 70, width, BF16, "cuda"))


@pytest.mark.parametrize("taps", [0, 4])
def test_queries_alone_are_as_near_to_fp64_as_torch(input_op, taps):
    op = input_op.having(heads=5, taps=taps, queries=True)
    op.check(op.draw(*FIRST, BF16, "cuda"))


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_where_it_is_in_torch(input_op, strange):
    present = torch.rand(2, 100, device="cuda") < 0.8
    op = input_op.having(present=present)
    tensors = op.draw(2, 100, 16, BF16, "cuda")
    for token, column in ((3, 40), (50, 90), (99, 5)):
        tensors[0][1, token, column] = strange
    tensors[3][0, 7, 2] = float("nan")
    op.check(tensors)
    found, truth = (op.whole(*tensors, backend=b).writes.written for b in ("triton", "reference"))
    assert torch.equal(found, truth)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("width", [1, 320, 700, 8192])
def test_tokens_are_the_references(dtype, width):
    x = torch.randn(3, 200, width, device="cuda").to(dtype)
    x[1, 5, 0], x[2, 199, -1] = float("nan"), float("inf")
    mask = torch.rand(3, 200, device="cuda") < 0.7
    kept = torch.rand(3, 200, 5, device="cuda") < 0.9
    results = []
    for backend in ("triton", "reference"):
        leaf = x.clone().requires_grad_()
        y, present = token_ops.finite_tokens(leaf[:, 7:], mask[:, 7:], backend=backend)
        out = token_ops.kept_tokens(y, kept[:, 7:], mask[:, 7:], 3.0, backend=backend)
        grad = torch.autograd.grad(out, leaf, torch.ones_like(out))[0]
        results.append((y.detach(), present, out.detach(), grad))
    assert same_bits(*results)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("sizes", [(320, 15), (512, 24), (700, 7), (1, 1)], ids=str)
def test_gated_tokens_are_as_near_to_fp64_as_torch(gated_op, dtype, sizes):
    mask = torch.rand(3, 515, device="cuda") < 0.9
    op = gated_op.having(mask)
    tensors = op.draw(3, 515, *sizes, dtype, "cuda")
    tensors[0][1, 7, 0] = float("nan")
    op.check(tensors)


def test_widest_gated_tokens_are_as_near_to_fp64_as_torch(gated_op):
    gated_op.check(gated_op.draw(1, 70, 8192, 24, BF16, "cuda"))


def test_gated_tokens_have_the_same_bits_twice_and_wait_for_nothing(gated_op):
    leaves = [x.requires_grad_() for x in gated_op.draw(4, 515, 320, 15, BF16, "cuda")]
    first = everything(gated_op, leaves)
    torch.cuda.synchronize()
    with no_synchronisation():
        second = everything(gated_op, leaves)
    assert same_bits(first, second)


@pytest.mark.parametrize("shape", [(4, 512, 5), (3, 5000, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_counted_tokens_are_the_references(shape, masked):
    batch, _, heads = shape
    written = torch.rand(shape, device="cuda") < 0.8
    mask = torch.rand(shape[:2], device="cuda") < 0.8 if masked else None
    skipped, lost = torch.randint(1 << 40, (2, batch, heads), device="cuda")
    position = torch.randint(1 << 40, (batch,), device="cuda")
    operands = written, skipped, position, mask, lost if masked else None
    found = torch.ops.fusewright_memory_mlp.count_tokens(*operands)
    assert same_bits(found, reference.counted_tokens(*operands))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_replayed_graph_gives_eager_bits_of_the_values_of_the_replay(input_op, dtype):
    leaves = [x.requires_grad_() for x in input_op.draw(*FIRST, dtype, "cuda")]
    others = input_op.draw(*FIRST, dtype, "cuda")
    graph, captured = capture(lambda: everything(input_op, leaves))
    with torch.no_grad():
        for x, other in zip(leaves, others, strict=True):
            x.copy_(other)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, everything(input_op, leaves))


def test_no_call_waits_for_the_gpu(input_op):
    leaves = [x.requires_grad_() for x in input_op.draw(*FIRST, BF16, "cuda")]
    everything(input_op, leaves)
    torch.cuda.synchronize()
    with no_synchronisation():
        everything(input_op, leaves)


def test_same_bits_twice_and_on_two_streams(input_op):
    leaves = [x.requires_grad_() for x in input_op.draw(*FIRST, BF16, "cuda")]
    expected = everything(input_op, leaves)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(everything(input_op, leaves))
    torch.cuda.synchronize()
    assert all(same_bits(values, expected) for values in found)


def test_inductor_compiles_forward_and_backward(input_op):
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in input_op.draw(*FIRST, BF16, "cuda")]
    expected = everything(input_op, leaves)
    outputs = torch.compile(input_op.kernels, fullgraph=True)(*leaves)
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    assert same_bits([*outputs, *grads], expected)


class Names(TorchDispatchMode):
    """The names of the operations that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


def test_layer_takes_the_kernels_without_being_told():
    memory = NeuralMemory(128, heads=2, device="cuda")
    x = torch.randn(2, 100, 128, device="cuda")
    with Names() as found:
        memory(x)
    assert {"memory_input", "gated_tokens", "kept_tokens", "count_tokens"} <= found.names
    assert not {"silu", "sigmoid", "convolution", "where.self", "addmm"} & found.names
