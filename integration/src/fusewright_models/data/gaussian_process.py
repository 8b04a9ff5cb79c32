"""One-dimensional Gaussian-process regression.

    y ~ N(0, K + 0.02^2 I),  x ~ U[-2, 2],  length l ~ U[0.1, 0.6],  s ~ U[0.1, 1]
    rbf        k(r) = s^2 exp(-r^2 / (2 l^2))
    matern     k(r) = s^2 (1 + a + a^2 / 3) exp(-a),  a = sqrt(5) r / l          (Matern 5/2)
    periodic   k(r) = s^2 exp(-2 sin^2(pi r / p) / l^2),  p ~ U[0.1, 0.5]

with M ~ U{3 ... 46} and N ~ U{3 ... 49 - M}, the generator of https://arxiv.org/abs/2207.04179.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .sizes import Size
from .task import Sampler, Task, normal_log_likelihood

Kernel = Literal["rbf", "matern", "periodic"]
KERNELS = get_args(Kernel)

NOISE = 0.02
# What the parameters are drawn from, uniformly.
LENGTHS, SCALES, PERIODS = (0.1, 0.6), (0.1, 1.0), (0.1, 0.5)
MOST_POINTS = 49
FEWEST_TARGETS = 3


def covariance(
    kernel: Kernel, x: Tensor, x_other: Tensor, length: Tensor, scale: Tensor, period: Tensor
) -> Tensor:
    """k(x, x'), noise left out.

    Args:
        kernel: "rbf", "matern" or "periodic".
        x: ``[B, P, 1]``.
        x_other: ``[B, Q, 1]``.
        length: ``[B, 1, 1]``, as are ``scale`` and ``period``.
        scale: s, the standard deviation of the function.
        period: p, read by the periodic kernel alone.

    Returns:
        ``[B, P, Q]``.
    """
    r = (x - x_other.mT).abs()
    if kernel == "rbf":
        shape = (-0.5 * (r / length).square()).exp()
    elif kernel == "matern":
        a = math.sqrt(5.0) * r / length
        shape = (1.0 + a + a.square() / 3.0) * (-a).exp()
    else:
        shape = (-2.0 * ((math.pi * r / period).sin() / length).square()).exp()
    return scale.square() * shape


@dataclass(eq=False)
class GaussianProcess(Sampler):
    """Functions drawn from a Gaussian process; the oracle knows kernel, parameters and noise.

    Args:
        kernel: "rbf", "matern" or "periodic".
        context_size: M; by default uniform from 3 to 46.
        target_size: N; by default uniform from 3 to 49 - M.
        ragged: a context size for each task, within one batch, whose tasks have one N; by default
            M and N of a task are together distributed as above.
        device: where the tasks are made.
        seed: of both generators.
    """

    x_width = 1
    default_context = Size(3, 46)
    reference = "Gaussian process with the true parameters"

    kernel: Kernel = "rbf"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {KERNELS}; got {self.kernel!r}")
        if self.target_size is None and self.contexts.high > MOST_POINTS - FEWEST_TARGETS:
            raise ValueError(
                f"{MOST_POINTS} points in all, {FEWEST_TARGETS} or more of them targets, leave at "
                f"most {MOST_POINTS - FEWEST_TARGETS} for the context; got a context size of up to "
                f"{self.contexts.high}: give a target size as well"
            )

    def default_targets(self, context: int) -> Size:
        return Size(FEWEST_TARGETS, MOST_POINTS - context)

    # Where a ragged batch has the default sizes, N is drawn as that of a task alone, then each M by
    #     P(M | N) ~ P(N | M) = 1 / (47 - M)      M <= 49 - N.

    def draw_sizes(self) -> tuple[int, int]:
        if not self.ragged or self.target_size is not None:
            return super().draw_sizes()
        context = self.contexts.draw(self.host_generator)
        targets = self.default_targets(context).draw(self.host_generator)
        return min(self.contexts.high, MOST_POINTS - targets), targets

    def sizes(self) -> dict[int, Size]:
        if not self.ragged or self.target_size is not None:
            return super().sizes()
        low, high = self.contexts.low, self.contexts.high
        # N decides M, but for those beside which any context has room.
        sizes = {
            number: Size(MOST_POINTS - number, MOST_POINTS - number) for number in range(low, high)
        }
        return sizes | {high: Size(FEWEST_TARGETS, MOST_POINTS - high)}

    def draw_lengths(self, batch: int, context: int) -> Tensor:
        if self.target_size is not None:
            return super().draw_lengths(batch, context)
        length = torch.arange(self.contexts.low, context + 1, device=self.device)
        choices_of_targets = MOST_POINTS - FEWEST_TARGETS + 1 - length
        # Of clocks that ring at rates P(N | M) the first one is M's with probability P(M | N).
        rings = torch.empty(batch, len(length), device=self.device)
        rings = rings.exponential_(generator=self.generator) * choices_of_targets
        return length[rings.argmin(1)]

    def sample_sized(self, batch: int, context: int, targets: int) -> Task:
        return self.sample_at(self.uniform(-2.0, 2.0, batch, context + targets, 1), context)

    def sample_at(self, x: Tensor, context: int) -> Task:
        """Functions at given inputs ``x [B, M + N, 1]``, the first ``context`` of them shown."""
        batch, points, _ = x.shape
        truth = {
            "length": self.uniform(*LENGTHS, batch, 1, 1),
            "scale": self.uniform(*SCALES, batch, 1, 1),
            "period": self.uniform(*PERIODS, batch, 1, 1),
        }
        # The noise keeps the smallest eigenvalue at 4e-4, and fp64 keeps it there for many points.
        matrix = covariance(self.kernel, x.double(), x.double(), **_doubled(truth))
        factor = _factor(matrix)
        y = (factor @ self.normal(batch, points, 1).double()).float()
        return Task(x[:, :context], y[:, :context], x[:, context:], y[:, context:], truth)

    def predict(self, task: Task, x_target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y under the true parameters at ``x_target [B, N, 1]``.

        Each ``[B, N, 1]``, fp64; the variance is that of an observation, noise included.
        """
        x, x_target, truth = task.x_context.double(), x_target.double(), _doubled(task.truth)
        # Points that a task does not have are independent of all others, and say nothing.
        matrix = task.shown(task.shown(covariance(self.kernel, x, x, **truth)).mT)
        cross = task.shown(covariance(self.kernel, x, x_target, **truth))
        factor, y = _factor(matrix), task.shown(task.y_context.double())
        explained = torch.linalg.solve_triangular(factor, cross, upper=False)
        whitened = torch.linalg.solve_triangular(factor, y, upper=False)
        mean = explained.mT @ whitened
        prior = task.truth["scale"].double().square() + NOISE**2
        return mean, prior - explained.square().sum(1).unsqueeze(-1)

    def reference_log_likelihood(self, task: Task) -> Tensor:
        return normal_log_likelihood(task.y_target, *self.predict(task, task.x_target))


def _factor(matrix: Tensor) -> Tensor:
    """The Cholesky factor of a covariance and the noise."""
    noise = NOISE**2 * torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    # cholesky() waits for the device to learn whether it succeeded; here it cannot fail.
    return torch.linalg.cholesky_ex(matrix + noise, check_errors=False).L


def _doubled(truth: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in truth.items()}
