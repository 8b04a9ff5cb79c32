"""What tests of several optimizers compare."""

from __future__ import annotations

import io

import torch
from fusewright.optimizer.matrix.newton_schulz import QUINTIC


def assert_near(found, expected, roundings=None):
    """The same formula, rounded elsewhere: so many units in the last place of a number, and of one
    of the size of 1, from which it may be the difference. Steps err by 8 together where a formula
    has some ten roundings, each of half a unit, most of them of the step alone; fp64 is there to
    tell formulas apart, over many terms and steps: 2^8.
    """
    for p, q in zip(found, expected, strict=True):
        assert p.shape == q.shape
        assert p.dtype == q.dtype
        p, q = p.detach(), q.detach()
        unit = torch.finfo(q.dtype).eps
        count = (2**8 if q.dtype == torch.float64 else 8) if roundings is None else roundings
        bound = count * unit * (1.0 + q.abs())
        same = (p == q) | (p.isnan() & q.isnan())
        excess = torch.where(same, 0.0, ((p - q).abs() / bound).double())
        assert bool((excess <= 1.0).all()), f"{excess.max().item():.2f} times the bound"


def assert_equal(found, expected):
    for p, q in zip(found, expected, strict=True):
        assert torch.equal(p, q)


def everything(optimizer):
    """Copies of all parameters and states, and of VeLO's losses."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            found.append(p.detach().clone())
            found += [x.clone() for _, x in sorted(optimizer.state.get(p, {}).items())]
    return found + [x.clone() for x in getattr(optimizer, "losses", ())]


def as_file(state_dict):
    """The state dict as a file gives it back."""
    memory = io.BytesIO()
    torch.save(state_dict, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


def orthogonalized(x, coefficients=QUINTIC):
    """Five steps of Newton-Schulz, written out."""
    a, b, c = coefficients
    norm = x.square().sum().sqrt()
    x = x / torch.where(norm == 0.0, 1.0, norm)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x
