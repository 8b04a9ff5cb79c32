"""Sizes, layouts and dtypes: every op, its outputs and all its gradients against the yardstick."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit.conformance import layouts

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 1), (1, 2), (3, 63), (33, 40)])
def test_rows_and_gradients_are_as_near_to_fp64_as_torch(op, rows, cols, dtype, device):
    op.check(op.draw((rows, cols), dtype, device))


@pytest.mark.sampled
@pytest.mark.parametrize(("rows", "cols", "dtype"), [(1, 1, F32), (21, 64, BF16), (6, 150, F32)])
def test_kernels_of_every_scheme_are_as_near_to_fp64_as_torch(
    op, scheme, rows, cols, dtype, device
):
    op.check(op.draw((rows, cols), dtype, device))


@pytest.mark.parametrize("scheme", ["rows"], indirect=True)
def test_programs_walk_over_more_rows_than_they_hold(op, scheme, device):
    op.check(op.draw((300, 10), F32, device))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (3, 127, BF16),
        (3, 129, F32),
        (9, 257, F32),
        (4, 1365, BF16),
        (2, 2047, F32),
        (2, 4096, BF16),
        (2, 9001, F32),
        (2, 9001, BF16),
        (2, 16385, BF16),
        (1, 65536, F32),
    ],
)
def test_long_rows_are_as_near_to_fp64_as_torch(op, rows, cols, dtype, device, few_programs):
    op.check(op.draw((rows, cols), dtype, device))


@pytest.mark.sampled
@pytest.mark.parametrize("cols", [1, 2, 3])
def test_many_narrow_rows_are_as_near_to_fp64_as_torch(op, cols, device):
    op.check(op.draw((1000, cols), F32, device))


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 3, 33), (2, 3, 1, 2, 5)])
def test_every_leading_axis_counts_rows(op, shape, device):
    tensors = op.draw(shape, F32, device)
    op.check(tensors)
    flat = [t.reshape(-1, shape[-1]) for t in tensors[: op.rows]]
    y = op.first(op.kernels(*tensors))
    assert torch.equal(y.flatten(), op.first(op.kernels(*flat, *tensors[op.rows :])).flatten())


@pytest.mark.sampled
@pytest.mark.parametrize("layout", [layouts.first_of_fused_heads, layouts.amid_memory])
def test_kernels_of_every_scheme_read_any_strides(op, scheme, layout, device):
    *rows, upstream = (op.draw((2, 2, 1, 70), BF16, device)[0] for _ in range(op.rows + 1))
    vectors = op.draw((2, 2, 1, 70), BF16, device)[op.rows :]
    op.check([*map(layout, rows), *vectors], [layout(upstream)] * op.outputs)


def test_rows_in_one_memory_may_be_gradient_and_input(op, device):
    """dy is x itself: both are read only, with the same strides."""
    tensors = op.draw((6, 50), F32, device)
    op.check(tensors, tensors[: op.outputs])


def test_gradient_of_a_sum_is_read_with_strides_of_zero(op, device):
    tensors = op.draw((6, 50), F32, device)
    op.check(tensors, [torch.ones((), device=device).expand(6, 50)] * op.outputs)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "vector_dtype"), [(BF16, F32), (F32, BF16), (F16, F16), (BF16, F16)]
)
def test_vectors_keep_their_own_dtype(op, dtype, vector_dtype, device):
    op.check(op.draw((4, 33), dtype, device, vector_dtype))


def test_vectors_may_be_missing(op, device):
    tensors = op.draw((4, 33), BF16, device)
    op.check(tensors[: op.rows])
