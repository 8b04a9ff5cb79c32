"""Sizes, layouts and dtypes: every op, its output and all its gradients against the yardstick."""

from __future__ import annotations

import pytest
import torch
from fusewright.feed_forward import silu_mul
from fusewright.feed_forward.gating import reference
from fusewright.feed_forward.gating.silu_mul import silu_mul_halves
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import everything, layouts, same_bits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16])


@DTYPES
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (3, 1), (1, 2), (3, 63), (33, 40), (5, 1376), (2, 4097)]
)
def test_values_and_gradients_are_as_near_to_fp64_as_torch(op, rows, cols, dtype, device):
    op.check(op.draw((rows, cols), dtype, device))


@pytest.mark.parametrize("shape", [(1, 200), (2, 100), (13, 16), (9, 24), (50, 7), (300, 1)])
def test_programs_that_begin_amid_rows_are_as_near_to_fp64_as_torch(
    op, shape, device, many_programs
):
    op.check(op.draw(shape, BF16, device))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 3, 32), (2, 3, 1, 2, 5)])
def test_every_leading_axis_counts_rows(op, shape, device):
    tensors = op.draw(shape, F32, device)
    op.check(tensors)
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    assert torch.equal(op.kernels(*tensors).flatten(), op.kernels(*flat).flatten())


def test_numbers_without_an_axis_are_gated(backend, device):
    gate, up = torch.randn(2, device=device)
    yardstick = Yardstick(reference.silu_mul, [gate, up])
    yardstick.check(lambda *t: silu_mul(*t, backend=backend))


def repeated_rows(x):
    return x[:1, :1, :1].expand(x.shape)


READ_AS_THEY_ARE = [
    layouts.of_a_wider_axis,
    layouts.of_an_odd_axis,
    layouts.every_other_row,
    layouts.every_other_token,
    layouts.first_of_fused_heads,
    repeated_rows,
    layouts.amid_memory,
]
SHAPE = (2, 3, 2, 16)


@pytest.mark.parametrize("layout", READ_AS_THEY_ARE, ids=lambda layout: layout.__name__)
def test_rows_that_two_strides_reach_are_not_copied(op, layout, device, many_programs, monkeypatch):
    from fusewright.feed_forward._core import launches
    from fusewright.feed_forward.gating import launch

    def no_copies(*_):
        raise AssertionError("an operand was copied")

    for module in (launches, launch):
        monkeypatch.setattr(module, "contiguous_where", no_copies)
    *tensors, dy = map(layout, [*op.draw(SHAPE, BF16, device), op.draw(SHAPE, BF16, device)[0]])
    found, expected = (
        everything(op.kernels, [x.detach().requires_grad_() for x in given], [g[..., :16]])
        for given, g in ((tensors, dy), ([x.contiguous() for x in tensors], dy.contiguous()))
    )
    assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("rows", "cols", "vector"), [(4, 5504, 16), (4, 1000, 8), (4, 1364, 4), (4, 1365, 1)]
)
def test_halves_of_a_product_are_read_in_the_longest_vectors(rows, cols, vector, device):
    from fusewright.feed_forward._core.launches import layouts
    from fusewright.feed_forward.gating.launch import backward_plan

    dy = torch.empty(rows, cols, device=device, dtype=BF16)
    gate, up = torch.empty(rows, 2 * cols, device=device, dtype=BF16).tensor_split(2, -1)
    plan = backward_plan(gate.shape, layouts(dy, gate, up), True, gate.device)
    assert plan.copies == ()
    assert plan.launch.constants["VECTOR"] == vector


@DTYPES
def test_halves_of_one_tensor_give_the_bits_of_two(dtype, device):
    joint = torch.randn(7, 3, 2 * 24, device=device).to(dtype).requires_grad_()
    dy = torch.randn(7, 3, 24, device=device).to(dtype)
    y = silu_mul_halves(joint, backend="triton")
    expected = silu_mul(*joint.chunk(2, -1), backend="triton")
    assert torch.equal(y, expected)
    (found,) = torch.autograd.grad(y, joint, dy)
    (truth,) = torch.autograd.grad(expected, joint, dy)
    assert torch.equal(found, truth)


def test_one_tensor_may_be_both_operands(device):
    yardstick = Yardstick(lambda x: reference.silu_mul(x, x), [torch.randn(5, 24, device=device)])
    yardstick.check(lambda x: silu_mul(x, x, backend="triton"))


def test_rows_in_one_memory_may_be_gradient_and_input(device):
    gate, up = torch.randn(2, 6, 50, device=device)
    yardstick = Yardstick(reference.silu_mul, [gate, up], [gate])
    yardstick.check(lambda *t: silu_mul(*t, backend="triton"))


def test_more_rows_than_the_kernels_count_are_refused_where_they_lie_apart():
    pytest.importorskip("triton", reason="plans are made for Triton's kernels")
    from fusewright.feed_forward.gating.launch import MAX_COLS, MAX_ROWS, forward_plan

    device = torch.device("cpu")
    for rows, cols in [(MAX_ROWS, 1), (2, MAX_COLS)]:
        gaps = ((BF16, (2 * cols, 1)),) * 2
        assert forward_plan((rows, cols), gaps, device).launch is not None
    for rows, cols in [(MAX_ROWS + 1, 1), (2, MAX_COLS + 1)]:
        gaps, flat = (((BF16, (stride, 1)),) * 2 for stride in (2 * cols, cols))
        with pytest.raises(ValueError, match=f"got {rows} of {cols}"):
            forward_plan((rows, cols), gaps, device)
        assert forward_plan((rows, cols), flat, device).launch is not None
