"""The learned optimizer against its published formulas, in fp64, and its contract."""

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
    normalised,
)
from fusewright.optimizer.learned.learned_optimizer import LearnedOptimizer
from fusewright.optimizer.learned.learned_update import UpdateMLP
from fusewright.optimizer.learned.reference import decays_of, time_features
from fusewright_testkit import Yardstick

from .compared import assert_near
from .published import SHAPES, STARTS, Published, spelled


class PublishedUpdate(Published):
    """AdafacMLPLOpt."""

    def __init__(self, mlp: UpdateMLP) -> None:
        self.layers = [x.detach().double().numpy() for x in mlp.weights()]
        self.multipliers = mlp.exp_mult, mlp.step_mult
        decays = []
        for start, offset in zip(STARTS, mlp.offsets(), strict=True):
            coordinate = np.log(1 - np.array(start)) / 10 + offset.detach().double().numpy()
            decays.append(np.clip(1 - np.exp(10 * coordinate), 0, 1))
        super().__init__(decays, velo=False)
        self.t = 0

    def update(self, x: np.ndarray, g: np.ndarray, extra: np.ndarray | None) -> np.ndarray:
        scales = np.array([1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000])
        whole = [
            self.normalised(x, g),
            np.broadcast_to(np.tanh(self.t / scales - 1), (*x.shape, 11)),
        ]
        if extra is not None:
            whole.append(np.broadcast_to(extra, (*x.shape, len(extra))))
        h = np.concatenate(whole, -1)
        w1, b1, w2, b2, w3, b3 = self.layers
        h = np.maximum(h @ w1.T + b1, 0)
        h = np.maximum(h @ w2.T + b2, 0)
        direction, magnitude = np.moveaxis(h @ w3.T + b3, -1, 0)
        self.t += 1
        exp_mult, step_mult = self.multipliers
        return direction * np.exp(magnitude * exp_mult) * step_mult


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=spelled)
def test_features_are_those_of_the_published_definition(learned, shape):
    mlp = learned.network()
    published = PublishedUpdate(mlp)
    p = learned.drawn([shape])[0].double()
    kept = new_statistics(p)
    for step in range(3):
        g = learned.gradient(p, step)
        kept = advanced(kept, g, mlp.decays())
        found = element_features(p, g, kept, velo=False)
        expected = published.features(p.numpy(), g.numpy())
        assert_near([found], [torch.from_numpy(expected)])
        mean = normalised(found).view(-1, 28).square().mean(0)
        square = found.view(-1, 28).square().mean(0)
        torch.testing.assert_close(mean, square / (square + 1e-5))


def test_time_features_are_of_steps_taken_before():
    scales = torch.tensor([1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000]).double()
    for t in (0.0, 1.0, 12345.0):
        found = time_features(torch.tensor(t))
        assert_near([found], [torch.tanh(t / scales - 1.0)], 32)


def test_decays_start_at_the_published_ones_and_stay_within_0_and_1():
    found = torch.cat(UpdateMLP().decays())
    expected = torch.tensor([0.9, 0.99, 0.999, 0.999, 0.9, 0.99, 0.999], dtype=torch.float64)
    assert_near([found], [expected], 32)
    large = [torch.full((n,), 5.0) for n in (3, 1, 3)]
    assert torch.cat(decays_of(*large)).tolist() == [0.0] * 7


@pytest.mark.parametrize("extra", [0, 2])
def test_reference_steps_are_the_published_ones(learned, extra):
    mlp = learned.network(extra).double()
    ps = [torch.nn.Parameter(x.double()) for x in learned.drawn(SHAPES[:-1])]
    published = [PublishedUpdate(mlp) for _ in ps]
    given = torch.tensor([0.3, -2.0], dtype=torch.float64) if extra else None
    options = dict(lr=0.02, weight_decay=0.5)
    optimizer = LearnedOptimizer(ps, mlp, extra_features=given, **options)
    expected = [p.detach().numpy().copy() for p in ps]
    for step in range(4):
        for place, p in enumerate(ps):
            # The same for both: what one of them rounded must not choose it.
            p.grad = learned.gradient(torch.as_tensor(expected[place]), step)
            added = None if given is None else given.numpy()
            update = published[place].update(expected[place], p.grad.numpy(), added)
            expected[place] = (expected[place] - 0.02 * update) * (1 - 0.02 * 0.5)
        optimizer.step()
    for p, x in zip(ps, expected, strict=True):
        assert_near([p], [torch.as_tensor(x)])


def stepped(learned, mlp, backend, tensors, steps=2, **options):
    """Parameters after some steps."""
    ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
    used = mlp.double() if ps[0].dtype == torch.float64 else mlp.float()
    optimizer = LearnedOptimizer(ps, used, lr=0.5, backend=backend, **options)
    for step in range(steps):
        for p, x in zip(ps, tensors, strict=True):
            # The same for every backend: a rounded parameter must not choose it.
            p.grad = learned.gradient(x, step).to(p.dtype)
        optimizer.step()
    return tuple(p.detach() for p in ps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_statistics_are_fp32_and_never_39_times_the_parameters(learned, backend, device, dtype):
    p = torch.nn.Parameter(learned.drawn([(24, 32)])[0].to(device, dtype))
    p.grad = torch.ones_like(p)
    optimizer = LearnedOptimizer([p], learned.network(device=device), backend=backend)
    optimizer.step()
    state = optimizer.state[p]
    assert {x.dtype for x in state.values()} == {torch.float32}
    assert sum(x.numel() for x in state.values()) == 4 * 24 * 32 + 3 * (24 + 32) + 1


def test_clipping_is_a_step_with_smaller_gradients(learned, backend, device):
    mlp = learned.network(device=device)
    tensors = learned.drawn(learned.kinds, device)
    clipped, plain = ([torch.nn.Parameter(x.clone()) for x in tensors] for _ in range(2))
    ours = LearnedOptimizer(clipped, mlp, max_grad_norm=0.3, backend=backend)
    other = LearnedOptimizer(plain, mlp, backend=backend)
    for step in range(2):
        for p, q in zip(clipped, plain, strict=True):
            p.grad, q.grad = learned.gradient(p, step), learned.gradient(q, step)
        norm = torch.nn.utils.clip_grad_norm_(plain, 0.3)
        ours.step()
        other.step()
        torch.testing.assert_close(ours.grad_norm, norm)
        assert_near(clipped, plain)


def test_nan_stays_in_its_own_tensor_where_steps_are_not_skipped(learned, backend, device):
    mlp = learned.network(device=device)
    ps = [torch.nn.Parameter(x.to(device)) for x in learned.drawn([(3, 4), (5,)])]
    for p in ps:
        p.grad = torch.ones_like(p)
    ps[0].grad[0, 0] = math.nan
    LearnedOptimizer(ps, mlp, backend=backend).step()
    assert ps[0].isnan().all()
    assert ps[1].isfinite().all()


def test_groups_have_rates_and_directions_of_their_own(learned, backend, device):
    mlp = learned.network(device=device)
    tensors = learned.drawn([(3, 4)], device)
    rate = torch.tensor(0.25, device=device)
    ps = [torch.nn.Parameter(tensors[0].clone()) for _ in range(3)]
    groups = [{"params": [p]} for p in ps]
    groups[1]["lr"] = rate
    groups[2]["maximize"] = True
    optimizer = LearnedOptimizer(groups, mlp, lr=0.5, backend=backend)
    for p, sign in zip(ps, (1.0, 1.0, -1.0), strict=True):
        p.grad = sign * learned.gradient(p, 0)
    optimizer.step()
    moves = [p.detach() - tensors[0] for p in ps]
    assert_near([moves[1]], [0.5 * moves[0]])
    assert_near([moves[2]], [moves[0]])


def test_extra_features_are_what_the_network_sees_of_each_parameter(learned, backend, device):
    mlp = learned.network(extra=2, device=device)
    tensors = learned.drawn([(3, 4), (5,), ()], device)
    told = [torch.tensor([float(k), -1.0], device=device) for k in range(3)]

    def by_features(*tensors):
        ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        numbers = dict(zip(ps, told, strict=True))
        optimizer = LearnedOptimizer(ps, mlp, extra_features=numbers.get, backend=backend)
        for p in ps:
            p.grad = learned.gradient(p, 0)
        optimizer.step()
        return tuple(p.detach() for p in ps)

    def by_a_bias(*tensors):
        found = []
        for x, given in zip(tensors, told, strict=True):
            plain = learned.network(device=device).to(x.dtype)
            with torch.no_grad():
                for mine, theirs in zip(plain.parameters(), mlp.parameters(), strict=True):
                    mine.copy_(theirs[:, :39] if theirs.shape[-1] == 41 else theirs)
                plain.first.bias += (mlp.first.weight[:, 39:].to(x.dtype)) @ given.to(x.dtype)
            q = torch.nn.Parameter(x.detach().clone())
            q.grad = learned.gradient(q, 0)
            LearnedOptimizer([q], plain, backend="reference").step()
            found.append(q.detach())
        return tuple(found)

    Yardstick(by_a_bias, tensors, [None] * len(tensors)).check(by_features)


def test_extra_features_of_elements_are_served_in_plain_torch(learned, device):
    mlp = learned.network(extra=1, device=device)
    p = torch.nn.Parameter(learned.drawn([(3, 4)])[0].to(device))
    p.grad = torch.ones_like(p)
    of_rows = torch.arange(3.0, device=device).view(3, 1, 1)
    LearnedOptimizer([p], mlp, extra_features=lambda p: of_rows, backend="reference").step()
    other = LearnedOptimizer([p], mlp, extra_features=lambda p: of_rows, backend="triton")
    with pytest.raises(RuntimeError, match="whole tensors"):
        other.step()


def test_statistics_of_bf16_parameters_stay_fp32_when_loaded(learned, device):
    p = torch.nn.Parameter(learned.drawn([(3, 4)])[0].to(device, torch.bfloat16))
    p.grad = torch.ones_like(p)
    mlp = learned.network(device=device)
    optimizer = LearnedOptimizer([p], mlp, backend="reference")
    optimizer.step()
    kept = copy.deepcopy(optimizer.state[p])
    optimizer.load_state_dict(optimizer.state_dict())
    for name, x in kept.items():
        assert torch.equal(optimizer.state[p][name], x)


def test_state_of_another_shape_is_refused(learned, device):
    p, q = (torch.nn.Parameter(torch.ones(n, 3, device=device)) for n in (2, 4))
    mlp = learned.network(device=device)
    first, second = LearnedOptimizer([p], mlp), LearnedOptimizer([q], mlp)
    p.grad = torch.ones_like(p)
    first.step()
    with pytest.raises(ValueError, match=r"momenta of parameter 0 must have shape \[3, 4, 3\]"):
        second.load_state_dict(first.state_dict())


def test_bad_parameters_and_networks_are_refused():
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="mlp must be an UpdateMLP"):
        LearnedOptimizer([p], torch.nn.Linear(39, 2))
    with pytest.raises(TypeError, match=r"a parameter must be floating, got torch\.complex64"):
        LearnedOptimizer([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], UpdateMLP())
    with pytest.raises(ValueError, match="empty parameter list"):
        LearnedOptimizer([], UpdateMLP())
    with pytest.raises(ValueError, match="extra_features must be at least 0"):
        UpdateMLP(-1)
    p.grad = torch.ones(2).to_sparse()
    with pytest.raises(TypeError, match="strided"):
        LearnedOptimizer([p], UpdateMLP()).step()


def test_parameters_without_gradients_stay(learned, backend, device):
    mlp = learned.network(device=device)
    p, q = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    optimizer = LearnedOptimizer([p, q], mlp, backend=backend)
    optimizer.step()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(p, torch.ones_like(p))
    assert torch.equal(q, torch.ones_like(q))
    assert q not in optimizer.state


def test_parameters_of_several_dtypes_move_in_one_step(learned, backend, device):
    mlp = learned.network(device=device)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    # Zeros before and steps of a power of two are what each of them holds.
    with torch.no_grad():
        mlp.last.weight.zero_()
        mlp.last.bias.copy_(torch.tensor([2.5, 0.0]))
    ps = [torch.nn.Parameter(torch.zeros(3, 4, dtype=x, device=device)) for x in dtypes]
    optimizer = LearnedOptimizer(ps, mlp, max_grad_norm=1.0, backend=backend)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all((p == -0.25).all() for p in ps)
    assert optimizer.grad_norm.item() == pytest.approx(6.0)


def test_state_is_kept_when_a_parameter_gets_memory_of_another_order(learned, backend, device):
    mlp = learned.network(device=device)
    found = []
    for turned in (False, True):
        p = torch.nn.Parameter(learned.drawn([(3, 4)], device)[0])
        optimizer = LearnedOptimizer([p], mlp, backend=backend)
        for step in range(2):
            if step and turned:
                p.data = p.data.t().contiguous().t()
            p.grad = learned.gradient(p, step)
            optimizer.step()
        found.append(p.detach())
    assert_near([found[0]], [found[1]])


def test_a_tensor_whose_features_may_be_infinite_in_fp16_is_declined():
    """One gradient that is not zero, divided by the root mean square of 2^32, is 65536."""
    from fusewright.optimizer.common.statistics.checks import tensor_obstacle

    assert "65504^2 elements" in tensor_obstacle(torch.empty(2**16, 2**16, device="meta"))
    assert tensor_obstacle(torch.empty(2**16, 2**15 + 1, device="meta")) is None
