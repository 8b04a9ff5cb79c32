"""Options, states and forces that are refused, and states out of range, which poison the loss."""

from __future__ import annotations

import pytest
import torch
from fusewright.reversible import MidpointStack
from fusewright.reversible.midpoint.midpoint_stack import MODES
from torch import nn

from .stacks import WIDTH, Force, Layer, make


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [1e4, float("nan"), float("inf")])
def test_state_out_of_range_poisons_the_loss_and_every_gradient(mode, bad):
    stack = make(mode)
    x = torch.randn(3, WIDTH)
    x[1, 2] = bad
    x.requires_grad_()
    passed = stack(x)
    assert passed.saturated.item()
    assert passed.x.isnan().all()
    passed.x.sum().backward()
    for p in stack.parameters():
        assert p.grad.isnan().all()


@pytest.mark.parametrize("mode", MODES)
def test_force_out_of_range_sets_the_flag_too(mode):
    for factor in (1e6, float("nan")):
        stack = make(mode)
        with torch.no_grad():
            stack.layers[2].outer.bias.mul_(factor)
        assert stack(torch.randn(3, WIDTH, requires_grad=True)).saturated.item()


def test_bad_options_are_refused():
    layers = [Layer()]
    for options, message in (
        (dict(step=float("nan")), "step must be a finite number, got nan"),
        (dict(mode="fast"), 'mode must be "exact" or "stored" or "plain", got \'fast\''),
        (dict(fraction_bits=30), "fraction_bits must be from 1 to 29, got 30"),
        (dict(backend="torch"), 'backend must be "auto", "triton" or "reference"'),
    ):
        with pytest.raises(ValueError, match=message):
            MidpointStack(layers, **options)
    with pytest.raises(ValueError, match="layers must be at least one"):
        MidpointStack([])
    with pytest.raises(TypeError, match="layers must have a method force, got Linear"):
        MidpointStack([nn.Linear(2, 2)])


@pytest.mark.parametrize("mode", MODES)
def test_bad_input_is_refused(mode):
    stack = make(mode, 2)
    with pytest.raises(ValueError, match="context must be without gradients"):
        stack(torch.ones(WIDTH), scale=torch.ones((), requires_grad=True))
    for x, message in ((torch.ones(WIDTH).int(), "int32"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"x must be .*, got .*{message}"):
            stack(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("of", [lambda x: x.expand(2, *x.shape), lambda x: x.mean(0, keepdim=True)])
def test_force_of_another_shape_is_refused(of, backend, mode):
    stack = MidpointStack([Force(lambda self, x: (of(x), None))], mode=mode, backend=backend)
    with pytest.raises(ValueError, match=r"delta must have the state's shape \(3, 6\), got"):
        stack(torch.ones(3, WIDTH))
