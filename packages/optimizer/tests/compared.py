"""What tests of several optimizers compare."""

from __future__ import annotations

import torch


def assert_near(found, expected):
    """The same formula in fp32, rounded elsewhere."""
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def assert_equal(found, expected):
    for p, q in zip(found, expected, strict=True):
        assert torch.equal(p, q)


def everything(optimizer):
    """Copies of all parameters and states."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            found.append(p.detach().clone())
            found += [x.clone() for _, x in sorted(optimizer.state.get(p, {}).items())]
    return found
