"""Momenta at several frequencies beside an eager form with branches; and that what is known to go
wrong with such levels does not: frequencies are those given, sums are averaged by them, state is
what is used, training sees the gradient.
"""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.optimizer.nested.continuum import SAMPLED_ELEMENTS, Continuum
from fusewright.optimizer.nested.continuum_networks import ElementNetwork, ScalarNetwork, log_sign
from fusewright.optimizer.nested.deep_nested_optimizer import DeepNestedOptimizer

from .compared import assert_near
from .nested import INF, NAN, Eager, assert_followed, give, model, optimizer_of

EPS = torch.finfo(torch.float32).eps

F64 = torch.float64


class EagerContinuum(Eager):
    """One parameter, level and branch after the other."""

    def __init__(self, some, optimizer):
        super().__init__(some, optimizer)
        continuum = optimizer._mode.continuum
        self.frequencies = continuum.frequencies
        self.elementwise = continuum.trainer is not None
        self.network = type(continuum.network)(64, 2, dtype=F64)
        self.network.load_state_dict(continuum.network.state_dict())
        if self.elementwise:
            self.adam = torch.optim.Adam(self.network.parameters(), 1e-3)
        self.before = {}

    def state_of(self, p):
        zeros = lambda: [torch.zeros_like(p) for _ in self.frequencies]  # noqa: E731
        return self.states.setdefault(p, {"sum": zeros(), "momentum": zeros()})

    @torch.no_grad()
    def move(self, factor, loss):
        ps = [p for group in self.groups for p in group["params"]]
        firing = []
        for level, f in enumerate(self.frequencies):
            for p in ps:
                self.state_of(p)["sum"][level] += p.grad * factor
            if self.t % f == 0:
                firing.append(level)
                for p in ps:
                    state = self.state_of(p)
                    state.setdefault("mean", {})[level] = state["sum"][level] / f
                    state["sum"][level] = torch.zeros_like(p)
        if not firing:
            return
        first = self.frequencies[0]
        if self.elementwise and firing[0] == 0 and self.t // first % 5 == 0:
            self.train(ps)
        for group, m in zip(self.groups, self.multipliers, strict=True):
            for p in group["params"]:
                state, total, count = self.state_of(p), torch.zeros_like(p), 0
                for level in firing:
                    g, old = state["mean"][level], state["momentum"][level]
                    u, new = self.update(g, old, group["lr"], loss)
                    most = 100.0 * max(g.norm().item(), 1e-8)
                    new = new * min(1.0, most / new.norm().item()) if new.norm() > 0.0 else new
                    if not self.elementwise:
                        u = new * (1.0 - self.damping)
                    if not (u.isfinite().all() and new.isfinite().all()):
                        continue
                    state["momentum"][level] = new
                    total, count = total + u, count + 1
                if count and total.isfinite().all():
                    total = total / math.sqrt(count) + group["weight_decay"] * p
                    p.copy_(p - group["lr"] * m * total)

    def update(self, g, m, lr, loss):
        if self.elementwise:
            u = self.network(g.flatten(), m.flatten()).view(g.shape)
            return u, 0.9 * m + 0.1 * u
        row = [m.mean(), m.std(correction=0), m.norm(), g.mean(), g.std(correction=0), g.norm()]
        row = [*(x.item() for x in row), self.t / 1000, lr, math.log(loss + 1)]
        scale, shift, damping = self.network(torch.tensor([row], dtype=F64))
        self.damping = damping.item()
        return None, scale.item() * m + shift.item() * g

    @torch.enable_grad()
    def train(self, ps):
        losses = []
        for p in ps:
            state = self.state_of(p)
            g, m = state["mean"][0].flatten(), state["momentum"][0].flatten()
            u = self.network(g, m)
            loss = 1.0 - torch.cosine_similarity(u, g, dim=0)
            loss = loss + 0.1 * (u.norm() / g.norm() - 1.0) ** 2
            if p in self.before:
                loss = loss + 0.1 * (u - self.before[p]).square().mean()
            self.before[p] = u.detach()
            losses.append(loss)
        self.adam.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.adam.step()


@pytest.mark.sampled
@pytest.mark.parametrize("preprocessing", [True, False], ids=["elements", "scalars"])
@pytest.mark.parametrize("frequencies", [(1, 10, 100), (1, 5, 7), (4, 8), (3,), (2, 1)], ids=str)
def test_step_is_the_one_with_branches(frequencies, preprocessing):
    some = model()
    options = dict(frequencies=frequencies, preprocessing=preprocessing, weight_decay=0.1)
    optimizer = optimizer_of(some, update="continuum", **options)
    torch.manual_seed(9)
    eager = EagerContinuum(some, optimizer)
    assert_followed(some, optimizer, eager)
    assert optimizer.skipped_steps.item() == 6


@pytest.mark.parametrize("preprocessing", [True, False], ids=["elements", "scalars"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_level_that_is_not_finite_gives_nothing_and_keeps_its_momentum(bad, preprocessing):
    some = model()
    options = dict(frequencies=(1, 2), preprocessing=preprocessing)
    optimizer = optimizer_of(some, update="continuum", **options)
    eager = EagerContinuum(some, optimizer)
    pairs = dict(
        zip(
            optimizer._all_parameters(), (p for g in eager.groups for p in g["params"]), strict=True
        )
    )
    hit = some.layers[0].weight

    def poison(step):
        # Before the step at which the second level fires.
        if step == 10:
            optimizer.state[hit]["sum_1"][0, 1] = bad
            eager.states[pairs[hit]]["sum"][1][0, 1] = bad
            optimizer.kept = optimizer.state[hit]["momentum_1"].clone()
        if step == 11:
            assert torch.equal(optimizer.state[hit]["momentum_1"], optimizer.kept)
            assert optimizer.state[hit]["sum_1"].isfinite().all()
        if step == 15:
            assert not torch.equal(optimizer.state[hit]["momentum_1"], optimizer.kept)

    assert_followed(some, optimizer, eager, before=poison)
    for p, q in pairs.items():
        for level in range(2):
            found = optimizer.state[p][f"momentum_{level}"]
            torch.testing.assert_close(found, eager.states[q]["momentum"][level])


def test_parameter_whose_levels_are_all_bad_stays():
    some = model()
    optimizer = optimizer_of(some, update="continuum", frequencies=(2,), weight_decay=0.5)
    optimizer.step(give(some, 1))
    hit, before = some.norm.weight, [p.detach().clone() for p in some.parameters()]
    optimizer.state[hit]["sum_0"][0] = NAN
    assert not optimizer.step(give(some, 2))["skipped"].item()
    for p, was in zip(some.parameters(), before, strict=True):
        assert torch.equal(p, was) == (p is hit)


@pytest.mark.parametrize("frequencies", [(1, 5, 50), (4, 8), (6, 4, 9)], ids=str)
def test_levels_fire_at_the_frequencies_given(frequencies):
    levels = Continuum(frequencies, True, 8, 1)
    for t in range(1, 120):
        expected = [level for level, f in enumerate(frequencies) if t % f == 0]
        assert levels.firing(t) == expected


@pytest.mark.parametrize("f", [1, 3, 8])
def test_level_gets_the_mean_of_the_gradients_since_it_fired(f, monkeypatch):
    p = torch.nn.Parameter(torch.zeros(3, dtype=F64))
    options = dict(update="continuum", frequencies=(f,), max_grad_norm=None, mode="explicit")
    optimizer = DeepNestedOptimizer([("p", p)], **options)
    seen = []
    plain = Continuum._update

    def watched(self, t, means, *some):
        seen.append((t, means[0].clone()))
        return plain(self, t, means, *some)

    monkeypatch.setattr(Continuum, "_update", watched)
    for step in range(1, 2 * f + 1):
        p.grad = torch.full_like(p, float(step))
        optimizer.step(1.0)
    assert [t for t, _ in seen] == [f, 2 * f]
    assert [mean[0].item() for _, mean in seen] == [(f + 1) / 2, (3 * f + 1) / 2]


def test_state_is_of_the_levels_alone():
    some = model(torch.float32)
    optimizer = optimizer_of(some, update="continuum", frequencies=(1, 10))
    optimizer.step(give(some, 1))
    wanted = {"momentum_0", "momentum_1", "sum_1"}
    assert all(set(state) == wanted for state in optimizer.state.values())


def test_training_brings_updates_to_the_gradient():
    """Where an update is trained on gradients of zero it shrinks towards nothing."""
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(200))
    options = dict(update="continuum", frequencies=(1, 10), max_grad_norm=None)
    optimizer = DeepNestedOptimizer([("p", p)], 0.0, **options)
    continuum = optimizer._mode.continuum
    g = torch.randn(200)
    zero = torch.zeros(200)

    def unlike():
        with torch.no_grad():
            u = continuum.network(g, zero)
        return torch.cosine_similarity(u, g, dim=0).item(), (u.norm() / g.norm()).item()

    before = unlike()
    for _ in range(400):
        p.grad = torch.randn(200)
        optimizer.step(1.0)
    cosine, ratio = unlike()
    assert cosine > before[0]
    assert 2.0 * before[1] < ratio < 1.5


def test_training_sees_so_many_elements_and_parameters():
    generator = torch.Generator().manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(6000, generator=generator)) for _ in range(45)]
    named = [(str(k), p) for k, p in enumerate(ps)]
    optimizer = DeepNestedOptimizer(named, update="continuum", frequencies=(1,))
    for _ in range(5):
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step(1.0)
    assert len(optimizer._mode.continuum.previous) == 15 * 3000
    assert SAMPLED_ELEMENTS >= 3000


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("hidden", [2, 20, 64])
def test_element_update_begins_as_a_tenth_of_the_sign(hidden, layers):
    network = ElementNetwork(hidden, layers, dtype=F64)
    assert all(layer.out_features <= 20 for layer in network.layers)
    g = torch.tensor([3.0, -1e-3, 1e-6, -1e-9, 0.0], dtype=F64)
    expected = torch.where(g.abs() > math.exp(-10), g.sign(), g * math.exp(10)) / 10
    found = network(g, torch.randn(5, dtype=F64))
    assert_near([found], [expected])


def test_scalars_begin_at_their_biases():
    network = ScalarNetwork(16, 2, dtype=F64)
    scale, shift, damping = network(torch.randn(4, 9, dtype=F64))
    assert scale.tolist() == pytest.approx([0.5 + 0.49 / (1 + math.exp(-1.5))] * 4)
    assert shift.tolist() == pytest.approx([math.tanh(3.0)] * 4)
    assert damping.tolist() == pytest.approx([1 / (1 + math.exp(5.0))] * 4)


def test_log_sign_is_continuous_and_keeps_nan():
    edge = math.exp(-10)
    g = torch.tensor([edge, -edge, edge * (1 - 1e-12), 1.0, 0.0, NAN, INF], dtype=F64)
    size, sign = log_sign(g)
    assert size[:5].tolist() == pytest.approx([-1.0, -1.0, -1.0, 0.0, -1.0])
    assert sign[:5].tolist() == pytest.approx([1.0, -1.0, 1.0, 1.0, 0.0])
    assert sign[5].isnan()
    assert size[6].isinf()


def test_momentum_is_held_to_a_hundred_gradients():
    some = model()
    optimizer = optimizer_of(some, update="continuum", frequencies=(1,), preprocessing=False)
    for step in (1, 2):
        optimizer.step(give(some, step))
    for p in some.parameters():
        optimizer.state[p]["momentum_0"].mul_(1e9)
    optimizer.step(give(some, 4))
    for p in some.parameters():
        held = optimizer.state[p]["momentum_0"].norm() / p.grad.norm()
        factor = 1.0 / optimizer.grad_norm.item()
        assert held.item() == pytest.approx(100.0 * min(1.0, factor), rel=16 * EPS)


def test_empty_and_narrow_parameters_are_served():
    ps = [torch.nn.Parameter(torch.ones(shape).bfloat16()) for shape in ((0, 3), (), (2, 3))]
    optimizer = DeepNestedOptimizer(
        [(str(k), p) for k, p in enumerate(ps)], 0.1, update="continuum", frequencies=(1, 2)
    )
    for _ in range(6):
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step(1.0)
    assert optimizer.state[ps[2]]["momentum_0"].dtype == torch.float32
    assert ps[2].dtype == torch.bfloat16
    assert (ps[2] < 1.0).all()
    assert (ps[1] < 1.0).all()
