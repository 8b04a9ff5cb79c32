"""What only a GPU can show of memory_scan, beyond what the suite asks: full sizes."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.conformance import everything, same_bits

from .operations_scan import RestOp, ShortChunksOp
from .test_scan_clip import amid

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows, tokens, heads, D; the tokens are no multiple of a chunk, and theta is so small that the
# memory stays as small as it began.
ROWS = 2, 300, 3
RATE = 0.002


def drawn(op, width, hidden, dtype):
    return op.draw(*ROWS, width, hidden, dtype, "cuda", rate=RATE)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("chunk", [16, 32, 48, 64])
def test_full_size_is_as_near_to_fp64_as_torch(scan_op, chunk, hidden, dtype):
    scan_op.having(chunk=chunk).check(drawn(scan_op, 64, hidden, dtype))


@pytest.mark.sampled
@pytest.mark.parametrize("width", [8, 32, 40, 64])
@pytest.mark.parametrize("hidden", [128, 200])
@pytest.mark.parametrize("read", ["after", "before"])
def test_every_width_is_as_near_to_fp64_as_torch(scan_op, read, hidden, width):
    scan_op.having(read=read).check(drawn(scan_op, width, hidden, BF16))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_other_activations_are_as_near_to_fp64_as_torch(scan_op, in_tf32, dtype, activation):
    """fp32 in TF32: exact products, whose kernels compile for longest, are asked of SiLU below."""
    tensors = drawn(scan_op, 64, 128, dtype)
    if activation == "relu":
        # Far from the kink, beside which rounding alone decides between two slopes.
        b1 = tensors[4]
        b1 += 4.0 * b1.sign()
    scan_op.having(activation=activation).check(tensors)


FP32_SIZES = pytest.mark.parametrize(
    ("chunk", "width", "hidden"), [(64, 64, 128), (16, 40, 64), (64, 64, 256)]
)


@FP32_SIZES
def test_tf32_is_as_near_to_fp64_as_torch(scan_op, chunk, width, hidden, in_tf32):
    scan_op.having(chunk=chunk).check(drawn(scan_op, width, hidden, F32))


@FP32_SIZES
def test_exact_outputs_are_as_near_to_fp64_as_torch(scan_op, chunk, width, hidden):
    """Gradients, whose kernels compile for longest, at one size below."""
    op = scan_op.having(chunk=chunk)
    tensors = op.draw(1, 130, 3, width, hidden, F32, "cuda", rate=RATE)
    Yardstick(op.reference, tensors, [None] * 9).check(op.kernels)


def test_exact_gradients_are_as_near_to_fp64_as_torch(scan_op):
    scan_op.check(scan_op.draw(1, 130, 3, 64, 128, F32, "cuda", rate=RATE))


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


def test_parts_beside_one_another_give_the_bits_of_the_whole(scan_op, parts_of_a_chunk):
    leaves = [x.requires_grad_() for x in drawn(scan_op, 64, 256, BF16)]
    expected = everything(scan_op.kernels, leaves)
    parts_of_a_chunk()
    for _ in range(5):
        assert same_bits(everything(scan_op.kernels, leaves), expected)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything(scan_op.kernels, leaves)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = everything(scan_op.kernels, leaves)
    for _ in range(5):
        graph.replay()
        assert same_bits(captured, expected)


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


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_strange_token_stays_in_its_row_and_head(scan_op, strange):
    leaves = [x.requires_grad_() for x in drawn(scan_op, 64, 256, BF16)]
    expected = everything(scan_op.kernels, leaves)
    with torch.no_grad():
        leaves[1][1, 70, 2, 5] = strange
    found = everything(scan_op.kernels, leaves)
    # y, the tokens' inputs and their gradients have heads on the third axis.
    by_token = (0, 9, 10, 11, 20, 21, 22)
    for place, (x, truth) in enumerate(zip(found, expected, strict=True)):
        x, truth = (z.transpose(1, 2) if place in by_token else z for z in (x, truth))
        assert torch.equal(x[0], truth[0])
        assert torch.equal(x[1, :2], truth[1, :2])


def two_sizes(op, width, hidden, dtype):
    """Half of the tokens have norms eight times as large as the others: no rounding decides which
    are clipped at the limit between.
    """
    tensors = drawn(op, width, hidden, dtype)
    tensors[2][:, ::2] *= 8.0
    return tensors, amid(op, tensors)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    ("chunk", "width", "hidden"),
    [(64, 64, 128), (64, 64, 256), (48, 40, 200), (16, 8, 32), (16, 3, 32)],
)
def test_clipped_scan_is_as_near_to_fp64_as_torch(scan_op, in_tf32, chunk, width, hidden, dtype):
    op = scan_op.having(chunk=chunk)
    tensors, limit = two_sizes(op, width, hidden, dtype)
    op.having(max_grad_norm=limit).check(tensors)


@pytest.mark.parametrize("hidden", [32, 128, 512])
def test_chunk_that_would_poison_the_memory_is_as_if_it_were_not_written(scan_op, hidden):
    """To the bit, forward and backward, and outliers among the others stay what the clip allows."""
    op = scan_op.having(max_grad_norm=1.0)
    tensors = drawn(op, 64, hidden, BF16)
    tensors[2][0, 200, 1] = 1e30
    # The second chunk of one memory.
    tensors[13][1, 70, 2] = float("inf")
    mask = torch.ones(*ROWS, dtype=torch.bool, device="cuda")
    mask[1, 64:128, 2] = False
    kept = mask.unsqueeze(-1)
    results = []
    for options in ({}, {"write_mask": mask}):
        leaves = [x.clone().requires_grad_() for x in tensors]
        y, *ends = op.having(**options).kernels(*leaves)
        y = torch.where(kept, y, 0.0)
        total = sum(x.float().sin().sum() for x in (y, *ends))
        results.append([y, *ends, *torch.autograd.grad(total, leaves)])
    assert same_bits(*results)
    assert all(x.isfinite().all() for x in results[0])


def test_many_heads_at_a_length_that_fills_the_gpu_in_parts(scan_op):
    """More programs than the GPU runs at once, in the pass over chunks and in the others."""
    tensors = scan_op.draw(30, 130, 10, 32, 256, BF16, "cuda", rate=RATE)
    scan_op.check(tensors)


def test_second_derivative_is_as_near_to_fp64_as_torch(scan_op):
    tensors = scan_op.draw(1, 40, 1, 16, 32, F32, "cuda", rate=RATE)
    steepness = transforms.slopes_to_differentiate
    upstream = [torch.randn_like(x) for x in tensors]
    yardstick = Yardstick(steepness(scan_op.reference), tensors, upstream)
    yardstick.check(steepness(scan_op.kernels))


RESTS = {
    "rest": {},
    "norm-before": dict(residual_norm=True, read="before"),
    "clip": dict(residual_norm=True),
}


@pytest.mark.parametrize("name", RESTS)
@pytest.mark.parametrize(("width", "hidden"), [(64, 128), (64, 256), (40, 200)])
def test_rest_and_norm_are_as_near_to_fp64_as_torch(name, width, hidden):
    op = RestOp(RESTS[name])
    check_rest(op, name, op.draw(*ROWS, width, hidden, BF16, "cuda", rate=RATE))


@pytest.mark.parametrize("name", RESTS)
def test_rest_and_norm_in_tf32_are_as_near_to_fp64_as_torch(name, in_tf32):
    op = RestOp(RESTS[name])
    check_rest(op, name, op.draw(*ROWS, 64, 128, F32, "cuda", rate=RATE))


def check_rest(op, name, tensors):
    if name == "clip":
        op = op.having(max_grad_norm=amid(op, tensors))
    op.check(tensors)


@pytest.mark.parametrize("limit", [None, 1.0], ids=["plain", "clipped"])
@pytest.mark.parametrize(("width", "hidden"), [(64, 128), (40, 200)])
def test_chunks_that_are_reset_are_as_near_to_fp64_as_torch(width, hidden, limit):
    """Of several parts in the backward pass, and of programs that wait for one another."""
    op = RestOp(dict(residual_norm=True, max_grad_norm=limit), packed=True)
    op.check(drawn(op, width, hidden, BF16))


def test_chunks_that_are_reset_give_the_same_bits_again(parts_of_a_chunk):
    op = ShortChunksOp(packed=True)
    leaves = [x.requires_grad_() for x in drawn(op, 64, 256, BF16)]
    first = everything(op.kernels, leaves)
    for _ in range(3):
        assert same_bits(everything(op.kernels, leaves), first)
    parts_of_a_chunk()
    assert same_bits(everything(op.kernels, leaves), first)
