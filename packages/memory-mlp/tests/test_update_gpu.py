"""What only a GPU can show of memory_update, beyond what the suite asks: full sizes."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit import Yardstick, no_synchronisation
from fusewright_testkit.conformance import everything, same_bits

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


# Sizes of the kernel for Hopper: of whole tiles and not, one or the other axis the wider one.
MANY_ROWS = pytest.mark.parametrize(
    "sizes", [(8192, 1024, 1024), (9000, 784, 1040), (9000, 1040, 784)], ids=str
)


@pytest.mark.large
@MANY_ROWS
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_many_rows_are_as_near_to_fp64_as_torch(update_op, sizes, activation):
    op = update_op.having(activation=activation, **OPTIONS)
    check_one_by_one(op, (), *sizes, BF16)


@pytest.mark.large
def test_many_rows_that_start_anywhere_give_the_bits_of_aligned_ones(update_op):
    k, v, *others = update_op.draw((), 9000, 784, 1040, BF16, "cuda")
    leaves = [x.requires_grad_() for x in (k, v, *others)]
    expected = everything(update_op.kernels, leaves)
    shifted = [torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view_as(x) for x in (k, v)]
    leaves = [*(x.requires_grad_() for x in shifted), *leaves[2:]]
    assert same_bits(everything(update_op.kernels, leaves), expected)


@pytest.mark.large
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_strange_one_of_many_rows_has_the_step_skipped(update_op, strange):
    leaves = [x.requires_grad_() for x in update_op.draw((), 9000, 784, 1040, BF16, "cuda")]
    with torch.no_grad():
        leaves[0][8000, 3] = strange
    found = everything(update_op.kernels, leaves)
    assert update_op.whole(*leaves).skipped.item()
    assert same_bits(found[:8], leaves[2:10])
    assert not any(x.any() for x in found[9:11])


@pytest.mark.large
@pytest.mark.parametrize("clip", [None, 1.0], ids=["unclipped", "clipped"])
def test_greatest_size_is_as_near_to_fp64_as_torch(update_op, clip):
    op = update_op.having(max_grad_norm=clip)
    check_one_by_one(op, (), 8192, 1024, 1024, BF16)


def test_no_call_with_numbers_for_gates_waits_for_the_gpu(update_op):
    *tensors, _, _, _ = update_op.draw(*FIRST, BF16, "cuda")
    update_op.whole(*tensors, 0.1, 0.9, 0.01)
    torch.cuda.synchronize()
    with no_synchronisation():
        update_op.whole(*tensors, 0.1, 0.9, 0.01)


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_memory_with_a_strange_row_is_skipped_and_others_keep_their_bits(
    update_op, dtype, strange, fp32_precision
):
    tensors = update_op.draw((3,), 300, 64, 256, dtype, "cuda")
    leaves = [x.requires_grad_() for x in tensors]
    expected = everything(update_op.kernels, leaves)
    with torch.no_grad():
        leaves[0][1, 200, 3] = strange
    found = everything(update_op.kernels, leaves)
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
