"""Muon: the formula one matrix after the other in fp64, torch's own beside it, and its groups."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from fusewright.optimizer.matrix.muon import Muon
from fusewright.optimizer.matrix.newton_schulz import CUBIC, QUINTIC
from fusewright_testkit import Yardstick

from .compared import assert_near, orthogonalized

# Several of a shape, tall and wide, a filter bank and an empty one.
SHAPES = ((6, 10), (12, 5), (6, 10), (4, 3, 2, 2), (0, 4))
FACTORS = {
    "output_rms": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "adamw_rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "none": lambda rows, columns: 1.0,
}


class Eager:
    """The formula with the paper's sum for momentum, in the parameters' dtype."""

    def __init__(
        self,
        ps,
        lr,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        scale="output_rms",
        ns_coefficients=QUINTIC,
        maximize=False,
        **_,
    ):
        self.ps, self.ms = ps, [torch.zeros_like(p) for p in ps]
        self.lr, self.weight_decay, self.mu, self.nesterov = lr, weight_decay, momentum, nesterov
        self.scale, self.coefficients = FACTORS[scale], ns_coefficients
        self.sign = -1.0 if maximize else 1.0

    @torch.no_grad()
    def step(self):
        for number, p in enumerate(self.ps):
            g = self.sign * p.grad
            m = self.ms[number] = self.mu * self.ms[number] + g
            u = (g + self.mu * m if self.nesterov else m).flatten(1)
            if u.numel():
                o = orthogonalized(u, self.coefficients) * self.scale(*u.shape)
                p.copy_(p - self.lr * self.weight_decay * p - self.lr * o.view_as(p))


def stepped(training, make, tensors, **options):
    ps = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
    training.run(functools.partial(make, **options), ps, 3)
    return tuple(p.detach() for p in ps)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"momentum": 0.0, "scale": "adamw_rms"},
        {"maximize": True, "scale": "none", "ns_coefficients": CUBIC},
    ],
    ids=["plain", "without-nesterov", "adamw-rms", "ascent-cubic"],
)
def test_parameters_are_as_near_to_fp64_as_the_formula(training, device, backend, options):
    training.shapes = SHAPES
    tensors = [p.detach() for p in training.parameters(device=device)]

    def eager(*tensors):
        return stepped(training, Eager, tensors, lr=0.02, **options)

    def ours(*tensors):
        mine = dict(ns_dtype=None, backend=backend, **options)
        return stepped(training, Muon, tensors, lr=0.02, **mine)

    Yardstick(eager, tensors, [None] * len(tensors)).check(ours)


@pytest.mark.parametrize(
    ("scale", "adjusted"), [("output_rms", "original"), ("adamw_rms", "match_rms_adamw")]
)
def test_errs_no_more_than_twice_as_torchs(training, device, backend, scale, adjusted):
    training.shapes = ((6, 10), (12, 5), (6, 10))
    starts = [p.detach() for p in training.parameters(device=device)]

    def moved(make, dtype, **options):
        found = stepped(training, make, [x.to(dtype) for x in starts], lr=0.05, **options)
        return torch.cat(
            [(p.double() - x.double()).flatten() for p, x in zip(found, starts, strict=True)]
        )

    truth = moved(Eager, torch.float64, scale=scale)
    theirs = moved(torch.optim.Muon, torch.float32, adjust_lr_fn=adjusted) - truth
    ours = moved(Muon, torch.float32, scale=scale, backend=backend) - truth
    assert ours.norm() <= 2 * theirs.norm()
    # Theirs is the same formula, in bf16.
    assert theirs.norm() < 0.02 * truth.norm()


def test_state_of_torchs_goes_on(training, device):
    training.shapes = ((6, 10), (12, 5), (6, 10))
    ps, twin = (training.parameters(device=device) for _ in range(2))
    theirs = training.run(torch.optim.Muon, twin, 3, lr=0.05)
    ours = Muon(ps)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.05
    # What torch's know nothing of stays as it is.
    assert ours.param_groups[0]["scale"] == "output_rms"
    for p, q in zip(ps, twin, strict=True):
        assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
    training.give_gradients(ps, 3)
    training.give_gradients(twin, 3)
    ours.step()
    theirs.step()
    for p, q in zip(ps, twin, strict=True):
        found, expected = (x.state[y]["momentum_buffer"] for x, y in ((ours, p), (theirs, q)))
        torch.testing.assert_close(found, expected)


def test_scale_of_torchs_is_taken_by_its_name(training, device):
    training.shapes = ((12, 5), (6, 10))
    ps, twin = (training.parameters(device=device) for _ in range(2))
    options = dict(lr=0.05, adjust_lr_fn="match_rms_adamw")
    theirs = training.run(torch.optim.Muon, twin, 2, **options)
    ours = Muon(ps)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["scale"] == "adamw_rms"


def test_groups_without_matrices_take_adamws_steps(training, device, backend):
    training.shapes = ((6, 10), (3,), (), (5, 4), (3,))
    ps, twin = (training.parameters(device=device) for _ in range(2))
    options = dict(lr=0.03, weight_decay=0.2)
    groups = [dict(params=ps[:1]), dict(params=ps[1:], matrix=False, **options)]
    optimizer = Muon(groups, adam_betas=(0.8, 0.95), adam_eps=1e-7, backend=backend)
    theirs = torch.optim.AdamW(twin[1:], betas=(0.8, 0.95), eps=1e-7, foreach=False, **options)
    for step in range(5):
        training.give_gradients(ps, step)
        training.give_gradients(twin, step)
        optimizer.step()
        theirs.step()
    assert_near(ps[1:], twin[1:])


def test_step_is_as_long_as_its_scale_says(device):
    rows, columns, lr = 64, 16, 0.1
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(device)
    for scale, rms in (("output_rms", 0.25), ("adamw_rms", 0.2), ("none", 0.125)):
        p = torch.nn.Parameter(torch.zeros(rows, columns, device=device))
        p.grad = gradient.clone()
        Muon([p], lr=lr, scale=scale, ns_dtype=None).step()
        # Columns of length 1, within what five steps leave of singular values.
        assert p.square().mean().sqrt().item() == pytest.approx(lr * rms, rel=0.25)


def test_vectors_are_asked_into_groups_of_their_own():
    with pytest.raises(ValueError, match=r"two axes or more, got one of shape \[3\].*matrix=False"):
        Muon([torch.nn.Parameter(torch.ones(3))])
