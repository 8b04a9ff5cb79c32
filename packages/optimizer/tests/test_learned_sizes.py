"""Gradients of LearnedOptimizer's kernels of any size, few that are not zero, and none finite."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright.optimizer.learned.learned_update import learned_init, learned_update
from fusewright_testkit import Yardstick

# The last is in strips.
SHAPES = (1,), (3, 4), (5, 30)


def all_of(x):
    return x


def one_of(x):
    return x * (torch.arange(x.numel(), device=x.device).view(x.shape) == x.numel() // 2)


def updates(learned, params, gradients, backend):
    """Of the second step, whose gradients are half of the first's."""
    mlp = learned.network(device=params[0].device).to(params[0].dtype)
    kept = learned_init(params)
    with torch.no_grad():
        for scale in (1.0, 0.5):
            some = [scale * g for g in gradients]
            found, kept = learned_update(mlp, params, some, kept, backend=backend)
    return tuple(found)


@pytest.mark.parametrize(
    ("some", "size"),
    [(all_of, 1e-30), (all_of, 1e-4), (all_of, 1e9), (one_of, 1e-12), (one_of, 1e4), (one_of, 0.0)],
)
@pytest.mark.usefixtures("small_learned_tiles")
def test_updates_are_as_near_to_fp64_as_the_references(learned, some, size, device):
    params = learned.drawn(SHAPES, device)
    gradients = [some(torch.sin(9.0 * p)) * size for p in params]

    def by(backend):
        def op(*both):
            return updates(learned, both[: len(SHAPES)], both[len(SHAPES) :], backend)

        return op

    tensors = [*params, *gradients]
    Yardstick(by("reference"), tensors, [None] * len(SHAPES)).check(by("triton"))


@pytest.mark.sampled
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("small_learned_tiles")
def test_what_is_not_finite_reaches_all_of_its_tensor_and_no_other(learned, value, device):
    params = learned.drawn(SHAPES, device)
    for place, p in enumerate(params):
        gradients = [torch.sin(9.0 * x) for x in params]
        expected = updates(learned, params, gradients, "triton")
        gradients[place].view(-1)[p.numel() // 2] = value
        found = updates(learned, params, gradients, "triton")
        for other, (x, y) in enumerate(zip(found, expected, strict=True)):
            assert x.isnan().all() if other == place else torch.equal(x, y)
