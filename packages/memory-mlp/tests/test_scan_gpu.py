"""What only a GPU can show of memory_scan: full sizes, graphs, synchronisation, streams."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit import Yardstick, capture, no_synchronisation, transforms

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows, tokens, heads, D; the tokens are no multiple of a chunk, and theta is so small that the
# memory stays as small as it began.
ROWS = 2, 300, 3
RATE = 0.002
FIRST = *ROWS, 64, 128


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


def drawn(op, width, hidden, dtype):
    return op.draw(*ROWS, width, hidden, dtype, "cuda", rate=RATE)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("chunk", [16, 32, 48, 64])
def test_full_size_is_as_near_to_fp64_as_torch(scan_op, chunk, hidden, dtype):
    scan_op.having(chunk=chunk).check(drawn(scan_op, 64, hidden, dtype))


@pytest.mark.parametrize("width", [8, 32, 40, 64])
@pytest.mark.parametrize("hidden", [128, 200])
@pytest.mark.parametrize("read", ["after", "before"])
def test_every_width_is_as_near_to_fp64_as_torch(scan_op, read, hidden, width):
    scan_op.having(read=read).check(drawn(scan_op, width, hidden, BF16))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_other_activations_are_as_near_to_fp64_as_torch(scan_op, dtype, activation):
    tensors = drawn(scan_op, 64, 128, dtype)
    if activation == "relu":
        # Far from the kink, beside which rounding alone decides between two slopes.
        b1 = tensors[4]
        b1 += 4.0 * b1.sign()
    scan_op.having(activation=activation).check(tensors)


@pytest.mark.parametrize(("chunk", "width", "hidden"), [(64, 64, 128), (16, 40, 64), (64, 64, 256)])
def test_fp32_is_as_near_to_fp64_as_torch_in_each_precision(
    scan_op, chunk, width, hidden, fp32_precision
):
    scan_op.having(chunk=chunk).check(drawn(scan_op, width, hidden, F32))


@pytest.mark.parametrize(("chunk", "width", "hidden"), [(64, 64, 512), (1, 8, 16)])
def test_greatest_and_smallest_sizes_are_as_near_to_fp64_as_torch(scan_op, chunk, width, hidden):
    # Enough numbers that their largest error is no matter of luck.
    rows, tokens = (64, 20) if chunk == 1 else (1, 300)
    tensors = scan_op.draw(rows, tokens, 2, width, hidden, BF16, "cuda", rate=RATE)
    scan_op.having(chunk=chunk).check(tensors)


@pytest.mark.parametrize("read", ["after", "before"])
def test_unwritten_tokens_may_be_nan_and_have_gradients_of_zero(scan_op, read):
    q, k, v, *state, alpha, eta, theta = drawn(scan_op, 64, 128, BF16)
    mask = torch.rand_like(alpha) < 0.7
    k, v = (x.masked_fill(~mask.unsqueeze(-1), float("nan")) for x in (k, v))
    gates = [x.masked_fill(~mask, float("nan")) for x in (alpha, eta, theta)]
    scan_op.having(read=read, write_mask=mask).check([q, k, v, *state, *gates])


def test_slices_of_one_projection_and_a_shared_start_give_the_bits_of_copies(scan_op):
    q, k, v, *others = drawn(scan_op, 64, 128, BF16)
    start = [x[0] for x in others[:8]]
    copied = [x.expand(2, *x.shape).contiguous() for x in start]
    expected = scan_op.kernels(q, k, v, *copied, *others[8:])
    slices = torch.cat([q, k, v], 2).split(q.shape[2], 2)
    assert same_bits(scan_op.kernels(*slices, *start, *others[8:]), expected)


def test_future_token_changes_no_past_output(scan_op):
    """To the bit; nor with "before" does its own key, value or gate."""
    for read in ("after", "before"):
        op = scan_op.having(read=read)
        q, k, v, *state, alpha, eta, theta = tensors = drawn(op, 64, 256, BF16)
        y, *_ = op.kernels(*tensors)
        for token in (0, 63, 64, 200, 299):
            changed = [x.clone() for x in (k, v, alpha, eta, theta)]
            for x in changed:
                x[:, token] *= 0.5
            later, *_ = op.kernels(q, *changed[:2], *state, *changed[2:])
            last = token + (read == "before")
            assert torch.equal(later[:, :last], y[:, :last])
            assert read == "before" or not torch.equal(later, y)


@pytest.mark.parametrize("hidden", [128, 256])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_replayed_graph_gives_eager_bits_of_the_values_of_the_replay(scan_op, dtype, hidden):
    leaves = [x.requires_grad_() for x in drawn(scan_op, 64, hidden, dtype)]
    others = drawn(scan_op, 64, hidden, dtype)
    graph, captured = capture(lambda: everything(scan_op, leaves))
    with torch.no_grad():
        for x, other in zip(leaves, others, strict=True):
            x.copy_(other)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, everything(scan_op, leaves))


def test_no_call_waits_for_the_gpu(scan_op):
    leaves = [x.requires_grad_() for x in drawn(scan_op, 64, 256, BF16)]
    everything(scan_op, leaves)
    torch.cuda.synchronize()
    with no_synchronisation():
        everything(scan_op, leaves)


@pytest.mark.parametrize("hidden", [128, 256])
def test_same_bits_twice_and_on_two_streams(scan_op, hidden):
    leaves = [x.requires_grad_() for x in drawn(scan_op, 64, hidden, BF16)]
    expected = everything(scan_op, leaves)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(everything(scan_op, leaves))
    torch.cuda.synchronize()
    assert all(same_bits(values, expected) for values in found)


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_strange_token_stays_in_its_row_and_head(scan_op, strange):
    leaves = [x.requires_grad_() for x in drawn(scan_op, 64, 256, BF16)]
    expected = everything(scan_op, leaves)
    with torch.no_grad():
        leaves[1][1, 70, 2, 5] = strange
    found = everything(scan_op, leaves)
    # y, the tokens' inputs and their gradients have heads on the third axis.
    by_token = (0, 9, 10, 11, 20, 21, 22)
    for place, (x, truth) in enumerate(zip(found, expected, strict=True)):
        x, truth = (z.transpose(1, 2) if place in by_token else z for z in (x, truth))
        assert torch.equal(x[0], truth[0])
        assert torch.equal(x[1, :2], truth[1, :2])


def test_many_heads_at_a_length_that_fills_the_gpu_in_parts(scan_op):
    """More programs than the GPU runs at once, in the pass over chunks and in the others."""
    tensors = scan_op.draw(30, 130, 10, 32, 256, BF16, "cuda", rate=RATE)
    scan_op.check(tensors)


def test_inductor_compiles_forward_and_backward(scan_op):
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in scan_op.draw(*FIRST, BF16, "cuda", rate=RATE)]
    expected = everything(scan_op, leaves)
    outputs = torch.compile(scan_op.kernels, fullgraph=True)(*leaves)
    grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    assert same_bits([*outputs, *grads], expected)


def test_second_derivative_is_as_near_to_fp64_as_torch(scan_op):
    tensors = scan_op.draw(1, 40, 1, 16, 32, F32, "cuda", rate=RATE)
    steepness = transforms.slopes_to_differentiate
    upstream = [torch.randn_like(x) for x in tensors]
    yardstick = Yardstick(steepness(scan_op.reference), tensors, upstream)
    yardstick.check(steepness(scan_op.kernels))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_the_tensor(scan_op):
    leaves = [x.requires_grad_() for x in scan_op.draw(*FIRST, BF16, "cuda:1", rate=RATE)]
    assert same_bits(everything(scan_op, leaves), everything(scan_op, leaves))
