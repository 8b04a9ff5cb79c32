"""The example that works with TorchOpt: implicit gradients are the unrolled ones, and the
functional optimizers stand where TorchOpt's do.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fusewright.optimizer import FunctionalAdamW, FunctionalLearnedOptimizer

from .compared import assert_near

EXAMPLE = Path(__file__).parents[1] / "examples/torchopt_implicit.py"
# functorch's old name, which TorchOpt calls.
pytestmark = pytest.mark.filterwarnings("ignore:We've integrated functorch:FutureWarning")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torchopt_implicit", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hypergradient(example, solver, **options):
    start, data, other = example.problem()
    strength = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    p = solver(start.requires_grad_(), strength, data, **options)
    return torch.autograd.grad(example.error(p, other), strength)[0].item()


def left(example, steps):
    """The share of the first step's gradient that is left after so many."""
    start, data, _ = example.problem()
    strength = torch.tensor(-1.0, dtype=torch.float64)
    end = example.unrolled(start, strength, data, steps=steps)
    norms = [example.optimality(p, strength, data).norm() for p in (end, start)]
    return (norms[0] / norms[1]).item()


def test_implicit_gradient_at_convergence_is_the_unrolled_one(example):
    # Steps that contract by rho leave rho^T of the parameters' error, and T rho^T of that of their
    # derivative; under it lies what T steps round.
    steps = 400
    allowed = steps * (left(example, steps) + torch.finfo(torch.float64).eps)
    # So small that it tells a wrong gradient from the right one.
    assert allowed < 2**13 * torch.finfo(torch.float64).eps
    implicit = hypergradient(example, example.implicit)
    unrolled = hypergradient(example, example.unrolled, steps=steps)
    assert abs(implicit - unrolled) <= allowed * abs(implicit)


def test_unrolled_gradient_nears_the_implicit_one_as_the_training_converges(example):
    implicit = hypergradient(example, example.implicit)
    errors = [
        abs(hypergradient(example, example.unrolled, steps=steps) / implicit - 1.0)
        for steps in (20, 50, 100)
    ]
    assert errors[0] > 0.5
    assert errors[1] < 0.2
    for steps, found in zip((20, 50, 100), errors, strict=True):
        assert found <= steps * left(example, steps)


def test_implicit_gradient_is_the_known_one_of_ridge_regression(example):
    """-exp(s) (H^-1 p) . dL/dp, H the objective's second derivative."""
    start, (x, y), (other, truth) = example.problem()
    strength = torch.tensor(-1.0, dtype=torch.float64).exp()
    second = x.mT @ x / len(x) + strength * torch.eye(len(start), dtype=torch.float64)
    p = torch.linalg.solve(second, x.mT @ y / len(x))
    slope = other.mT @ (other @ p - truth) / len(other)
    expected = -strength * torch.linalg.solve(second, p) @ slope
    assert hypergradient(example, example.implicit) == pytest.approx(
        expected.item(), rel=2**8 * torch.finfo(torch.float64).eps
    )


def trained(optimizer, loss, p):
    """With TorchOpt's own loop."""
    import torchopt

    wrapped = torchopt.FuncOptimizer(optimizer)
    for _ in range(4):
        (p,) = wrapped.step(loss(p), (p,))
    return p


def test_adamw_stands_where_that_of_torchopt_does(example):
    import torchopt

    def loss(p):
        return (torch.sin(p) - 0.3).square().sum()

    start = torch.randn(6, dtype=torch.float64, requires_grad=True)
    options = dict(lr=0.05, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    ours = trained(example.as_torchopt(FunctionalAdamW(**options)), loss, start)
    theirs = trained(torchopt.adamw(**options), loss, start)
    # TorchOpt has 1 - beta^t in fp32: in the first step, a step of lr, off by eps / (1 - 0.95).
    allowed = 4 * 0.05 * torch.finfo(torch.float32).eps / (1.0 - 0.95)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=allowed)
    slopes = [torch.autograd.grad(loss(p), start)[0] for p in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=0.0, atol=10 * allowed)


def test_meta_gradient_reaches_the_network_through_torchopts_loop(example, learned):
    def loss(p):
        return (torch.sin(p) - 0.3).square().sum()

    start = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mlp = learned.network().double().requires_grad_()
    optimizer = FunctionalLearnedOptimizer(mlp, lr=0.1)
    theirs = loss(trained(example.as_torchopt(optimizer), loss, start))
    p, state = start, optimizer.init(start)
    for _ in range(4):
        (gradient,) = torch.autograd.grad(loss(p), p, create_graph=True)
        updates, state = optimizer.update(gradient, state, p)
        p = optimizer.apply(p, updates)
    weights = list(mlp.parameters())
    expected, found = (torch.autograd.grad(x, weights) for x in (loss(p), theirs))
    assert all(x.abs().max() > 0 for x in expected)
    assert_near(found, expected)


def test_step_in_place_is_refused(example):
    optimizer = example.as_torchopt(FunctionalAdamW())
    p = torch.ones(2)
    with pytest.raises(ValueError, match="inplace must be False"):
        optimizer.update(p, optimizer.init(p), params=p, inplace=True)
