"""What only a GPU can show of memory_update: full sizes, graphs, synchronisation, streams."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit import Yardstick, capture, no_synchronisation

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FIRST = (), 2048, 512, 512
OPTIONS = dict(reduction="mean_all", max_grad_norm=0.05)


# A loss and the gradient of a gate are one number of each problem, and eager torch's error in one
# number is one draw: so small by luck, now and then, that nothing is allowed.
PROBLEMS = 8


def check_one_by_one(op, lead, *sizes):
    """The yardstick over several problems, each with launches of its own."""

    def one_by_one(call):
        def calls(*tensors):
            problems = zip(*(x.unbind() for x in tensors), strict=True)
            outputs = [call(*problem) for problem in problems]
            return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))

        return calls

    tensors = op.draw((PROBLEMS, *lead), *sizes, "cuda")
    Yardstick(one_by_one(op.reference), tensors).check(one_by_one(op.kernels))


def everything(op, leaves):
    """Outputs and gradients."""
    outputs = op.kernels(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])]


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


@pytest.fixture(params=["ieee", "tf32"])
def fp32_precision(request):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "sizes",
    [FIRST, ((), 512, 320, 1280), ((2, 3), 300, 64, 256), ((), 20000, 64, 128), ((), 77, 50, 36)],
    ids=str,
)
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_full_size_is_as_near_to_fp64_as_torch(update_op, sizes, dtype, activation):
    op = update_op.having(row_weights=True, activation=activation, **OPTIONS)
    check_one_by_one(op, *sizes, dtype)


@pytest.mark.parametrize("sizes", [FIRST, ((2, 3), 300, 64, 256), ((), 77, 50, 36)], ids=str)
def test_fp32_is_as_near_to_fp64_as_torch_in_each_precision(update_op, sizes, fp32_precision):
    op = update_op.having(row_weights=True, **OPTIONS)
    check_one_by_one(op, *sizes, F32)


@pytest.mark.large
@pytest.mark.parametrize("clip", [None, 1.0], ids=["unclipped", "clipped"])
def test_greatest_size_is_as_near_to_fp64_as_torch(update_op, clip):
    op = update_op.having(max_grad_norm=clip)
    check_one_by_one(op, (), 8192, 1024, 1024, BF16)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_replayed_graph_gives_eager_bits_of_the_values_of_the_replay(update_op, dtype):
    op = update_op.having(row_weights=True, **OPTIONS)
    leaves = [x.requires_grad_() for x in op.draw(*FIRST, dtype, "cuda")]
    graph, captured = capture(lambda: everything(op, leaves))
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.rand_like(x) * 0.1)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, everything(op, leaves))


def test_no_call_waits_for_the_gpu(update_op):
    op = update_op.having(row_weights=True, **OPTIONS)
    leaves = [x.requires_grad_() for x in op.draw(*FIRST, BF16, "cuda")]
    everything(op, leaves)
    torch.cuda.synchronize()
    with no_synchronisation():
        everything(op, leaves)
        update_op.whole(*leaves[:-4], 0.1, 0.9, 0.01)


@pytest.mark.parametrize("sizes", [FIRST, ((), 20000, 64, 128), ((2, 3), 300, 64, 256)], ids=str)
def test_same_bits_twice_and_on_two_streams(update_op, sizes):
    leaves = [x.requires_grad_() for x in update_op.draw(*sizes, BF16, "cuda")]
    expected = everything(update_op, leaves)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(everything(update_op, leaves))
    torch.cuda.synchronize()
    assert all(same_bits(values, expected) for values in found)


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_memory_with_a_strange_row_is_skipped_and_others_keep_their_bits(
    update_op, dtype, strange, fp32_precision
):
    tensors = update_op.draw((3,), 300, 64, 256, dtype, "cuda")
    leaves = [x.requires_grad_() for x in tensors]
    expected = everything(update_op, leaves)
    with torch.no_grad():
        leaves[0][1, 200, 3] = strange
    found = everything(update_op, leaves)
    assert update_op.whole(*leaves).skipped.tolist() == [False, True, False]
    assert same_bits([x[1] for x in found[:8]], [x[1] for x in tensors[2:10]])
    assert same_bits([x[[0, 2]] for x in found], [x[[0, 2]] for x in expected])
    assert not any(x[1].any() for x in found[9:11])


@pytest.mark.large
def test_rows_past_31_bits_of_elements(update_op):
    """Rows of no weight, more than 31 bits can count the elements of, before those that count."""
    rows, width, hidden = (1 << 31) // 64 + 1000, 64, 16
    op = update_op.having(row_weights=True)
    few = op.draw((), 1000, width, hidden, BF16, "cuda")

    def after_many(k, v, *others):
        *state, weights = others
        k, v = (torch.cat([x.new_zeros(rows - 1000, width), x]) for x in (k, v))
        return op.kernels(k, v, *state, torch.cat([weights.new_zeros(rows - 1000), weights]))

    # Their outputs alone: gradients would be of as many rows.
    Yardstick(op.reference, few, [None] * 9).check(after_many)


def test_inductor_compiles_forward_and_backward(update_op):
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in update_op.draw(*FIRST, BF16, "cuda")]
    expected = everything(update_op, leaves)
    outputs = torch.compile(update_op.kernels, fullgraph=True)(*leaves)
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    assert same_bits([*outputs, *grads], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_the_tensor(update_op):
    leaves = [x.requires_grad_() for x in update_op.draw((2,), 300, 64, 256, BF16, "cuda:1")]
    assert same_bits(everything(update_op, leaves), everything(update_op, leaves))
