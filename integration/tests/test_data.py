from __future__ import annotations

import math

import pytest
import torch
from fusewright.mixture_head import GaussianMixtureHead
from fusewright_models.data import (
    DATA_NAMES,
    Digits,
    GaussianProcess,
    HeldOut,
    LinearRegression,
    Size,
    evaluate,
    make_sampler,
)
from fusewright_models.data.digits import pixel_of
from fusewright_models.data.gaussian_process import KERNELS, NOISE, covariance
from sklearn.datasets import load_digits
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern
from torch.distributions import MultivariateNormal


class Standard:
    """Predicts N(0, 1) for every target."""

    head = GaussianMixtureHead(8, 8, 1)

    def __call__(self, x_context, y_context, x_target, *lengths):
        return torch.zeros(*x_target.shape[:2], 1, 1, 3)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_tasks_have_one_shape_and_are_finite(name):
    sampler = make_sampler(name)
    task = sampler.sample(4)
    context, targets = task.x_context.shape[1], task.x_target.shape[1]
    assert task.x_context.shape == (4, context, sampler.x_width)
    assert task.y_context.shape == (4, context, 1)
    assert task.x_target.shape == (4, targets, sampler.x_width)
    assert task.y_target.shape == (4, targets, 1)
    assert task.tokens == 4 * (context + targets)
    for rows in (task.x_context, task.y_context, task.x_target, task.y_target):
        assert rows.dtype == torch.float32
        assert rows.isfinite().all()


@pytest.mark.parametrize("name", DATA_NAMES)
def test_restored_generators_continue_the_same_tasks(name):
    sampler = make_sampler(name, seed=3)
    first = sampler.sample(2)
    state = sampler.state_dict()
    second = sampler.sample(2)
    other = make_sampler(name, seed=4)
    other.load_state_dict(state)
    again = other.sample(2)
    assert torch.equal(again.x_target, second.x_target)
    assert torch.equal(again.y_target, second.y_target)
    sampler.reset()
    assert torch.equal(sampler.sample(2).y_target, first.y_target)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_autocast_changes_no_task(name):
    plain = make_sampler(name).sample(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = make_sampler(name).sample(3)
    assert torch.equal(plain.y_context, other.y_context)
    assert torch.equal(plain.y_target, other.y_target)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_given_sizes_are_kept(name):
    sampler = make_sampler(name, context_size=Size(2, 4), target_size=Size(5, 5))
    sizes = {sampler.sample(1).x_context.shape[1] for _ in range(40)}
    assert sizes == {2, 3, 4}
    assert sampler.sample(1).x_target.shape[1] == 5


def test_gaussian_process_sizes_are_those_of_its_generator():
    sampler = GaussianProcess()
    sizes = set()
    for _ in range(1000):
        task = sampler.sample(1)
        sizes.add((task.x_context.shape[1], task.x_target.shape[1]))
    assert {context for context, _ in sizes} == set(range(3, 47))
    assert min(targets for _, targets in sizes) == 3
    assert max(context + targets for context, targets in sizes) == 49


def test_covariances_are_those_of_scikit_learn(assert_same_but_for_rounding):
    x = torch.rand(1, 9, 1, dtype=torch.float64) * 4.0 - 2.0
    length, scale, period = (torch.full((1, 1, 1), v, dtype=torch.float64) for v in (0.3, 0.7, 0.4))
    for kernel, expected in (
        ("rbf", RBF(0.3)),
        ("matern", Matern(0.3, nu=2.5)),
        ("periodic", ExpSineSquared(0.3, 0.4)),
    ):
        ours = covariance(kernel, x, x, length, scale, period)[0]
        theirs = 0.49 * torch.from_numpy(expected(x[0].numpy()))
        assert_same_but_for_rounding([ours], [theirs])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("points", [2, 49, 256], ids=lambda points: f"P{points}")
def test_covariance_with_noise_is_positive_definite(kernel, points):
    sampler = GaussianProcess(kernel, context_size=Size(1, 1), target_size=Size(points, points))
    task = sampler.sample(4)
    x = torch.cat([task.x_context, task.x_target], dim=1).double()
    matrix = covariance_of(sampler, x, {name: value.double() for name, value in task.truth.items()})
    smallest = torch.linalg.eigvalsh(matrix)[:, 0]
    assert (smallest >= 0.5 * NOISE**2).all()
    assert torch.linalg.cholesky_ex(matrix).info.eq(0).all()


def covariance_of(sampler, x, truth):
    """Of observations at all points of a task."""
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    if isinstance(sampler, LinearRegression):
        return 1.0 + x @ x.mT + truth["sigma"].square() * eye
    return covariance(sampler.kernel, x, x, **truth) + NOISE**2 * eye


@pytest.mark.parametrize("name", ["gp-rbf", "gp-matern", "gp-periodic", "blr"])
def test_oracle_is_the_ratio_of_joint_densities(name, assert_same_but_for_rounding):
    sampler = make_sampler(name, context_size=Size(12, 12), target_size=Size(1, 1))
    task = sampler.sample(5)
    x = torch.cat([task.x_context, task.x_target], dim=1).double()
    y = torch.cat([task.y_context, task.y_target], dim=1).double().squeeze(-1)
    matrix = covariance_of(sampler, x, {name: value.double() for name, value in task.truth.items()})
    joint = MultivariateNormal(torch.zeros_like(y), matrix).log_prob(y)
    shown = MultivariateNormal(torch.zeros_like(y[:, :12]), matrix[:, :12, :12]).log_prob(y[:, :12])
    ours = sampler.reference_log_likelihood(task)[:, 0, 0]
    condition = float(torch.linalg.cond(matrix).max())
    assert_same_but_for_rounding([ours], [joint - shown], condition)


@pytest.mark.parametrize(
    ("name", "expected", "expected_error"),
    [
        ("gp-rbf", 1.511, 0.011),
        ("gp-matern", 1.116, 0.011),
        ("gp-periodic", 1.187, 0.012),
        ("blr", -0.5145, 0.0),
    ],
)
def test_oracle_scores_what_is_known_of_it(name, expected, expected_error):
    # Two tasks of a batch share their sizes alone, which leaves their scores all but independent.
    found = HeldOut(make_sampler(name), batches=2000, batch_size=2).reference
    error = math.hypot(float(found.std()) / len(found) ** 0.5, expected_error)
    assert abs(float(found.mean()) - expected) <= 4.0 * error


def test_digits_split_shows_no_held_out_image():
    training, held_out = Digits(), Digits(held_out=True)
    every = torch.cat([training.values, held_out.values])
    original = torch.from_numpy(load_digits().images).reshape(-1, 64).float()
    assert len(held_out.values) == 300
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, original.tolist()))


def test_context_and_targets_are_all_pixels_of_one_image():
    sampler = Digits(held_out=True)
    task = sampler.sample_of(torch.tensor([0, 7]), 10, 54)
    x = torch.cat([task.x_context, task.x_target], dim=1)
    y = torch.cat([task.y_context, task.y_target], dim=1)[..., 0]
    cell = ((x + 1.0) * 3.5).round().long()
    number = cell[..., 0] * 8 + cell[..., 1]
    assert torch.equal(number.sort(dim=1).values, torch.arange(64).expand(2, 64))
    assert torch.equal(number[:, 10:], pixel_of(task.x_target))
    level = ((y + 0.5) * 17.0).floor()
    assert torch.equal(level, sampler.values[[0, 7]].gather(1, number))


def test_per_pixel_gaussian_has_the_moments_of_the_training_pixels():
    sampler = Digits(context_size=Size(1, 1))
    task = sampler.sample(20_000)
    pixel, y = pixel_of(task.x_target), task.y_target[..., 0]
    z = (y - sampler.pixel_mean[pixel]) / sampler.pixel_variance[pixel].sqrt()
    # Pixels of one image go together: errors are those of the means of images.
    for moment, expected in ((z, 0.0), (z.square(), 1.0)):
        by_image = moment.mean(1)
        assert (by_image.mean() - expected).abs() <= 4.0 * by_image.std() / len(y) ** 0.5


def test_evaluation_averages_targets_then_tasks_and_repeats(assert_same_but_for_rounding):
    sampler = LinearRegression(context_size=Size(5, 9), target_size=Size(2, 6))

    first = evaluate(Standard(), sampler, batches=3, batch_size=4)
    assert first == evaluate(Standard(), sampler, batches=3, batch_size=4)
    sampler.reset()
    standard = torch.distributions.Normal(0.0, 1.0)
    log_p = [standard.log_prob(sampler.sample(4).y_target) for _ in range(3)]
    means = torch.cat([each.double().mean((1, 2)) for each in log_p])
    found = torch.tensor([first.log_likelihood, first.standard_error], dtype=torch.float64)
    expected = torch.stack([means.mean(), means.std() / 12**0.5])
    assert_same_but_for_rounding([found], [expected])


@pytest.mark.parametrize("text", ["", "x", "0", "5-3", "3-", "-4", "1.5"])
def test_malformed_sizes_are_refused(text):
    with pytest.raises(ValueError, match="a count such as 64 or a range such as 3-46; got"):
        Size.parse(text)


def test_impossible_samplers_are_refused():
    with pytest.raises(ValueError, match="data must be one of"):
        make_sampler("mnist")
    with pytest.raises(ValueError, match="kernel must be one of"):
        GaussianProcess("cosine")
    with pytest.raises(ValueError, match=r"64 pixels.*got sizes that add up to 80"):
        Digits(context_size=Size(40, 40), target_size=Size(40, 40))
    with pytest.raises(
        ValueError, match="at most 46 for the context; got a context size of up to 60"
    ):
        GaussianProcess(context_size=Size(60, 60))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Digits(ragged=True), "of ragged False; got ragged True"),
        (Digits(held_out=True), "of held_out False; got held_out True"),
        (
            Digits(context_size=Size(4, 9)),
            r"of context_size Size\(low=4, high=48\); got context_size",
        ),
        (LinearRegression(), "kind Digits; got .*kind LinearRegression"),
    ],
    ids=["ragged", "held-out", "context", "kind"],
)
def test_sampler_does_not_go_on_with_other_tasks(other, message):
    state = Digits().state_dict()
    before = other.state_dict()
    with pytest.raises(
        ValueError, match=f"wanted the tasks that the run was begun with, .*{message}"
    ):
        other.load_state_dict(state)
    assert torch.equal(other.state_dict()["device"], before["device"])


def test_sampler_goes_on_with_a_state_of_before():
    one, other = Digits(seed=3), Digits(seed=4)
    one.sample(2)
    state = one.state_dict()
    del state["tasks"]
    other.load_state_dict(state)
    assert torch.equal(one.sample(2).x_context, other.sample(2).x_context)
