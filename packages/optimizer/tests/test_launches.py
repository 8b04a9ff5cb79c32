"""How many launches a step takes, whatever the number of tensors."""

from __future__ import annotations

import pytest
from fusewright.optimizer import (
    M3,
    AdamW,
    LearnedOptimizer,
    Muon,
    VeLO,
    VeLONetworks,
    clip_grad_norm_,
    grad_norm,
    trained_update_mlp,
)
from fusewright.optimizer._launch import Launch

# Where a matrix and a vector of one dtype, and more of the same, are moved together.
SHAPES = ((6, 10), (7,), (6, 10), (7,))
STATISTICS = ["_learned_prepare_kernel", "_sums_kernel", "_means_kernel", "_statistics_kernel"]
MUON = ["_muon_momentum_kernel", "_unit_kernel", "_muon_move_kernel"]
OF_M3 = ["_m3_memories_kernel", "_unit_kernel", "_m3_move_kernel"]


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    found = []
    plain = Launch.__call__

    def watched(self, *some):
        found.append(self.kernel.__name__)
        return plain(self, *some)

    monkeypatch.setattr(Launch, "__call__", watched)
    return found


@pytest.fixture
def ps(training, device):
    training.shapes = SHAPES
    found = training.parameters(device=device)
    training.give_gradients(found, 0)
    return found


def learned(ps):
    return LearnedOptimizer(ps, trained_update_mlp().to(ps[0].device), backend="triton")


def velo(ps):
    networks = VeLONetworks(8, 4).to(ps[0].device)
    return VeLO(ps, networks, 100, backend="triton")


@pytest.mark.parametrize(
    ("make", "kernels"),
    [
        (lambda ps: AdamW(ps, backend="triton"), ["_prepare_kernel", "_adamw_kernel"]),
        (
            lambda ps: AdamW(ps, max_grad_norm=1.0, backend="triton"),
            ["_squares_kernel", "_prepare_kernel", "_adamw_kernel"],
        ),
        (lambda ps: Muon(ps[::2], backend="triton"), MUON),
        (lambda ps: M3(ps[::2], backend="triton"), OF_M3),
        (learned, [*STATISTICS, "_fold_kernel", "_apply_kernel"]),
        (velo, [*STATISTICS, "_moments_kernel", "_velo_apply_kernel"]),
    ],
    ids=["adamw", "adamw-clipping", "muon", "m3", "learned", "velo"],
)
def test_step_has_the_same_few_launches(ps, launched, make, kernels):
    optimizer = make(ps)
    step = [1.0] if isinstance(optimizer, VeLO) else []
    optimizer.step(*step)
    launched.clear()
    optimizer.step(*step)
    assert launched == kernels


def test_norm_and_clipping_have_two_launches(ps, launched):
    gradients = [p.grad for p in ps]
    grad_norm(gradients, backend="triton")
    assert launched == ["_squares_kernel", "_norm_kernel"]
    launched.clear()
    clip_grad_norm_(ps, 1.0, backend="triton")
    assert launched == ["_squares_kernel", "_clip_kernel"]
