"""What any model can know: the predictive density where the parameters of a task are not told.

The reference of a sampler knows a task's length, scale, period or noise; a model has to find them
in the context. With the generator's prior p(g) over parameters g the best prediction is

    p(y | x, context) = sum_g w_g N(y; mean_g, variance_g),   w_g ~ p(g) p(y_context | g)

and no model has a higher expected log-likelihood. The sum is a midpoint rule over the prior.

rbf, matern    length and scale unknown
periodic       length and scale unknown, the period told: more than any model knows, so that what
               stands there is a bound that a model need not come close to
blr            noise unknown
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gaussian_process import LENGTHS, NOISE, SCALES, GaussianProcess, covariance
from .linear_regression import FEATURES, NOISE_MEAN, NOISE_SPREAD, LinearRegression, with_one
from .task import Sampler, Task, normal_log_likelihood

# Points of the midpoint rules. Twice as many move no mean over a thousand tasks by 2e-4.
LENGTH_POINTS, SCALE_POINTS, NOISE_POINTS = 48, 24, 33
# Standard deviations of the prior on either side.
NOISE_REACH = 4.0


def attainable_log_likelihood(sampler: Sampler, task: Task) -> Tensor:
    """log p of every target where the parameters are unknown, ``[B, N, 1]``, fp64.

    Args:
        sampler: the one that made the task, of a Gaussian process or of linear regression.
        task: on any device; without lengths.

    Raises:
        TypeError: nothing is known of what the sampler draws from.
        ValueError: the tasks have lengths.
    """
    if task.context_lengths is not None or task.target_lengths is not None:
        raise ValueError("wanted tasks of one size; got some with lengths")
    if isinstance(sampler, GaussianProcess):
        found = _of_processes(sampler, task)
    elif isinstance(sampler, LinearRegression):
        found = _of_regression(task)
    else:
        raise TypeError(
            f"wanted a sampler with a prior over parameters; got {type(sampler).__name__}"
        )
    return found.unsqueeze(-1)


def _of_processes(sampler: GaussianProcess, task: Task) -> Tensor:
    """With K = s^2 R and R = Q diag(e) Q^T one decomposition serves every scale s."""
    x, y, x_target, y_target = _doubled(task)
    one = torch.ones(1, 1, 1, dtype=x.dtype, device=x.device)
    period = task.truth["period"].double()
    square = _midpoints(*SCALES, SCALE_POINTS, x)[:, None, None].square()
    evidence, scores = [], []
    for length in _midpoints(*LENGTHS, LENGTH_POINTS, x):
        parameters = length * one, one, period
        values, vectors = torch.linalg.eigh(covariance(sampler.kernel, x, x, *parameters))
        moments = (vectors.mT @ y).squeeze(-1)
        cross = vectors.mT @ covariance(sampler.kernel, x, x_target, *parameters)
        # Rounding leaves eigenvalues of a smooth kernel below zero.
        spread = square * values.clamp(min=0.0) + NOISE**2
        evidence.append(-0.5 * (moments.square() / spread + spread.log()).sum(-1))
        mean = torch.einsum("sbm,bmn->sbn", square * moments / spread, cross)
        explained = torch.einsum("sbm,bmn->sbn", square.square() / spread, cross.square())
        variance = (square - explained).clamp(min=0.0) + NOISE**2
        scores.append(normal_log_likelihood(y_target, mean, variance))
    return _mixed(torch.cat(evidence), torch.cat(scores))


def _of_regression(task: Task) -> Tensor:
    """With Phi^T Phi = Q diag(e) Q^T one decomposition serves every noise."""
    x, y, x_target, y_target = _doubled(task)
    rows, targets = with_one(x), with_one(x_target)
    values, vectors = torch.linalg.eigh(rows.mT @ rows)
    moments = (vectors.mT @ (rows.mT @ y)).squeeze(-1)
    cross = vectors.mT @ targets.mT
    steps = _midpoints(-NOISE_REACH, NOISE_REACH, NOISE_POINTS, x)[:, None, None]
    noise = (2.0 * (NOISE_MEAN + NOISE_SPREAD * steps)).exp()
    # Of the posterior of the weights, along each vector, in units of the noise.
    spread = 1.0 / (noise + values)
    mean = torch.einsum("gbm,bmn->gbn", spread * moments, cross)
    variance = noise * (1.0 + torch.einsum("gbm,bmn->gbn", spread, cross.square()))
    # log det of the context's covariance, and its quadratic form, by Woodbury.
    count = x.shape[1]
    quadratic = (y.square().sum((1, 2)) - (spread * moments.square()).sum(-1)) / noise[..., 0]
    determinant = (count - FEATURES - 1) * noise[..., 0].log() + (noise + values).log().sum(-1)
    evidence = -0.5 * (quadratic + determinant + steps[..., 0].square())
    return _mixed(evidence, normal_log_likelihood(y_target, mean, variance))


def _mixed(evidence: Tensor, scores: Tensor) -> Tensor:
    """``evidence [G, B]`` and ``scores [G, B, N]`` to ``[B, N]``."""
    return (evidence.log_softmax(0).unsqueeze(-1) + scores).logsumexp(0)


def _midpoints(low: float, high: float, count: int, like: Tensor) -> Tensor:
    numbers = torch.arange(count, dtype=like.dtype, device=like.device)
    return low + (high - low) * (numbers + 0.5) / count


def _doubled(task: Task) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y, x_target, y_target = (
        rows.double() for rows in (task.x_context, task.y_context, task.x_target, task.y_target)
    )
    return x, y, x_target, y_target.squeeze(-1)
