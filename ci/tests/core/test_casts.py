"""The weights of a layer in the dtype of its products."""

from __future__ import annotations

import pytest
import torch
from fusewright.example._core.casts import for_products

SHAPES = (4, 3), (8, 4), (5, 7)


def weights(dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]


def test_values_and_gradients_are_those_of_casts_one_by_one():
    given = weights()
    cotangents = [torch.randn(shape).bfloat16() for shape in SHAPES]
    with torch.autocast("cpu", torch.bfloat16):
        found = for_products(*given)
    plain = [x.to(torch.bfloat16) for x in given]
    assert all(map(torch.equal, found, plain))
    grads = [torch.autograd.grad(x, given, cotangents) for x in (found, plain)]
    assert all(map(torch.equal, *grads))
    assert {x.dtype for x in grads[0]} == {torch.float32}


def test_all_weights_have_one_node():
    with torch.autocast("cpu", torch.bfloat16):
        found = for_products(*weights())
    assert len({x.grad_fn for x in found}) == 1


def test_a_weight_that_is_not_used_gets_no_gradient():
    given = weights()
    with torch.autocast("cpu", torch.bfloat16):
        found = for_products(*given)
    found[1].sum().backward()
    assert [x.grad is None for x in given] == [True, False, True]
    assert torch.equal(given[1].grad, torch.ones(SHAPES[1]))


def test_the_copy_of_a_frozen_weight_is_frozen():
    given = weights()
    given[1].requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        found = for_products(*given)
    assert [x.requires_grad for x in found] == [True, False, True]
    sum(x.sum() for x in found).backward()
    assert [x.grad is None for x in given] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_autocast_leaves_stays_what_it_is(dtype):
    given = weights(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(x is y for x, y in zip(for_products(*given), given, strict=True))


def test_without_autocast_nothing_is_cast():
    given = weights()
    assert all(x is y for x, y in zip(for_products(*given), given, strict=True))


def test_second_derivatives_pass_through():
    given = weights()
    with torch.autocast("cpu", torch.bfloat16):
        found = for_products(*given)
    loss = sum(x.float().square().sum() for x in found)
    first = torch.autograd.grad(loss, given, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), given)
    assert all(torch.equal(x, torch.full_like(x, 2.0)) for x in second)


def test_transforms_reach_through():
    given = weights()

    def total(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return sum(x.float().square().sum() for x in for_products(*given))

    found = torch.func.grad(total, argnums=(0, 1, 2))(*given)
    assert all(map(torch.equal, found, torch.autograd.grad(total(*given), given)))


def test_stacked_weights_are_cast_each_by_itself():
    """Some of them stacked, and a frozen one that all share."""
    one, shared, _ = (x.detach() for x in weights())
    stacked = torch.stack([one, 2 * one])

    def loss(weight):
        with torch.autocast("cpu", torch.bfloat16):
            found = for_products(weight, shared)
        return sum(x.float().square().sum() for x in found)

    found = torch.func.vmap(torch.func.grad(loss))(stacked)
    assert torch.equal(found, torch.stack([torch.func.grad(loss)(x) for x in stacked]))
