"""M3: the paper's two nested loops in fp64, and what is decided beside them."""

from __future__ import annotations

import functools

import pytest
import torch
from fusewright.optimizer.matrix.m3 import M3
from fusewright.optimizer.matrix.newton_schulz import newton_schulz
from fusewright_testkit import Yardstick

from .compared import orthogonalized

SHAPES = ((6, 10), (8, 3, 2), (6, 10))
OWN = dict(betas=(0.05, 0.001, 0.1), retain=(0.95, 0.999, 0.9), relative=True, eps=0.1)


def algorithm_1(
    w, gradients, lr, betas, retain, relative, eps, alpha=0.5, frequency=10, weight_decay=0.0
):
    """Its lines one after the other, with one matrix and the gradients of all steps."""
    (beta1, beta2, beta3), (a1, a2, a3) = betas, retain
    m1, m2, v = (torch.zeros_like(w) for _ in range(3))
    chunk = []
    for k in range(-(-len(gradients) // frequency)):
        if k:
            m2 = a3 * m2 + beta3 * sum(chunk)
        o2 = orthogonalized(m2.flatten(1)).view_as(w)
        chunk = gradients[k * frequency : (k + 1) * frequency]
        for g in chunk:
            m1, v = a1 * m1 + beta1 * g, a2 * v + beta2 * g * g
            o1 = orthogonalized(m1.flatten(1)).view_as(w)
            root = v.sqrt()
            if relative:
                root = root / v.mean().sqrt()
            w = w - lr * weight_decay * w - lr * (o1 + alpha * o2) / (root + eps)
    return w


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {},
        M3.ALGORITHM_1,
        {"frequency": 1, "alpha": 2.0, "weight_decay": 0.3, "retain": (0.9, 1.0, 0.5)},
    ],
    ids=["ours", "paper", "every-step"],
)
@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_parameters_are_as_near_to_fp64_as_the_formula(
    training, device, backend, options, ns_dtype
):
    training.shapes = SHAPES
    tensors = [p.detach() for p in training.parameters(device=device)]
    # Two firings, and steps after them.
    steps, given = 5, {**OWN, "frequency": 2, **options}

    def eager(*tensors):
        gradients = [[] for _ in tensors]
        holders = [torch.nn.Parameter(x.detach()) for x in tensors]
        for step in range(steps):
            training.give_gradients(holders, step)
            for some, p in zip(gradients, holders, strict=True):
                some.append(p.grad)
        runs = zip(tensors, gradients, strict=True)
        return tuple(algorithm_1(x.detach(), some, lr=0.02, **given) for x, some in runs)

    def ours(*tensors):
        ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        # Whatever is not asked for is the optimizer's own.
        mine = {"frequency": 2, "ns_dtype": ns_dtype, "backend": backend, **options}
        training.run(functools.partial(M3, lr=0.02, **mine), ps, steps)
        return tuple(p.detach() for p in ps)

    Yardstick(eager, tensors, [None] * len(tensors), ns_dtype).check(ours)


@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_slow_direction_is_that_of_newton_schulz_to_the_bit(training, device, backend, ns_dtype):
    """The yardstick alone, with products in bf16, would let a factor of 1.02 pass."""
    training.shapes = ((6, 10),)
    (p,) = ps = training.parameters(device=device)
    options = dict(betas=(0.5, 0.5, 0.5), frequency=1, ns_dtype=ns_dtype, backend=backend)
    optimizer = training.run(functools.partial(M3, **options), ps, 1)
    direction = newton_schulz(0.5 * p.grad.unsqueeze(0), dtype=ns_dtype).squeeze(0)
    assert torch.equal(optimizer.state[p]["slow_direction"], direction)


def test_slow_momentum_moves_parameters_after_its_chunk(training, device):
    """With and without it parameters are the same bits until the step that follows a firing."""
    training.shapes = ((6, 10),)
    runs = {alpha: training.parameters(device=device) for alpha in (0.0, 0.5)}
    optimizers = {alpha: M3(ps, alpha=alpha, frequency=4) for alpha, ps in runs.items()}
    same, directions = [], []
    for step in range(10):
        for alpha, optimizer in optimizers.items():
            training.give_gradients(runs[alpha], step)
            optimizer.step()
        same.append(torch.equal(runs[0.0][0], runs[0.5][0]))
        state = optimizers[0.5].state[runs[0.5][0]]
        directions.append(state["slow_direction"].clone())
    assert same == [True] * 4 + [False] * 6
    changes = [not torch.equal(x, y) for x, y in zip(directions[1:], directions, strict=False)]
    assert [step + 2 for step, changed in enumerate(changes) if changed] == [4, 8]


def test_skipped_firing_waits_with_its_gradients(training, device):
    """Where the firing step is skipped, the next one has all gradients but the skipped."""
    training.shapes = ((6, 10),)
    p = training.parameters(device=device)[0]
    options = dict(betas=(0.5, 0.5, 0.5), retain=(1.0, 1.0, 1.0), ns_dtype=None)
    optimizer = M3([p], frequency=2, skip_nonfinite=True, **options)
    taken = []
    for step in range(4):
        training.give_gradients([p], step)
        if step == 1:
            p.grad[0, 0] = float("inf")
        else:
            taken.append(p.grad.clone())
        optimizer.step()
        if step == 1:
            assert optimizer.state[p]["slow_direction"].eq(0.0).all()
    state = optimizer.state[p]
    torch.testing.assert_close(state["slow_momentum"], 0.5 * sum(taken))
    direction = state["slow_direction"]
    Yardstick(orthogonalized, [sum(taken)], [None]).check(lambda _: direction)
    # Counted on the host, which knows of no skip.
    assert optimizer.param_groups[0]["steps"] == 4
    assert optimizer.skipped_steps.item() == 1


def test_count_of_steps_goes_with_the_state_dict(training, device):
    """Five steps and five more after loading fire when ten do."""
    training.shapes = ((6, 10), (6, 10))
    make = functools.partial(M3, frequency=3)
    whole, halves = (training.parameters(device=device) for _ in range(2))
    training.run(make, whole, 10)
    first = training.run(make, halves, 5)
    second = make(halves)
    second.load_state_dict(first.state_dict())
    for step in range(5, 10):
        training.give_gradients(halves, step)
        second.step()
    assert all(map(torch.equal, whole, halves))


def test_relative_denominator_does_not_see_the_size_of_gradients(training, device):
    """A power of two changes no bit; the paper's own denominator makes steps larger by it."""
    training.shapes = ((6, 10),)
    moves = {}
    for relative in (True, False):
        for scale in (1.0, 2.0**-12):
            p = training.parameters(device=device)[0]
            start = p.detach().clone()
            make = functools.partial(M3, lr=1e-3, relative=relative, eps=0.0)
            training.run(make, [p], 3, scale=scale)
            moves[relative, scale] = p.detach() - start
    assert torch.equal(moves[True, 1.0], moves[True, 2.0**-12])
    ratio = moves[False, 2.0**-12].norm() / moves[False, 1.0].norm()
    assert ratio.item() == pytest.approx(2.0**12, rel=0.01)
