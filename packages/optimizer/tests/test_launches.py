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
from fusewright.optimizer._core.launches import Launch

# Where a matrix and a vector of one dtype, and more of the same, are moved together.
SHAPES = ((6, 10), (7,), (6, 10), (7,))
STATISTICS = ["learned_prepare_kernel", "sums_kernel", "means_kernel", "statistics_kernel"]
MUON = ["muon_momentum_kernel", "unit_kernel", "muon_move_kernel"]
# A matrix whose rows fill strips, and a vector.
WIDE = ((6, 128), (7,))
STRIPS = [*STATISTICS, "lines_kernel", "strip_statistics_kernel", "fold_kernel", "apply_kernel"]
OF_M3 = ["m3_memories_kernel", "unit_kernel", "m3_move_kernel"]


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
        (lambda ps: AdamW(ps, backend="triton"), ["prepare_kernel", "adamw_kernel"]),
        (
            lambda ps: AdamW(ps, max_grad_norm=1.0, backend="triton"),
            ["squares_kernel", "prepare_kernel", "adamw_kernel"],
        ),
        (lambda ps: Muon(ps[::2], backend="triton"), MUON),
        (lambda ps: M3(ps[::2], backend="triton"), OF_M3),
        (learned, [*STATISTICS, "fold_kernel", "apply_kernel"]),
        (velo, [*STATISTICS, "moments_kernel", "velo_apply_kernel"]),
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


def test_matrices_in_strips_have_four_more_launches(training, device, launched):
    training.shapes = WIDE
    ps = training.parameters(device=device)
    training.give_gradients(ps, 0)
    learned(ps).step()
    assert launched == [*STRIPS, "layers_kernel", "strip_apply_kernel"]


def test_norm_and_clipping_have_two_launches(ps, launched):
    gradients = [p.grad for p in ps]
    grad_norm(gradients, backend="triton")
    assert launched == ["squares_kernel", "norm_kernel"]
    launched.clear()
    clip_grad_norm_(ps, 1.0, backend="triton")
    assert launched == ["squares_kernel", "clip_kernel"]
