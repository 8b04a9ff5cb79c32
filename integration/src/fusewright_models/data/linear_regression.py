"""Bayesian linear regression, whose exact predictive distribution is known.

    y = b + x beta + sigma e,  b, beta_j, e ~ N(0, 1),  log sigma ~ N(-1, 0.3^2),  x ~ N(0, I_10)

With phi = [1 ; x], Phi the context's rows and sigma known, A = I + Phi^T Phi / sigma^2 gives the
predictive mean phi A^-1 Phi^T y / sigma^2 and variance sigma^2 + phi A^-1 phi^T. The expected
log-likelihood per target tends to 1/2 - log(2 pi) / 2 = -0.4189 with a growing context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sizes import Size
from .task import Sampler, Task, normal_log_likelihood

FEATURES = 10
# Of log sigma.
NOISE_MEAN, NOISE_SPREAD = -1.0, 0.3


class LinearRegression(Sampler):
    """Linear functions of ten inputs under noise; the oracle knows the noise, not the weights.

    M and N are 64 where nothing else is asked for; the arguments are those of every sampler.
    """

    x_width = FEATURES
    default_context = Size(64, 64)
    reference = "exact posterior, noise known"

    def default_targets(self, context: int) -> Size:
        return Size(64, 64)

    def sample_sized(self, batch: int, context: int, targets: int) -> Task:
        points = context + targets
        intercept = self.normal(batch, 1, 1)
        slope = self.normal(batch, FEATURES, 1)
        sigma = (NOISE_MEAN + NOISE_SPREAD * self.normal(batch, 1, 1)).exp()
        x = self.normal(batch, points, FEATURES)
        y = intercept + x @ slope + sigma * self.normal(batch, points, 1)
        truth = {"sigma": sigma}
        return Task(x[:, :context], y[:, :context], x[:, context:], y[:, context:], truth)

    def predict(self, task: Task, x_target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y at ``x_target [B, N, 10]``, each ``[B, N, 1]``, fp64."""
        rows, targets = with_one(task.x_context.double()), with_one(x_target.double())
        rows, y = task.shown(rows), task.shown(task.y_context.double())
        variance = task.truth["sigma"].double().square()
        eye = torch.eye(FEATURES + 1, dtype=rows.dtype, device=rows.device)
        precision = eye + rows.mT @ rows / variance
        # cholesky() waits for the device to learn whether it succeeded; here it cannot fail.
        factor = torch.linalg.cholesky_ex(precision, check_errors=False).L
        moment = rows.mT @ y / variance
        mean = targets @ torch.cholesky_solve(moment, factor)
        spread = torch.linalg.solve_triangular(factor, targets.mT, upper=False)
        return mean, variance + spread.square().sum(1).unsqueeze(-1)

    def reference_log_likelihood(self, task: Task) -> Tensor:
        return normal_log_likelihood(task.y_target, *self.predict(task, task.x_target))


def with_one(x: Tensor) -> Tensor:
    """[1 ; x] of every row."""
    return torch.cat([torch.ones_like(x[..., :1]), x], dim=-1)
