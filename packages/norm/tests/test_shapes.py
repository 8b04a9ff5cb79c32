"""Sizes, layouts and dtypes: every op, its outputs and all its gradients against the yardstick."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright_testkit.yardstick import as_tuple

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


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4), (0,)])
def test_nothing_in_nothing_out_and_vectors_get_zeros(op, shape, backend, device):
    tensors = [t.requires_grad_() for t in op.draw(shape, F32, device)]
    y = op.first(op.public(*tensors, backend=backend))
    assert y.shape == shape
    grads = torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert [g.shape for g in grads] == [t.shape for t in tensors]
    assert all(not g.any() for g in grads)


def of_a_wider_axis(shape, dtype, device):
    return torch.randn(*shape[:-1], shape[-1] + 8, device=device).to(dtype)[..., : shape[-1]]


def every_other_row(shape, dtype, device):
    return torch.randn(2 * shape[0], *shape[1:], device=device).to(dtype)[::2]


def every_other_token(shape, dtype, device):
    return torch.randn(shape[0], 2 * shape[1], *shape[2:], device=device).to(dtype)[:, 1::2]


def query_of_fused_projection(shape, dtype, device):
    return torch.randn(*shape[:2], 3, *shape[2:], device=device).to(dtype)[:, :, 0]


def heads_before_tokens(shape, dtype, device):
    return query_of_fused_projection((2, 3, 2, shape[-1]), dtype, device).transpose(1, 2)


def gap_in_the_last_axis(shape, dtype, device):
    return torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype)[..., ::2]


def columns_before_rows(shape, dtype, device):
    return torch.randn(*shape[::-1], device=device).to(dtype).permute(*reversed(range(len(shape))))


def repeated_rows(shape, dtype, device):
    return torch.randn(shape[-1], device=device).to(dtype).expand(shape)


def at_an_odd_offset(shape, dtype, device):
    return torch.randn(1 + math.prod(shape), device=device).to(dtype)[1:].view(shape)


LAYOUTS = [
    of_a_wider_axis,
    every_other_row,
    every_other_token,
    query_of_fused_projection,
    heads_before_tokens,
    gap_in_the_last_axis,
    columns_before_rows,
    repeated_rows,
    at_an_odd_offset,
]
SHAPE = (2, 3, 2, 24)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides_are_read_as_they_are(op, layout, device):
    rows = [layout(SHAPE, BF16, device) for _ in range(op.rows)]
    vectors = op.draw(rows[0].shape, BF16, device)[op.rows :]
    op.check([*rows, *vectors], [layout(SHAPE, BF16, device) for _ in range(op.outputs)])


@pytest.mark.sampled
@pytest.mark.parametrize("layout", [query_of_fused_projection, at_an_odd_offset])
def test_kernels_of_every_scheme_read_any_strides(op, scheme, layout, device):
    rows = [layout((2, 2, 1, 70), BF16, device) for _ in range(op.rows)]
    vectors = op.draw(rows[0].shape, BF16, device)[op.rows :]
    op.check([*rows, *vectors], [layout((2, 2, 1, 70), BF16, device) for _ in range(op.outputs)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_strides_change_no_bit_and_outputs_are_contiguous(op, layout, device):
    rows = [layout(SHAPE, BF16, device) for _ in range(op.rows)]
    vectors = op.draw(rows[0].shape, BF16, device)[op.rows :]
    strided = as_tuple(op.kernels(*rows, *vectors))
    contiguous = as_tuple(op.kernels(*(r.contiguous() for r in rows), *vectors))
    for y, expected, by_reference in zip(
        strided, contiguous, as_tuple(op.reference(*rows, *vectors)), strict=True
    ):
        assert torch.equal(y, expected)
        assert y.is_contiguous()
        assert by_reference.is_contiguous()
        assert y.dtype == by_reference.dtype == BF16


def test_rows_in_one_memory_may_be_gradient_and_input(op, device):
    """dy is x itself: both are read only, with the same strides."""
    tensors = op.draw((6, 50), F32, device)
    op.check(tensors, tensors[: op.outputs])


def test_gradient_of_a_sum_is_read_with_strides_of_zero(op, device):
    tensors = op.draw((6, 50), F32, device)
    op.check(tensors, [torch.ones((), device=device).expand(6, 50)] * op.outputs)


def test_vectors_may_be_strided(op, device):
    rows = op.draw((6, 50), BF16, device)[: op.rows]
    op.check([*rows, *(torch.randn(50, 3, device=device)[:, i] for i in range(op.vectors))])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "vector_dtype"), [(BF16, F32), (F32, BF16), (F16, F16), (BF16, F16)]
)
def test_vectors_keep_their_own_dtype(op, dtype, vector_dtype, device):
    op.check(op.draw((4, 33), dtype, device, vector_dtype))


def test_vectors_may_be_missing(op, device):
    tensors = op.draw((4, 33), BF16, device)
    op.check(tensors[: op.rows])


@pytest.mark.parametrize("kept", ["rows", "vectors"])
def test_one_input_alone_may_require_a_gradient(op, kept, device):
    tensors = op.draw((4, 33), BF16, device)
    everything = [t.clone().requires_grad_() for t in tensors]
    y = op.first(op.kernels(*everything))
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, everything, dy)
    chosen = range(op.rows) if kept == "rows" else range(op.rows, len(tensors))
    for index in chosen:
        leaf = tensors[index].clone().requires_grad_()
        others = [*tensors[:index], leaf, *tensors[index + 1 :]]
        (found,) = torch.autograd.grad(op.first(op.kernels(*others)), leaf, dy)
        assert torch.equal(found, expected[index])
