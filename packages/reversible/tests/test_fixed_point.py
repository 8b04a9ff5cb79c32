"""States as whole numbers: the launches have those of plain torch, to the bit."""

from __future__ import annotations

import pytest
import torch
from fusewright.reversible import FixedPoint
from fusewright.reversible.fixed_point import reference
from fusewright.reversible.fixed_point.fixed_point import LIMIT


def stepped_by(backend, device):
    """A step and the step back, of numbers as a layer may give them."""
    torch.manual_seed(7)
    states = FixedPoint(20, backend=backend)
    before = torch.randint(-LIMIT, LIMIT, (3, 701), dtype=torch.int32).to(device)
    delta = torch.randn(3, 701)
    # Halves, which are rounded to even numbers, and what has no place.
    delta[0] = (delta[0] * 8).round() * 2.0**-20
    delta[1] *= 1e-5
    delta[2, :6] = torch.tensor([1e9, -1e9, 1e38, torch.inf, -torch.inf, torch.nan])
    delta = delta.to(device)
    saturated = torch.zeros((), dtype=torch.bool, device=device)
    new = states.step(before, delta, 0.5, saturated)
    back = states.step_back(new.state, delta, 0.5)
    calm = torch.zeros_like(saturated)
    tame = states.step(before[:2] // 4, delta[:2], 0.5, calm)
    return [*new, *back, saturated, tame.shown, calm]


def test_one_launch_has_the_same_states_to_the_bit(device):
    found, expected = (stepped_by(name, device) for name in ("triton", "reference"))
    assert found[-3].item()
    assert not found[-1].item()
    for value, truth in zip(found, expected, strict=True):
        assert torch.equal(value, truth)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_step_back_is_the_inverse(backend, device):
    states = FixedPoint(20, backend=backend)
    before, _, saturated = states.start(torch.randn(3, 701, device=device))
    delta = torch.randn(3, 701, device=device)
    new = states.step(before, delta, 0.5, saturated)
    back = states.step_back(new.state, delta, 0.5)
    assert torch.equal(back.state, before)
    assert torch.equal(back.shown, states.shown(before, torch.float32))
    assert not saturated.item()


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 1, 3)], ids=str)
def test_states_of_any_shape(shape, device):
    found = []
    for backend in ("triton", "reference"):
        torch.manual_seed(2)
        states = FixedPoint(12, backend=backend)
        before, _, saturated = states.start(torch.randn(shape, device=device))
        found.append(states.step(before, torch.randn(shape, device=device), 2.0, saturated))
    assert all(map(torch.equal, *found))
    assert found[0].state.shape == shape


def test_launches_do_not_take_fp64_and_plain_torch_does(device):
    before = torch.zeros(5, dtype=torch.int32, device=device)
    delta = torch.full((5,), 0.125, dtype=torch.float64, device=device)
    saturated = torch.zeros((), dtype=torch.bool, device=device)
    with pytest.raises(RuntimeError, match=r"not torch\.float64"):
        FixedPoint(20, backend="triton").step(before, delta, 1.0, saturated)
    new = FixedPoint(20, backend="reference").step(before, delta, 1.0, saturated)
    assert torch.equal(new.state, torch.full_like(before, 1 << 17))
    assert torch.equal(new.shown, delta)


def test_steps_at_the_ends_of_the_range_do_not_wrap():
    ends = torch.tensor([LIMIT - 1, 1 - LIMIT, 0, 1 - LIMIT], dtype=torch.int32)
    kick = torch.tensor([LIMIT, -LIMIT, 5, LIMIT], dtype=torch.int32)
    new = reference.moved(ends, kick)
    assert torch.equal(new, (ends.long() + kick).clamp(-LIMIT, LIMIT).int())


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_states_and_forces_of_other_strides_are_read_by_them(backend, device):
    states = FixedPoint(20, backend=backend)
    before, _, saturated = states.start(torch.randn(5, 3, device=device))
    delta = torch.randn(3, 5, device=device).t()
    new = states.step(before, delta, 0.5, saturated)
    transposed = states.step(before.t(), delta.t(), 0.5, saturated)
    assert torch.equal(transposed.state, new.state.t())
    for some, other in ((new.state, delta), (new.state.t().contiguous().t(), delta.contiguous())):
        assert torch.equal(states.step_back(some, other, 0.5).state, before)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_what_is_no_state_or_no_force_of_it_is_refused(backend, device):
    states = FixedPoint(20, backend=backend)
    before, _, saturated = states.start(torch.ones(2, 3, device=device))
    for state, delta, error, message in (
        (before, torch.zeros(4, 3), ValueError, r"state's shape \(2, 3\), got \(4, 3\)"),
        (before, torch.zeros(1, 3), ValueError, r"state's shape \(2, 3\), got \(1, 3\)"),
        (before, torch.zeros(2, 3).bfloat16(), TypeError, "delta must be float32 or float64, got"),
        (before.long(), torch.zeros(2, 3), TypeError, "must be a state, int32, got torch.int64"),
    ):
        with pytest.raises(error, match=message):
            states.step(state, delta.to(device), 1.0, saturated)
        with pytest.raises(error, match=message):
            states.step_back(state, delta.to(device), 1.0)


@pytest.mark.parametrize(
    ("bits", "error"), [(0, ValueError), (30, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_bad_bits_are_refused(bits, error):
    with pytest.raises(error, match="fraction_bits must be"):
        FixedPoint(bits)
