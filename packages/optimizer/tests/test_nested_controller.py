"""NestedController: its start, its formula, what is not finite, and gradients."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from fusewright.optimizer.nested.nested_controller import NestedController
from fusewright.optimizer.nested.reference import HIGHEST, LOWEST, START

F64 = torch.float64


def drawn(scale=1.0, **options):
    """One whose last layer is trained."""
    torch.manual_seed(5)
    controller = NestedController(**{"dtype": F64} | options)
    with torch.no_grad():
        controller.layers[-1].weight.normal_(0.0, scale)
        controller.layers[-1].bias.normal_()
    return controller


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("features", ["log", "raw"])
def test_multipliers_are_exactly_one_at_the_start(features, dtype):
    controller = NestedController(features=features, dtype=dtype)
    statistics = torch.rand(50, 3, dtype=dtype) * 1e4
    assert torch.equal(controller(statistics), torch.ones(50, dtype=dtype))
    # As the formula about the origin has it.
    assert 0.1 + 1.9 / (1.0 + math.exp(-START)) == pytest.approx(
        1.0, abs=4 * sys.float_info.epsilon
    )


@pytest.mark.parametrize("features", ["log", "raw"])
@pytest.mark.parametrize("layers", [1, 3])
def test_multipliers_are_those_of_the_plain_formula(features, layers):
    controller = drawn(layers=layers, features=features)
    statistics = torch.rand(20, 3, dtype=F64) * 5
    found = controller(statistics)
    for row, m in zip(statistics, found, strict=True):
        g, p, depth = row.tolist()
        if features == "log":
            g, p = math.log(1 + g), math.log(1 + p)
        x = torch.tensor([g, p, depth], dtype=F64)
        for layer in controller.layers[:-1]:
            x = torch.clamp(layer.weight @ x + layer.bias, min=0.0)
        out = (controller.layers[-1].weight @ x + controller.layers[-1].bias).item()
        assert m.item() == pytest.approx(
            0.1 + 1.9 / (1 + math.exp(-out)), rel=2**8 * sys.float_info.epsilon
        )


def test_multipliers_stay_within_their_bounds():
    controller = drawn(scale=1e6)
    found = controller(torch.rand(100, 3, dtype=F64) * 1e3)
    assert set(found.tolist()) <= {LOWEST, HIGHEST}
    assert found.unique().numel() == 1 or found.min() < found.max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (1, 1), (2, 2)])
def test_one_bad_statistic_makes_all_multipliers_one(bad, place):
    controller = drawn()
    statistics = torch.rand(3, 3, dtype=F64)
    assert not (controller(statistics) == 1.0).any()
    statistics[place] = bad
    found = controller(statistics)
    assert found.tolist() == [1.0, 1.0, 1.0]
    found.sum().backward()
    assert all((w.grad == 0.0).all() for w in controller.parameters())


def test_one_bad_output_is_one_alone():
    controller = drawn(features="raw", hidden=2, layers=1)
    with torch.no_grad():
        controller.layers[0].weight.fill_(1.0)
        controller.layers[1].weight.copy_(torch.tensor([[1.0, -1.0]]))
    statistics = torch.tensor([[1.0, 1.0, 0.0], [1.7e308, 1.7e308, 0.0]], dtype=F64)
    found = controller(statistics)
    assert found[1].item() == 1.0
    assert found[0].item() != 1.0


def test_gradients_are_those_of_differences():
    controller = drawn(hidden=4)
    statistics = torch.rand(3, 3, dtype=F64)
    names = [name for name, _ in controller.named_parameters()]
    weights = [p.detach().clone().requires_grad_() for p in controller.parameters()]

    def run(*some):
        return torch.func.functional_call(
            controller, dict(zip(names, some, strict=True)), (statistics,)
        )

    assert torch.autograd.gradcheck(run, weights)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 1)])
def test_statistics_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="must have shape"):
        NestedController()(torch.ones(shape))
