"""Tasks of many kinds of functions, for a network that has seen none of the tables it predicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fusewright_models.data import PriorTasks, Size
from fusewright_models.data.columns import Column
from fusewright_models.data.prior import functions, inputs, tasks
from fusewright_models.data.prior.inputs import draw_inputs
from fusewright_models.data.prior.scales import scales_of
from sklearn.gaussian_process.kernels import Matern, RationalQuadratic

MAKERS = [functions.waves, functions.linear, functions.trees, functions.network]


def all_rows(task):
    return torch.cat([task.x_context, task.x_target], dim=1)


def test_tasks_have_one_to_ten_columns_at_any_places_and_zeros_elsewhere():
    x, active = draw_inputs(PriorTasks(), 2000, 30, 10)
    counts = active.sum(2).flatten()
    # A tenth each: five standard errors of 2000 draws.
    error = 5.0 * (0.1 * 0.9 * 2000) ** 0.5
    assert (counts.bincount(minlength=11)[1:] - 200).abs().max() <= error
    places = active.sum((0, 1))
    assert (places - 1100).abs().max() <= 5.0 * (0.25 * 2000) ** 0.5
    assert x[~active.expand_as(x)].count_nonzero() == 0
    task = PriorTasks().sample(50)
    unused = (all_rows(task) == 0.0).all(1).sum(1)
    assert unused.max() == 9
    assert unused.min() == 0


def test_columns_of_every_kind_have_mean_0_and_variance_1():
    x, active = draw_inputs(PriorTasks(seed=1), 300, 200, 10)
    kept = x.mT[active.squeeze(1)].double()
    varies = kept.std(1) > 0.0
    assert varies.float().mean() > 0.98
    spread = kept[varies].std(1, correction=0)
    # fp32 adds up 200 numbers of a size of at most the largest.
    error = 200 * torch.finfo(torch.float32).eps * kept[varies].abs().amax(1)
    assert (kept[varies].mean(1).abs() <= error).all()
    assert ((spread - 1.0).abs() <= error).all()
    few = [len(column.unique()) < 20 for column in kept]
    assert 0.05 < np.mean(few) < 0.3


@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
def test_rows_have_the_scale_that_a_regressor_gives_them(monkeypatch, ragged):
    sampler = PriorTasks(context_size=Size(2, 30), target_size=Size(4, 4), ragged=ragged, seed=2)
    seen = []
    plain = sampler.sample_sized
    monkeypatch.setattr(
        sampler, "sample_sized", lambda *sizes: seen.append(plain(*sizes)) or seen[-1]
    )
    for _ in range(5):
        found = sampler.sample(6)
        count = found.x_context.shape[1]
        lengths = [count] * 6 if found.context_lengths is None else found.context_lengths.tolist()
        for task, length in enumerate(lengths):
            for name, width in (("x", 10), ("y", 1)):
                rows = [getattr(seen[-1], f"{name}_{part}")[task] for part in ("context", "target")]
                known, asked = (each.double().numpy() for each in rows)
                for column in range(width):
                    scale = Column.of("", known[:length, column])
                    expected = scale.standardised(asked[:, column])
                    ours = getattr(found, f"{name}_target")[task, :, column].double().numpy()
                    near = np.abs(expected) < tasks.FARTHEST
                    # fp32 keeps the mean of numbers to their size.
                    size = np.abs(np.r_[known[:length, column], asked[:, column]]).max()
                    error = 64 * np.finfo(np.float32).eps * (size / scale.scale + np.abs(expected))
                    assert (np.abs(ours - expected) <= error)[near].all()


def test_scales_of_equal_values_are_1_whatever_rounding_makes_of_their_mean():
    rows = torch.full((1, 7, 2), 0.1)
    rows[0, 5:, 0] = 3.0
    for lengths in (torch.tensor([5]), None):
        mean, scale = scales_of(rows[:, :5] if lengths is None else rows, lengths)
        assert scale.tolist() == [[[1.0, 1.0]]]
        assert ((mean - 0.1).abs() <= torch.finfo(torch.float32).eps).all()


def test_targets_far_from_the_context_grow_as_the_logarithm():
    y = torch.tensor([-1e4, -10.0, 0.3, 10.0, 10.5, 1e6])
    far = torch.log1p(y.abs() - 10.0) + 10.0
    expected = torch.where(y.abs() > 10.0, y.sign() * far, y)
    assert torch.equal(tasks._compressed(y), expected)


def test_logarithms_of_sizes_are_uniform():
    sampler = PriorTasks()
    sizes = np.array([sampler.draw_sizes()[0] for _ in range(4000)])
    assert (sizes.min(), sizes.max()) == (5, 1000)
    for u in (0.1, 0.5, 0.9):
        below = (sizes < sampler.size_at(u)).mean()
        # A size has some of the draws itself.
        share = np.log(sampler.size_at(u) / 5) / np.log(1001 / 5)
        assert abs(below - share) <= 5.0 * (u * (1.0 - u) / 4000) ** 0.5


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_functions_read_columns_of_weight_alone(make):
    x = torch.randn(40, 30, 10, generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(40, 1, 10)
    weights[:, :, [2, 7]] = 1.5
    first = make(PriorTasks(), x, weights)
    other = x + 1.0
    other[..., [2, 7]] = x[..., [2, 7]]
    assert torch.equal(make(PriorTasks(), other, weights), first)
    for column in (2, 7):
        other = x.clone()
        other[..., column] = x[..., column].flip(1)
        changed = (make(PriorTasks(), other, weights) != first).any(1)
        assert changed.float().mean() > 0.5
    assert (first.std(1) > 0.0).float().mean() > 0.9


def test_waves_have_the_covariances_of_their_kernels(monkeypatch):
    """Of one column, at distances from one point, in five standard errors of many draws."""
    x = torch.tensor([0.0, 0.3, 0.7, 1.5, 3.0]).view(1, -1, 1).expand(6000, -1, -1)
    weights = torch.ones(6000, 1, 1)
    monkeypatch.setattr(functions, "PERIODIC", 0.0)
    monkeypatch.setattr(functions, "LENGTHS", (0.8, 0.8))
    points = x[0].double().numpy()
    sampler = PriorTasks()
    normal = sampler.normal

    def without_heights(*shape):
        return normal(*shape) * (shape != (6000, 1, 1))

    monkeypatch.setattr(sampler, "normal", without_heights)
    for number, freedom, kernel in (
        (0, 1, Matern(0.8, nu=np.inf)),
        (1, 1, Matern(0.8, nu=0.5)),
        (1, 3, Matern(0.8, nu=1.5)),
        (1, 5, Matern(0.8, nu=2.5)),
        (2, 3, RationalQuadratic(0.8, alpha=1.5)),
    ):
        monkeypatch.setattr(functions, "KERNELS", [float(number == n) for n in range(3)])
        monkeypatch.setattr(functions, "FREEDOM", (freedom,))
        f = functions.waves(sampler, x, weights).double()
        square = f[:, :1].square()
        difference = f * f[:, :1] - square * torch.from_numpy(kernel(points)[:1])
        error = difference.std(0) / 6000**0.5
        assert (difference.mean(0).abs() <= 5.0 * error).all(), kernel


def test_normal_numbers_that_are_0_leave_waves_and_noises_finite(monkeypatch):
    """One in some 10^7 is, where they come from 32 random bits."""
    sampler = PriorTasks()
    plain = sampler.normal
    monkeypatch.setattr(functions, "KERNELS", (0.0, 1.0, 0.0))
    monkeypatch.setattr(tasks, "NOISES", (0.0, 1.0, 0.0))
    # Those whose squares are added up.
    monkeypatch.setattr(
        sampler, "normal", lambda *shape: plain(*shape) * (shape[-1] != max(functions.FREEDOM))
    )
    f = functions.waves(sampler, torch.randn(20, 30, 10), torch.ones(20, 1, 10))
    assert f.isfinite().all()
    assert sampler._noise(20, 30).isfinite().all()


def test_periodic_waves_repeat(monkeypatch):
    monkeypatch.setattr(functions, "PERIODIC", 1.0)
    monkeypatch.setattr(PriorTasks, "uniform", fixed_turn(PriorTasks.uniform))
    x = torch.rand(20, 15, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(20, 1, 3)
    one, other = (functions.waves(PriorTasks(), x + shift, weights) for shift in (0.0, 2.0))
    largest = one.abs().amax(1, keepdim=True)
    # Phases of up to some fifty turns are rounded.
    assert ((one - other).abs() <= 1e3 * torch.finfo(torch.float32).eps * largest).all()


def fixed_turn(plain):
    """Draws of a period are 2."""

    def uniform(self, low, high, *shape):
        drawn = plain(self, low, high, *shape)
        return torch.full_like(drawn, 2.0) if (low, high) == (1.0, 6.0) else drawn

    return uniform


def test_trees_are_constant_between_their_thresholds():
    x = torch.linspace(-1.0, 1.0, 4001).view(1, -1, 1).expand(30, -1, -1)
    f = functions.trees(PriorTasks(), x, torch.ones(30, 1, 1))
    steps = (f.diff(dim=1) != 0.0).sum(1)
    assert steps.max() <= functions.TREES * functions.DEPTH
    assert steps.min() >= 1


@pytest.mark.parametrize("kind", range(3), ids=["normal", "student", "skewed"])
def test_noises_have_mean_0_and_variance_1(monkeypatch, kind):
    monkeypatch.setattr(tasks, "NOISES", [float(kind == n) for n in range(3)])
    # Squares of fewer degrees have no variance.
    monkeypatch.setattr(tasks, "FREEDOM", (9,))
    noise = PriorTasks()._noise(400, 1000).double()
    for values, expected in ((noise, 0.0), (noise.square(), 1.0)):
        error = values.std() / values.numel() ** 0.5
        assert abs(float(values.mean()) - expected) <= 5.0 * float(error)


@pytest.mark.parametrize("share", [1e-4, 0.95])
def test_noise_has_its_share_of_the_variance(monkeypatch, share):
    monkeypatch.setattr(tasks, "MOST_NOISE", share)
    monkeypatch.setattr(tasks, "LEAST_NOISE", share)
    monkeypatch.setattr(tasks, "NOISES", (1.0, 0.0, 0.0))
    sampler = PriorTasks(seed=3)
    monkeypatch.setattr(sampler, "uniform", constant_shares(sampler.uniform, share))
    f = torch.randn(500, 400, 1, generator=torch.Generator().manual_seed(0))
    f = (f - f.mean(1, keepdim=True)) / f.std(1, keepdim=True, correction=0)
    others = f[..., :1].expand(-1, -1, len(tasks.SHARES)).flip(1)
    noise = (sampler._observed(f, others) - (1.0 - share) ** 0.5 * f).double()
    squares = noise.square().mean(1)
    error = squares.std() / len(squares) ** 0.5
    assert abs(float(squares.mean()) - share) <= 5.0 * float(error)


def constant_shares(plain, share):
    """Draws of a share from 0 are the largest one."""

    def uniform(low, high, *shape):
        drawn = plain(low, high, *shape)
        return torch.full_like(drawn, share) if (low, high) == (0.0, share) else drawn

    return uniform


def test_kinds_and_shares_are_of_as_many_choices_as_there_are():
    assert len(functions.SHARES) == 6
    assert len(inputs.KINDS) == len(tasks.BENT) == 5
