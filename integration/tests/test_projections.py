"""Queries, keys and values of TransformerNP against linear layers under autograd."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fusewright_models.models.transformer_np import projections
from fusewright_models.models.transformer_np.projections import linear_of_part, projected
from fusewright_testkit.yardstick import Yardstick
from torch.utils.flop_counter import FlopCounterMode

SIZES = dict(batch=3, rows=7, width=8)


def operands(batch, rows, width, dtype=torch.float64):
    shapes = (batch, rows, width), (width, width), (2 * width, width)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def linear(a, query, key_value, context_rows, first, heads=1):
    found = F.linear(a[:, first:], query), *F.linear(a[:, :context_rows], key_value).chunk(2, -1)
    return [x.unflatten(-1, (heads, -1)) for x in found]


@pytest.fixture(autouse=True, params=[1, 64], ids=["task by task", "all tasks"])
def _tile(request, monkeypatch):
    """Parts of any size read where they lie, and few rows copied together."""
    monkeypatch.setattr(projections, "TILE_ROWS", request.param)


every_cut = pytest.mark.parametrize(
    ("context_rows", "first"), [(4, 0), (4, 4), (7, 0), (1, 1)], ids=str
)


@every_cut
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 1), (3, 2)])
def test_outputs_and_gradients_are_those_of_linear_layers(
    assert_same_but_for_rounding, batch, heads, context_rows, first
):
    found = []
    given = operands(batch, 7, 8)
    options = dict(heads=heads, first=first)
    for function in (partial(projected, **options), partial(linear, **options)):
        leaves = [x.clone().requires_grad_() for x in given]
        outputs = function(*leaves, context_rows)
        torch.manual_seed(1)
        loss = sum((x * torch.randn_like(x)).sum() for x in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, leaves)])
    assert [x.shape for x in found[0]] == [x.shape for x in found[1]]
    assert_same_but_for_rounding(*found)


@every_cut
def test_gradients_in_bf16_err_no_more_than_autograds(context_rows, first):
    tensors = operands(**SIZES, dtype=torch.bfloat16)
    yardstick = Yardstick(partial(linear, context_rows=context_rows, first=first), tensors)
    yardstick.check(partial(projected, context_rows=context_rows, first=first))


def test_second_derivative_is_that_of_linear_layers():
    leaves = [x.requires_grad_() for x in operands(2, 5, 4)]
    assert torch.autograd.gradgradcheck(lambda *x: projected(*x, 3), leaves)


@pytest.mark.parametrize("asked", range(3))
def test_no_product_makes_a_gradient_that_is_not_asked_for(assert_same_but_for_rounding, asked):
    found, products = [], []
    tensors = operands(**SIZES)
    tensors[asked].requires_grad_()
    for function in (projected, partial(linear, first=0)):
        loss = sum(x.square().sum() for x in function(*tensors, 4))
        with FlopCounterMode(display=False) as counter:
            found.append(torch.autograd.grad(loss, tensors[asked]))
        products.append(counter.get_total_flops())
    assert_same_but_for_rounding(*found)
    # Those in place are not counted.
    assert products[0] <= products[1]


def test_gradient_of_one_output_alone(assert_same_but_for_rounding):
    a, *weights = operands(**SIZES)
    for place in range(3):
        found = []
        for function in (partial(projected, first=4), partial(linear, first=4)):
            leaf = a.clone().requires_grad_()
            found.append(torch.autograd.grad(function(leaf, *weights, 4)[place].sum(), leaf))
        assert_same_but_for_rounding(*found)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)]
)
def test_autocast_chooses_the_dtype_as_of_a_linear_layer(dtype, expected):
    tensors = operands(**SIZES, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = projected(*tensors, 4), linear(*tensors, 4, 0)
    assert {x.dtype for x in (*found, *plain)} == {expected}
    assert all(map(torch.equal, found, plain))


def test_keys_and_values_lie_side_by_side():
    """As the product of both left them: nothing is copied."""
    _, k, v = projected(*operands(**SIZES), 4, heads=2)
    assert v.data_ptr() - k.data_ptr() == 8 * k.element_size()
    assert k.stride() == v.stride() == (4 * 16, 16, 4, 1)


@pytest.mark.parametrize(
    ("count", "in_place"),
    [(63, True), (64, True), (56, True), (55, False), (100, False), (7, False)],
)
def test_a_part_is_read_where_it_lies_if_that_fills_tiles(count, in_place, monkeypatch):
    called = []
    run = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x: called.append(x[0]) or run(*x))
    monkeypatch.setattr(projections, "TILE_ROWS", 64)
    a, weight = torch.randn(2, 130, 8), torch.randn(5, 8)
    part = a[:, 3 : 3 + count]
    found = linear_of_part(part, weight)
    assert [x.data_ptr() for x in called] == [part.data_ptr()] * in_place
    torch.testing.assert_close(found, F.linear(part, weight))
    linear_of_part(part.contiguous(), weight)
    assert len(called) == in_place


@pytest.mark.parametrize("stacked", range(3))
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_stacked_operands_are_each_itself(assert_same_but_for_rounding, stacked):
    tensors = operands(**SIZES)
    tensors[stacked] = torch.stack([tensors[stacked], 2 * tensors[stacked]])

    def gradients(*leaves):
        def loss(*leaves):
            return sum(x.square().sum() for x in projected(*leaves, 4))

        return torch.func.grad(loss, (0, 1, 2))(*leaves)

    axes = tuple(0 if place == stacked else None for place in range(3))
    found = torch.func.vmap(gradients, axes)(*tensors)
    samples = [
        [x[i] if y == 0 else x for x, y in zip(tensors, axes, strict=True)] for i in range(2)
    ]
    expected = [torch.stack(parts) for parts in zip(*(gradients(*x) for x in samples), strict=True)]
    assert_same_but_for_rounding(found, expected)


@pytest.mark.parametrize("stacked", range(3))
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradient_of_stacked_operands_is_the_sum_of_each(assert_same_but_for_rounding, stacked):
    tensors = operands(**SIZES)
    tensors[stacked] = torch.stack([tensors[stacked], 2 * tensors[stacked]])
    axes = tuple(0 if place == stacked else None for place in range(3))

    def loss(*leaves):
        return sum(x.square().sum() for x in projected(*leaves, 4))

    found = torch.func.grad(lambda *x: torch.func.vmap(loss, axes)(*x).sum(), (0, 1, 2))(*tensors)
    samples = [
        [x[i] if y == 0 else x for x, y in zip(tensors, axes, strict=True)] for i in range(2)
    ]
    each = [torch.func.grad(loss, (0, 1, 2))(*x) for x in samples]
    expected = [
        torch.stack(parts) if y == 0 else sum(parts)
        for y, parts in zip(axes, zip(*each, strict=True), strict=True)
    ]
    assert_same_but_for_rounding(found, expected)
