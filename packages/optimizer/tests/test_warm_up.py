"""A step of an optimizer may be warmed up: it moves nothing, and later steps are as ever."""

from __future__ import annotations

import pytest
import torch
from fusewright.optimizer import M3, AdamW, Muon, warm_up

STEPS = 2


def stepped(make, warmed: bool, device: str) -> list[torch.Tensor]:
    """Parameters and states after some steps."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(rows, 16, device=device)) for rows in (16, 32)]
    for p in params:
        p.grad = torch.randn_like(p)
    before = [p.detach().clone() for p in params]
    optimizer = make(params)
    if warmed:
        warm_up(optimizer.step)
        assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True))
    for _ in range(STEPS):
        optimizer.step()
    assert not any(torch.equal(p, x) for p, x in zip(params, before, strict=True))
    states = [x for p in params for x in optimizer.state[p].values()]
    return [*params, *(x for x in states if isinstance(x, torch.Tensor))]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: AdamW(params, lr=0.01, max_grad_norm=1.0, backend="triton"),
        lambda params: Muon(params, lr=0.01, backend="triton"),
        lambda params: M3(params, lr=0.01, backend="triton"),
    ],
    ids=["adamw", "muon", "m3"],
)
def test_steps_after_a_warm_up_have_the_bits_of_those_without(make, device):
    found, expected = (stepped(make, warmed, device) for warmed in (True, False))
    assert len(found) == len(expected) > 2
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
