"""Several products of one tensor: those of torch's linear layers, as one node."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright.example._core.linears import linears, linears_of
from fusewright_testkit.nodes import nodes_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

WIDTHS = 4, 6, 1
LEAD = 2, 5
ROUNDINGS = 16 * torch.finfo(torch.float64).eps


def operands(dtype=torch.float64, lead=LEAD):
    torch.manual_seed(0)
    x = torch.randn(*lead, 3, dtype=dtype, requires_grad=True)
    return x, *[torch.randn(width, 3, dtype=dtype, requires_grad=True) for width in WIDTHS]


def one_by_one(x, *weights):
    return tuple(F.linear(x, weight) for weight in weights)


def gradients(call, given, used=slice(None)):
    found = call(*given)[used]
    torch.manual_seed(1)
    cotangents = [torch.randn_like(y) for y in found]
    return torch.autograd.grad(found, given, cotangents, allow_unused=True)


def between(y):
    """The nodes between y and the leaves."""
    return [node for node in nodes_of(y) if "AccumulateGrad" not in node.name()]


@pytest.mark.parametrize("lead", [LEAD, (7,), (), (0, 5)], ids=str)
def test_values_are_those_of_torch_and_gradients_but_for_the_order_of_a_sum(lead):
    given = operands(lead=lead)
    assert all(map(torch.equal, linears(*given), one_by_one(*given)))
    for found, expected in zip(
        gradients(linears, given), gradients(one_by_one, given), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=ROUNDINGS, atol=ROUNDINGS)


def test_all_products_have_one_node():
    found = linears(*operands())
    assert len({y.grad_fn for y in found}) == 1
    assert len(between(found[0])) == 1


def test_autocast_casts_all_weights_by_one_node_and_gradients_have_their_dtype():
    given = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = linears(*given), one_by_one(*given)
        assert sorted(node.name() for node in between(found[0])) == [
            "CastBackward",
            "LinearsBackward",
            "ToCopyBackward0",
        ]
    assert all(map(torch.equal, found, expected))
    cotangents = [torch.randn_like(y) for y in found]
    pairs = [torch.autograd.grad(ys, given, cotangents) for ys in (found, expected)]
    assert {x.dtype for x in pairs[0]} == {torch.float32}
    for mine, plain in zip(*(pair[1:] for pair in pairs), strict=True):
        assert torch.equal(mine, plain)
    # That of x is a sum, which is rounded once less for each product.
    bound = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(*(pair[0] for pair in pairs), rtol=bound, atol=bound)


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    given = operands()
    expected = gradients(linears, given)
    given[frozen].requires_grad_(False)
    trained = [x for x in given if x.requires_grad]
    found = linears(*given)
    torch.manual_seed(1)
    cotangents = [torch.randn_like(y) for y in found]
    kept = [g for g, x in zip(expected, given, strict=True) if x.requires_grad]
    assert all(map(torch.equal, torch.autograd.grad(found, trained, cotangents), kept))


def test_a_product_that_is_not_used_gives_its_weight_no_gradient():
    given = operands()
    found = gradients(linears, given, slice(1, 2))
    assert [g is None for g in found] == [False, True, False, True]
    expected = gradients(one_by_one, given, slice(1, 2))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])


def test_second_derivatives_are_right():
    assert torch.autograd.gradgradcheck(linears, operands())


def test_a_backward_pass_within_autocast_is_right():
    given = operands(torch.float32)
    found = linears(*given)
    cotangents = [torch.randn_like(y) for y in found]
    expected = torch.autograd.grad(found, given, cotangents, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(found, given, cotangents), expected))


def test_transforms_and_the_compiler_see_products_of_torch():
    given = operands()

    def total(*given):
        return sum(y.square().sum() for y in linears(*given))

    expected = torch.autograd.grad(total(*given), given)
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    pairs = (
        (torch.func.grad(total, argnums=(0, 1, 2, 3))(*given), expected),
        (torch.autograd.grad(compiled(*given), given), expected),
        (torch.vmap(lambda x: linears(x, *given[1:]))(given[0]), linears(*given)),
    )
    for found, wanted in pairs:
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)


def test_without_gradients_there_is_no_node():
    given = operands(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = linears(*given)
        assert all(map(torch.equal, found, one_by_one(*given)))
    assert not any(y.requires_grad for y in found)


class Doubled(nn.Linear):
    """A layer that someone put in the place of a linear one."""

    def forward(self, x):
        return 2.0 * super().forward(x)


def test_a_layer_that_is_not_plain_is_called():
    x, called = torch.randn(2, 3), []
    plain, hooked, biased = (nn.Linear(3, 4, bias=number == 2) for number in range(3))
    doubled = Doubled(3, 4, bias=False)
    hooked.register_forward_hook(lambda *_: called.append(True))
    assert torch.equal(linears_of(x, plain)[0], plain(x))
    for other in (hooked, biased, doubled):
        assert all(map(torch.equal, linears_of(x, plain, other), (plain(x), other(x))))
    assert len(called) == 2


def test_a_layer_with_a_forward_of_its_own_or_a_hook_of_all_is_called():
    x, called = torch.randn(2, 3), []
    plain, own = (nn.Linear(3, 4, bias=False) for _ in range(2))
    own.forward = lambda rows: 3.0 * F.linear(rows, own.weight)
    assert torch.equal(linears_of(x, plain, own)[1], own(x))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append(True))
    try:
        linears_of(x, plain, plain)
    finally:
        handle.remove()
    assert len(called) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda layer, rows: called.append(True) or rows)
        linears_of(x, plain, plain)
    assert len(called) == 4


@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_operands_have_no_product_and_keep_nothing(autocast):
    x, first, second, third = operands(torch.float32)
    first.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mixed = linears(x, first, second, third)
        frozen = linears(x, first, first)
        of_weights = linears(x.detach(), first, second)

    def products(found, *leaves):
        cotangents = [torch.ones_like(y) for y in found]
        # With a graph of its own: sums in place are not counted.
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(found, leaves, cotangents, create_graph=True)
        return counter.get_total_flops()

    rows = x.numel() // 3
    one = [2 * rows * 3 * width for width in WIDTHS]
    assert [
        len([y for y in each[-1].grad_fn.saved_tensors if y is not None])
        for each in (mixed, frozen, of_weights)
    ] == [4, 2, 1]
    assert products(mixed, x, second, third) == 2 * sum(one) - one[0]
    assert products(frozen, x) == 2 * one[0]
    assert products(of_weights[1:], second) == one[1]
    assert [y.requires_grad for y in of_weights] == [False, True]


def test_no_rows_and_no_columns():
    x, weights = torch.randn(2, 0, requires_grad=True), [torch.randn(4, 0), torch.randn(0, 0)]
    weights = [weight.requires_grad_() for weight in weights]
    found = linears(x, *weights)
    torch.autograd.backward(found, [torch.ones_like(y) for y in found])
    assert [each.grad.shape for each in (x, *weights)] == [x.shape, (4, 0), (0, 0)]
