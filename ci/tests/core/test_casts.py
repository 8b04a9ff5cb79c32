"""The weights of a layer in the dtype of its products."""

from __future__ import annotations

import pytest
import torch
from fusewright.example._core import casts
from fusewright.example._core.casts import for_products
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

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


def drawn(numels, dtype, device):
    """Some of whose elements are the greatest, the smallest and strange ones."""
    torch.manual_seed(0)
    tensors = [torch.randn(numel, device=device) for numel in numels]
    # The interpreter has no subnormal bf16.
    tiny = 1e-40 if device == "cuda" else 1e-30
    strange = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, tiny, -0.0])
    for x in tensors:
        x[: len(strange)] = strange[: len(x)].to(device)
    return [x.to(dtype) for x in tensors]


def check_kernel(numels, dtypes, device):
    for dtype, result in dtypes:
        given = drawn(numels, dtype, device)
        # Beside them nothing is written.
        room = [torch.zeros(x.numel() + 8, dtype=result, device=device) for x in given]
        casts.cast_by_kernel(given, [y[: x.numel()] for x, y in zip(given, room, strict=True)])
        for x, y in zip(given, room, strict=True):
            torch.testing.assert_close(y[:-8], x.to(result), rtol=0, atol=0, equal_nan=True)
            assert not y[-8:].any()


NUMELS = (1, 4096, 4097, 3, 9000, 16), (5,), tuple(range(1, 14))
WIDER = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
NARROWER = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]


@pytest.mark.parametrize("numels", NUMELS, ids=len)
def test_kernel_casts_as_torch(numels):
    # The interpreter does not round to bf16 as the GPU does.
    check_kernel(numels, [*WIDER, (torch.float32, torch.float16)], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("numels", NUMELS, ids=len)
def test_kernel_casts_as_torch_on_a_gpu(numels):
    check_kernel(numels, WIDER + NARROWER, "cuda")


def test_memory_is_read_of_tensors_alone_that_are_what_it_holds():
    x, other = torch.randn(4, 3), torch.randn(5)
    assert casts.takes([x, other])
    assert not casts.takes([x, torch._neg_view(other)])
    assert not casts.takes([x.t(), other])
    assert not casts.takes([x[:0], other])
    with FakeTensorMode() as mode:
        assert not casts.takes([mode.from_tensor(x)])
    taken = []

    def ask(x):
        taken.append(casts.takes([x]))
        return x

    make_fx(ask)(x)
    torch.func.functionalize(ask)(x)
    torch.func.vmap(ask)(x)
    assert taken == [False, False, False]


@pytest.mark.gpu
def test_weights_are_cast_by_the_kernel(monkeypatch):
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    given = [torch.randn(shape, device="cuda", requires_grad=True) for shape in SHAPES]
    with torch.autocast("cuda", torch.bfloat16):
        found = for_products(*given)
    cotangents = [torch.randn(shape, device="cuda").bfloat16() for shape in SHAPES]
    grads = torch.autograd.grad(found, given, cotangents)
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(found, given, strict=True))
    assert all(torch.equal(x, y.float()) for x, y in zip(grads, cotangents, strict=True))
