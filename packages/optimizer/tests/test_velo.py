"""VeLO against its published formulas, in fp64, its kernels against the reference, and what the
tensors of one step see of each other.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from fusewright.optimizer.common.statistics.reference import (
    advanced,
    element_features,
    new_statistics,
)
from fusewright.optimizer.velo.reference import start_decays
from fusewright.optimizer.velo.velo import VeLO
from fusewright.optimizer.velo.velo_networks import VeLONetworks

from .compared import assert_near
from .published import SHAPES, STARTS, Published, spelled

STEPS = 4


def loss_at(step: int) -> float:
    """Falling, with one that is too high."""
    return 30.0 if step == 2 else 4.0 / (1 + step)


class PublishedTensor(Published):
    """One tensor of HyperV2."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__([np.array(some) for some in STARTS], velo=True)
        self.m, self.v = np.zeros((*shape, 3)), np.zeros((*shape, 1))

    def of_tensor(self, x: np.ndarray, progress: np.ndarray, losses: np.ndarray) -> np.ndarray:
        axes = tuple(range(x.ndim))
        n = 1 / np.sqrt(max(np.mean(x**2), 1e-9))
        m, v = self.m * n, self.v * n
        mean_m = m.mean(axes, keepdims=True)

        def size(value):
            return np.clip(np.log(1e-8 + np.abs(value * 10)), -5, 5) * 0.5

        rank = sum(length > 1 for length in x.shape)
        inputs = {
            "fraction_left": progress,
            "loss_features": losses,
            "var_m": size(((m - mean_m) ** 2).mean(axes)),
            "mean_rms": size(v.mean(axes)),
            # Around the means of m.
            "var_rms": size(((v - mean_m) ** 2).mean(axes)),
            "rank": np.eye(5)[rank],
        }
        return np.concatenate([inputs[name] for name in sorted(inputs)])

    def step(self, x, g, layers: list[np.ndarray], a: float, mult) -> np.ndarray:
        f = self.normalised(x, g)
        w1, b1, w2, b2, w3, b3 = layers
        h = np.maximum(f @ w1.T + b1, 0)
        h = np.maximum(h @ w2.T + b2, 0)
        direction, magnitude, _ = np.moveaxis(h @ w3.T + b3, -1, 0)
        scale = np.sqrt(np.mean(x**2) + 1e-9)
        return a * direction * (scale * np.exp(magnitude * mult[0])) * mult[1]


class PublishedTraining:
    """All tensors of a training: the losses' means, the LSTM, the mixing and the steps."""

    def __init__(self, networks: VeLONetworks, shapes, num_steps: int) -> None:
        self.weights = {
            name: x.detach().double().numpy() for name, x in networks.named_parameters()
        }
        self.mult = networks.exp_mult, networks.step_mult
        self.tensors = [PublishedTensor(shape) for shape in shapes]
        self.h, self.c = (np.stack([x] * len(shapes)) for x in self.weights["start"])
        self.decays = np.exp(-1 / np.logspace(1, np.log10(num_steps), 10))
        self.means, self.lowest = np.zeros(10), np.full(10, 999999999999.0)
        self.t, self.num_steps = 0, num_steps

    def losses(self, loss: float) -> np.ndarray:
        corrected = self.means / (1 - self.decays ** (self.t + 1))
        bound = 2 * abs(loss if self.t == 0 else corrected.max())
        self.means = self.means * self.decays + min(bound, loss) * (1 - self.decays)
        corrected = self.means / (1 - self.decays ** (self.t + 1))
        self.lowest = np.minimum(self.lowest, corrected)
        if self.t + 1 <= 2:
            return np.zeros(9)
        room = np.maximum(1e-8, corrected[1:] - self.lowest[:-1])
        return np.clip((corrected[:-1] - self.lowest[:-1]) / room - 1, -1, 1)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def step(self, xs, gs, loss: float, lr: float, decay: float) -> list[np.ndarray]:
        loss = loss + decay * sum(np.sum(x**2) for x in xs)
        gs = [np.clip(g + decay * x, -1000, 1000) for x, g in zip(xs, gs, strict=True)]
        losses = self.losses(loss)
        taus = np.array([0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1])
        progress = np.tanh((self.t / self.num_steps - taus) * 10)
        seen = np.stack(
            [one.of_tensor(x, progress, losses) for one, x in zip(self.tensors, xs, strict=True)]
        )
        u = self.linear("own", seen) + np.maximum(self.linear("pooled", seen), 0).max(0)
        w = self.weights
        gates = u @ w["lstm.weight_ih"].T + w["lstm.bias_ih"]
        gates += self.h @ w["lstm.weight_hh"].T + w["lstm.bias_hh"]
        i, f, g, o = np.split(gates, 4, 1)

        def opened(x):
            return 1 / (1 + np.exp(-x))

        self.c = opened(f) * self.c + opened(i) * np.tanh(g)
        self.h = opened(o) * np.tanh(self.c)
        controls, a = self.linear("controls", self.h), self.linear("multiplier", self.h)[:, 0]
        found = []
        for place, (one, x, g) in enumerate(zip(self.tensors, xs, gs, strict=True)):
            bank = [w[name] for name in ("w1", "b1", "w2", "b2", "w3", "b3")]
            layers = [100 * np.tensordot(controls[place], x, 1) / len(x) for x in bank]
            found.append(x - lr * one.step(x, g, layers, a[place], self.mult))
        self.t += 1
        return found


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=spelled)
def test_element_features_are_those_of_the_published_definition(learned, shape):
    published = PublishedTensor(shape)
    p = learned.drawn([shape])[0].double()
    kept = new_statistics(p)
    for step in range(3):
        g = 2.0 * learned.gradient(p, step)
        kept = advanced(kept, g, start_decays(p.device))
        expected = torch.from_numpy(published.features(p.numpy(), g.numpy()))
        assert_near([element_features(p, g, kept, velo=True)], [expected])


@pytest.mark.parametrize("num_steps", [1, 7, 40])
def test_reference_steps_are_the_published_ones(learned, num_steps):
    networks = learned.velo_networks().double()
    ps = [torch.nn.Parameter(x.double()) for x in learned.drawn(SHAPES)]
    optimizer = VeLO(ps, networks, num_steps, lr=0.05, weight_decay=0.01)
    expected = [p.detach().numpy().copy() for p in ps[:-1]]
    published = PublishedTraining(networks, SHAPES[:-1], num_steps)
    for step in range(STEPS):
        # The same for both: what one of them rounded must not choose it.
        given = [learned.gradient(torch.as_tensor(x), step) for x in expected]
        for p, g in zip(ps, [*given, torch.zeros_like(ps[-1])], strict=True):
            p.grad = g
        gs = [g.numpy() for g in given]
        expected = published.step(expected, gs, loss_at(step), 0.05, 0.01)
        optimizer.step(loss_at(step))
    for p, x in zip(ps, expected, strict=False):
        assert_near([p], [torch.as_tensor(x)])
    assert optimizer.losses.step.item() == STEPS


def stepped(learned, networks, backend, tensors, steps=STEPS, **options):
    """Parameters after some steps."""
    ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
    used = networks.double() if ps[0].dtype == torch.float64 else networks.float()
    optimizer = VeLO(ps, used, 20, lr=0.2, backend=backend, **options)
    for step in range(steps):
        for p, x in zip(ps, tensors, strict=True):
            # The same for every backend: a rounded parameter must not choose it.
            p.grad = learned.gradient(x, step).to(p.dtype)
        optimizer.step(loss_at(step))
    return tuple(p.detach() for p in ps)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_gradients_of_any_size_are_served(learned, backend, device, scale):
    networks = learned.velo_networks(device)
    (p,) = (torch.nn.Parameter(x) for x in learned.drawn([(3, 40)], device))
    optimizer = VeLO([p], networks, 20, lr=0.01, backend=backend)
    for _ in range(2):
        p.grad = scale * torch.cos(40 * p.detach())
        optimizer.step(1.0)
    assert p.isfinite().all()
    # Within 1000 of zero, of which a tenth is in the first momentum.
    most = optimizer.state[p]["momenta"].abs().max().item()
    assert most == pytest.approx(min(scale, 1000.0) * 0.19, rel=0.1)


def test_moments_keep_a_small_variance_beside_a_large_mean(learned, backend, device):
    networks = learned.velo_networks(device)
    p = torch.nn.Parameter(torch.ones(64, 8, device=device))
    optimizer = VeLO([p], networks, 20, backend=backend)
    # What is left of the variance in fp32 sums of squares is noise.
    spread = torch.linspace(-1.0, 1.0, 512, device=device).view(64, 8)
    p.grad = 900.0 + 0.05 * spread
    optimizer.step(1.0)
    m = optimizer.state[p]["momenta"].double()
    expected = m.flatten(1).var(1, correction=0)
    (part, _), *_ = optimizer._parts
    p.grad = torch.zeros_like(p)
    moments = []
    advance = part.advance
    part.advance = lambda step: moments.append(advance(step)) or moments[-1]
    optimizer.step(1.0)
    # A mean of 512 numbers that is off by its roundings adds its square to the variance.
    eps = torch.finfo(torch.float32).eps
    off = 10 * eps * m.abs().amax()
    assert ((moments[0].var_m[0] - expected).abs() <= off.square() + 2**6 * eps * expected).all()


def test_tensors_see_the_highest_of_all_tensors(learned, backend, device):
    networks = learned.velo_networks(device)
    tensors = learned.drawn([(3, 4), (5,)], device)
    together = stepped(learned, networks, backend, tensors, steps=2)
    alone = stepped(learned, networks, backend, tensors[:1], steps=2)
    assert not torch.equal(together[0], alone[0])
    with torch.no_grad():
        networks.pooled.weight.zero_()
        networks.pooled.bias.fill_(-1.0)
    together = stepped(learned, networks, backend, tensors, steps=2)
    alone = stepped(learned, networks, backend, tensors[:1], steps=2)
    assert_near([together[0]], [alone[0]])


def test_parameters_of_several_dtypes_and_groups_move_in_one_step(learned, backend, device):
    """Narrow ones as those of fp32 that begin where they do, rounded once."""
    networks = learned.velo_networks(device)
    (x,) = learned.drawn([(6, 4)], device)
    narrow = [torch.nn.Parameter(x.to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    still = torch.nn.Parameter(x.clone())
    zero = torch.zeros((), device=device)
    groups = [
        {"params": narrow + wide},
        {"params": [still], "lr": zero, "weight_decay": zero},
    ]
    optimizer = VeLO(groups, networks, 20, lr=0.2, max_grad_norm=1.0, backend=backend)
    ps = [*narrow, *wide, still]
    for p in ps:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in ps]
    optimizer.step(1.0)
    fp32 = torch.finfo(torch.float32).eps
    norm = math.sqrt(sum(p.numel() for p in ps))
    assert abs(optimizer.grad_norm.item() - norm) <= fp32 * norm
    for p, q, start in zip(narrow, wide, before, strict=False):
        assert (p != start).any()
        # Within half a unit to either side, or a whole one towards zero where the interpreter cuts
        # bf16 off; and what rounds q, in a sum and a product.
        unit = torch.finfo(p.dtype).eps
        cut = backend == "triton" and device == "cpu" and p.dtype == torch.bfloat16
        below, above = (unit, 0.0) if cut else (unit / 2, unit / 2)
        grown = (p.float() - q) / q
        assert ((-below - 2 * fp32 <= grown) & (grown <= above + 2 * fp32)).all()
    assert torch.equal(still, x)


def test_networks_are_read_as_they_are(learned, backend, device):
    networks = learned.velo_networks(device)
    p = torch.nn.Parameter(learned.drawn([(3, 4)], device)[0])
    optimizer = VeLO([p], networks, 20, backend=backend)
    p.grad = torch.ones_like(p)
    optimizer.step(1.0)
    before = copy.deepcopy(p)
    with torch.no_grad():
        networks.multiplier.weight.zero_()
        networks.multiplier.bias.zero_()
    optimizer.step(1.0)
    assert torch.equal(p, before)
