"""Keys and values of a context, kept for many targets."""

from __future__ import annotations

import pytest
import torch

SHAPES = {
    "pre": {},
    "post": {"norm": "post"},
    "one-block": {"layers": 1},
    "inputs": {"indicator": True, "frequencies": 2},
    "two-outputs": {"y_width": 2},
}


@pytest.fixture(params=SHAPES)
def case(request, small, rows):
    changes = SHAPES[request.param]
    torch.manual_seed(2)
    model = small(dtype=torch.float64, **changes)
    sizes = dict(dtype=torch.float64, y_width=changes.get("y_width", 1))
    return model, rows(3, 7, 11, **sizes)


@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_targets_of_several_calls_are_those_of_one(case, ragged, assert_same_but_for_rounding):
    model, (x_context, y_context, x_target, _) = case
    lengths = torch.tensor([7, 0, 3]) if ragged else None
    expected = model(x_context, y_context, x_target, lengths)
    context = model.encode(x_context, y_context, lengths)
    for sizes in ((11,), (1, 6, 4)):
        parts = [model.decode(context, x) for x in x_target.split(sizes, dim=1)]
        assert_same_but_for_rounding([torch.cat(parts, dim=1)], [expected])


def test_gradients_of_several_calls_are_those_of_one(case, assert_same_but_for_rounding):
    model, (x_context, y_context, x_target, y_target) = case
    x_context.requires_grad_()

    def gradients(params):
        loss = model.head.loss(params, y_target)
        found = torch.autograd.grad(loss, [x_context, *model.parameters()])
        return list(found)

    expected = gradients(model(x_context, y_context, x_target))
    context = model.encode(x_context, y_context)
    parts = [model.decode(context, x) for x in x_target.split((4, 7), dim=1)]
    assert_same_but_for_rounding(gradients(torch.cat(parts, dim=1)), expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_kept_context_is_in_the_dtype_of_autocast(small, rows, norm):
    model = small(norm=norm)
    x_context, y_context, x_target, _ = rows(2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        context = model.encode(x_context, y_context)
        found, expected = model.decode(context, x_target), model(x_context, y_context, x_target)
    assert {x.dtype for kept in context.blocks for x in kept} == {torch.bfloat16}
    assert found.dtype == expected.dtype == torch.float32
    exact = model.double()(x_context.double(), y_context.double(), x_target.double())
    allowed = 2.0 * (expected - exact).square().mean().sqrt()
    assert (found - exact).square().mean().sqrt() <= allowed


def test_targets_that_do_not_fit_the_context_are_refused(small, rows):
    model = small()
    x_context, y_context, x_target, _ = rows(2, 5, 4)
    context = model.encode(x_context, y_context)
    with pytest.raises(ValueError, match=r"wanted x_target \[2, N, .*got \[1, 4, "):
        model.decode(context, x_target[:1])
    with pytest.raises(ValueError, match=r"N >= 1; got \[2, 0, "):
        model.decode(context, x_target[:, :0])
    with pytest.raises(ValueError, match=r"M >= 1 .*; got \[2, 0, "):
        model.encode(x_context[:, :0], y_context[:, :0])
    with pytest.raises(ValueError, match=r"wanted context_lengths \[2\]"):
        model.encode(x_context, y_context, torch.tensor([1]))
