"""AdamW as functions: its values, and gradients through its steps."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer import FunctionalAdamW

from .compared import assert_near

double = torch.float64


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=double)


@pytest.mark.parametrize("maximize", [False, True])
def test_steps_are_those_of_torch(maximize):
    options = dict(lr=0.03, betas=(0.8, 0.95), weight_decay=0.2, maximize=maximize)
    params = {"weight": draw(4, 3), "layers": [draw(5), draw(())]}
    leaves = [params["weight"], *params["layers"]]
    twin = [torch.nn.Parameter(x.clone()) for x in leaves]
    theirs, ours = torch.optim.AdamW(twin, foreach=False, **options), FunctionalAdamW(**options)
    state = ours.init(params)
    for step in range(5):
        gradients = [torch.cos(x.detach() * (step + 2)) for x in twin]
        for p, g in zip(twin, gradients, strict=True):
            p.grad = g
        theirs.step()
        tree = {"weight": gradients[0], "layers": gradients[1:]}
        updates, state = ours.update(tree, state, params)
        params = ours.apply(params, updates)
        for p, q in zip([params["weight"], *params["layers"]], twin, strict=True):
            assert_near([p], [q.detach()])
    assert state.step.item() == 5


def unrolled(p, target, lr, decay, beta1, steps=3):
    """A loss after some steps of training with these numbers."""
    optimizer = FunctionalAdamW(lr, (beta1, 0.9), 1e-3, decay)
    state = optimizer.init(p)
    for _ in range(steps):
        gradient = torch.func.grad(lambda p: (torch.sin(p) - target).square().sum())(p)
        updates, state = optimizer.update(gradient, state, p)
        p = optimizer.apply(p, updates)
    return (p - 2.0 * target).square().sum()


def numbers() -> list[torch.Tensor]:
    found = [torch.tensor(x, dtype=double) for x in (0.1, 0.05, 0.7)]
    return [x.requires_grad_() for x in (draw(4), draw(4), *found)]


def test_gradients_through_steps_reach_parameters_targets_and_numbers():
    assert torch.autograd.gradcheck(unrolled, numbers())


def test_second_derivatives_through_steps_are_right():
    assert torch.autograd.gradgradcheck(unrolled, numbers())


def test_transforms_of_torch_func_compose():
    p, target, lr, decay, beta1 = (x.detach() for x in numbers())
    many = torch.stack([p, p + 0.1, p - 0.2])

    def of_row(p):
        return torch.func.grad(unrolled)(p, target, lr, decay, beta1)

    found = torch.func.vmap(of_row)(many)
    torch.testing.assert_close(found, torch.stack([of_row(row) for row in many]))
    _, tangent = torch.func.jvp(
        lambda lr: unrolled(p, target, lr, decay, beta1), (lr,), (torch.ones_like(lr),)
    )
    slope = torch.func.grad(lambda lr: unrolled(p, target, lr, decay, beta1))(lr)
    torch.testing.assert_close(tangent, slope)


def test_gradient_of_zero_has_finite_derivatives():
    optimizer = FunctionalAdamW()
    p, g = draw(3), torch.zeros(3, dtype=double, requires_grad=True)
    updates, _ = optimizer.update(g, optimizer.init(p), p)
    (found,) = torch.autograd.grad(updates.sum(), g)
    # m' / eps: all that is left of the quotient at zero.
    torch.testing.assert_close(found, torch.full_like(p, -1e-3 / 1e-8))


def test_compiles_to_one_graph():
    optimizer = FunctionalAdamW(lr=0.1)
    p, g = draw(7), draw(7)

    def step(p, g):
        updates, state = optimizer.update(g, optimizer.init(p), p)
        return optimizer.apply(p, updates), state.exp_avg_sq

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(p, g), step(p, g)))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr": -1.0}, "lr must be at least 0, got -1.0"), ({"betas": (0.9, 1.0)}, r"betas\[1\]")],
    ids=["lr", "betas"],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FunctionalAdamW(**options).init(torch.ones(2))
