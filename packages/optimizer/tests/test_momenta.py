"""Delta and deep momentum: their formulas in fp64, and what is decided beside them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from fusewright.optimizer.matrix.deep_momentum import DeepMomentum, momentum_of, trained
from fusewright.optimizer.matrix.delta_momentum import DeltaMomentum
from fusewright_testkit import Yardstick

from .compared import assert_near

SHAPES = ((6, 10), (6, 10), (7,), (), (4, 3, 2), (0, 4))


@pytest.fixture
def training(training):
    training.shapes = SHAPES
    return training


class EagerDelta:
    """Eq. 48 and 49, one matrix after the other."""

    def __init__(self, ps, lr, alpha, delta, normalize, weight_decay=0.0):
        self.ps, self.ms = ps, [torch.zeros_like(p) for p in ps]
        self.lr, self.alpha, self.delta = lr, alpha, delta
        self.normalize, self.weight_decay = normalize, weight_decay

    @torch.no_grad()
    def step(self):
        for number, p in enumerate(self.ps):
            if p.numel():
                rows = p.shape[0] if p.dim() > 1 else 1
                m, g = (x.reshape(rows, -1) for x in (self.ms[number], p.grad))
                k = g / g.square().sum().sqrt() if self.normalize else g
                kept = self.alpha * torch.eye(g.shape[1]).to(g) - self.delta * k.T @ k
                self.ms[number] = (m @ kept - self.lr * g).reshape(p.shape)
                p.copy_(p - self.lr * self.weight_decay * p + self.ms[number])


@pytest.mark.parametrize(
    "options",
    [
        dict(alpha=0.9, delta=1.0, normalize=True),
        dict(alpha=0.5, delta=1.5, normalize=True, weight_decay=0.2),
        dict(alpha=0.9, delta=1.0, normalize=False),
    ],
    ids=["normalized", "beyond-one", "paper"],
)
def test_delta_momentum_is_as_near_to_fp64_as_its_formula(training, device, options):
    tensors = [p.detach() for p in training.parameters(device=device)]

    def run(make, *tensors):
        ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        # Gradients so small that the paper's own form is stable.
        training.run(functools.partial(make, lr=0.1, **options), ps, 4, scale=0.1)
        return tuple(p.detach() for p in ps)

    eager, ours = (functools.partial(run, maker) for maker in (EagerDelta, DeltaMomentum))
    Yardstick(eager, tensors, [None] * len(tensors)).check(ours)


def test_delta_momentum_without_delta_is_torchs_momentum(training, device):
    ps, twin = (training.parameters(device=device) for _ in range(2))
    training.run(DeltaMomentum, ps, lr=0.1, alpha=0.8, delta=0.0)
    training.run(torch.optim.SGD, twin, lr=0.1, momentum=0.8)
    assert_near(ps, twin)


def test_delta_momentum_forgets_along_the_gradient_alone(device):
    """What momentum holds across the new gradient stays, up to alpha."""
    p = torch.nn.Parameter(torch.zeros(2, 4, device=device))
    optimizer = DeltaMomentum([p], lr=1.0, alpha=0.5, delta=0.5)
    first, second = torch.zeros_like(p), torch.zeros_like(p)
    first[0, :2] = torch.tensor([3.0, 4.0])
    second[1, 0] = 7.0
    for g in (first, second):
        p.grad = g
        optimizer.step()
    found = optimizer.state[p]["momentum_buffer"]
    # 3 lies along the second gradient's row, 4 across.
    assert found.tolist() == [[0.0, -2.0, 0.0, 0.0], [-7.0, 0.0, 0.0, 0.0]]


def test_delta_momentum_is_stable_for_gradients_of_any_size(device):
    """With a gradient that stays, its own part of momentum converges to lr g / (1 - alpha + delta),
    where the paper's form grows without bound.
    """
    g = 30.0 * torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).to(device)
    found = {}
    for normalize in (True, False):
        p = torch.nn.Parameter(torch.zeros_like(g))
        optimizer = DeltaMomentum([p], lr=0.1, normalize=normalize)
        for _ in range(12):
            p.grad = g
            optimizer.step()
        found[normalize] = optimizer.state[p]["momentum_buffer"]
    torch.testing.assert_close(found[True], -0.1 * g / 1.1)
    assert not found[False].abs().max() < 1e6


def inner_loss(w1, w2, u, objective):
    said = torch.tanh(u @ w1.T) @ w2.T / math.sqrt(w1.shape[0])
    if objective == "dot":
        return (said * u).sum(-1).mean()
    return 0.5 * (said + u).square().sum(-1).mean()


@pytest.mark.parametrize("objective", ["dot", "regression"])
def test_inner_gradient_is_autograds(objective):
    generator = torch.Generator().manual_seed(0)
    shapes = (9, 5), (4, 5), (5, 4), (4, 5)
    u, w1, w2, start = (
        torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    group = dict(alpha=0.7, inner_lr=0.3, objective=objective)
    found = trained(u, w1, w2, start, group)
    for number in range(2):
        weights = w1[number], w2[number]
        gradients = torch.func.grad(inner_loss, (0, 1))(*weights, u[number], objective)
        expected1 = start[number] + 0.7 * (w1 - start)[number] - 0.3 * gradients[0]
        torch.testing.assert_close(found[0][number], expected1)
        torch.testing.assert_close(found[1][number], 0.7 * w2[number] - 0.3 * gradients[1])


class EagerDeep:
    """Eq. 50 with autograd for the inner gradient, one parameter after the other."""

    def __init__(self, ps, starts, lr, alpha=0.9, objective="dot", weight_decay=0.0):
        self.ps, self.lr, self.alpha, self.objective = ps, lr, alpha, objective
        self.weight_decay = weight_decay
        self.starts = [x.to(p.dtype) for x, p in zip(starts, ps, strict=True)]
        self.weights = [(x, torch.zeros_like(x.T)) for x in self.starts]

    @torch.no_grad()
    def step(self):
        for number, p in enumerate(self.ps):
            if p.numel():
                g = p.grad.flatten(1) if p.dim() > 1 else p.grad.reshape(-1, 1)
                r = g.square().mean().sqrt()
                with torch.enable_grad():
                    w1, w2 = (w.clone().requires_grad_() for w in self.weights[number])
                    loss = inner_loss(w1, w2, g / r, self.objective)
                    d1, d2 = torch.autograd.grad(loss, (w1, w2))
                start = self.starts[number]
                w1 = start + self.alpha * (w1 - start) - (1 - self.alpha) * d1
                w2 = self.alpha * w2 - (1 - self.alpha) * d2
                self.weights[number] = w1.detach(), w2.detach()
                said = torch.tanh(g / r @ w1.T) @ w2.T / math.sqrt(w1.shape[0])
                p.mul_(1 - self.lr * self.weight_decay).add_((self.lr * r * said).view_as(p))


@pytest.mark.parametrize("objective", ["dot", "regression"])
def test_deep_momentum_is_as_near_to_fp64_as_its_formula(training, device, objective):
    tensors = [p.detach() for p in training.parameters(device=device)]
    options = dict(lr=0.5, alpha=0.8, objective=objective, weight_decay=0.1)
    ours = functools.partial(DeepMomentum, hidden=5, seed=3, **options)
    probe = training.run(ours, training.parameters(device=device), 1)
    starts = [state["w1_start"].clone() for state in probe.state.values()]
    assert not torch.equal(starts[0], starts[1])

    def run(make, *tensors):
        ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        training.run(make, ps, 4)
        return tuple(p.detach() for p in ps)

    eager = functools.partial(run, functools.partial(EagerDeep, starts=starts, **options))
    Yardstick(eager, tensors, [None] * len(tensors)).check(functools.partial(run, ours))


def test_deep_momentum_momentum_ofs_opposite_gradients_with_opposite_steps(device):
    generator = torch.Generator().manual_seed(0)
    u, w1, w2 = (torch.randn(*s, generator=generator) for s in ((1, 9, 5), (1, 4, 5), (1, 5, 4)))
    assert torch.equal(momentum_of(-u, w1, w2), -momentum_of(u, w1, w2))


def test_deep_momentum_steps_as_far_as_gradients_are_large(training, device):
    """But not with an orthogonal output, which has a length of its own."""
    for orthogonal, ratio in ((False, 2.0**-10), (True, 1.0)):
        moves = []
        for scale in (1.0, 2.0**-10):
            ps = training.parameters(device=device)[:2]
            for p in ps:
                p.data.zero_()
            training.run(DeepMomentum, ps, 3, scale=scale, orthogonal=orthogonal)
            moves.append(torch.cat([p.detach().flatten() for p in ps]))
        torch.testing.assert_close(moves[1], ratio * moves[0])
