"""What only a GPU can show of memory_read, beyond what the suite asks: full sizes."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_read
from fusewright.memory_mlp.common.weights import packed_size, unpack
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.conformance import everything, ramp, same_bits

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows, tokens, heads, D, hidden units: as a layer has them.
FIRST = 4, 512, 5, 64, 128


def drawn(op, *sizes, dtype=BF16):
    return [x.requires_grad_() for x in op.draw(*sizes, dtype, "cuda")]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_full_size_is_as_near_to_fp64_as_torch(read_op, activation, dtype):
    read_op.having(activation=activation).check(read_op.draw(*FIRST, dtype, "cuda"))


def test_relu_is_as_near_to_fp64_as_torch(read_op):
    tensors = read_op.draw(*FIRST, BF16, "cuda")
    # Far from the kink, beside which rounding alone decides between two slopes.
    tensors[2] += 8.0 * tensors[2].sign()
    read_op.having(activation="relu").check(tensors)


@pytest.mark.parametrize("tokens", [1, 65, 200])
@pytest.mark.parametrize("width", [8, 32, 40, 64])
@pytest.mark.parametrize("hidden", [16, 200, 512])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_size_is_as_near_to_fp64_as_torch(read_op, dtype, hidden, width, tokens):
    # Enough numbers that their largest error is no matter of luck.
    rows = 64 if tokens == 1 else 2
    read_op.check(read_op.draw(rows, tokens, 3, width, hidden, dtype, "cuda"))


@pytest.mark.parametrize("sizes", [FIRST, (2, 100, 3, 40, 200), (1, 5000, 2, 64, 128)])
def test_fp32_is_as_near_to_fp64_as_torch_in_each_precision(read_op, sizes, fp32_precision):
    read_op.check(read_op.draw(*sizes, F32, "cuda"))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_tokens_that_programs_share_are_as_near_to_fp64_as_torch(read_op, dtype):
    read_op.check(read_op.draw(1, 5000, 2, 64, 128, dtype, "cuda"))


def test_queries_of_other_strides_and_a_packed_state_give_the_bits_of_copies(read_op):
    tensors = drawn(read_op, *FIRST)
    y, dq, *dweights = everything(read_op.kernels, tensors)
    q, *weights = (x.detach() for x in tensors)
    by_heads = q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    parts = [x.flatten(2) for x in (weights[0], weights[2].mT, weights[1], weights[3])]
    half = torch.cat(parts, -1)
    whole = torch.stack([half, torch.randn_like(half)], 2).requires_grad_()
    found = memory_read(by_heads, unpack(whole * 1.0, 128, 64)[0], backend="triton")
    grads = torch.autograd.grad(found, [by_heads, whole], ramp(found))
    by_weights, by_momentum = unpack(grads[1], 128, 64)
    assert same_bits([found, grads[0], *by_weights], [y, dq, *dweights])
    assert not any(bool(g.any()) for g in by_momentum)


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1], ids=["query", "memory"])
def test_what_is_strange_stays_in_its_row_and_head(read_op, place, strange):
    leaves = drawn(read_op, *FIRST)
    expected = everything(read_op.kernels, leaves)
    with torch.no_grad():
        index = (1, 70, 2, 5) if place == 0 else (1, 2, 70, 5)
        leaves[place][index] = strange
    found = everything(read_op.kernels, leaves)
    for number, (x, truth) in enumerate(zip(found, expected, strict=True)):
        x, truth = (z.transpose(1, 2) if number < 2 else z for z in (x, truth))
        assert not bool(x[1, 2].isfinite().all()) or number > 1
        for z in (x, truth):
            z[1, 2] = 0.0
        assert torch.equal(x, truth)


@pytest.mark.large
def test_a_state_past_two_to_the_31_bytes_is_read_right(read_op):
    """Of which the first and the last memory give the bits that they give alone."""
    heads = 2**31 // (2 * packed_size(512, 64) * 4) + 1
    state = torch.zeros(1, heads, 2, packed_size(512, 64), device="cuda")
    state[:, [0, -1]] = torch.randn_like(state[:, [0, -1]]) / 16
    q = torch.randn(1, 2, heads, 64, device="cuda", dtype=BF16)
    weights = unpack(state, 512, 64)[0]
    y = memory_read(q, weights, backend="triton")
    for head in (0, heads - 1):
        part = slice(head, head + 1)
        own = MemoryWeights(*(w[:, part].contiguous() for w in weights))
        assert torch.equal(memory_read(q[:, :, part], own, backend="triton"), y[:, :, part])


def test_second_derivative_is_as_near_to_fp64_as_torch(read_op):
    tensors = read_op.draw(1, 40, 1, 16, 32, F32, "cuda")
    steepness = transforms.slopes_to_differentiate
    upstream = [torch.randn_like(x) for x in tensors]
    yardstick = Yardstick(steepness(read_op.reference), tensors, upstream)
    yardstick.check(steepness(read_op.kernels))
