"""Tasks of many kinds of functions and noises, standardised by their context.

    y = sqrt(1 - s) f(x) + sqrt(s) h(x) e

f is one of six functions of its columns, a weighted sum of two or a product of two, bent or not,
with variance 1 over the points of a task; h is 1 or goes with another function, with mean square 1;
e is normal, Student's t or skewed, with variance 1; the share s of the noise is from 0 to 0.95.

Columns of x, and y, are less the mean of the context and over its standard deviation, as
`TransformerNPRegressor` takes rows: a network trained on these tasks sees nothing else. A few rows
may be nearly equal, and a target a thousand of their standard deviations away, whose loss would be
that of all others together: beyond 10 of them, targets grow as the logarithm does. Everything
is drawn for all tasks of a batch at once, and what a task does not take is not looked at: no task
is chosen by the host.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..sizes import Size
from ..task import Sampler, Task, normal_log_likelihood
from .draws import chance, choice, log_uniform, mean_square, one_of
from .functions import SHARES, draw_functions
from .inputs import draw_inputs
from .scales import scales_of, standardised

# Columns that the network has; a task has one to all of them, at any places.
INPUTS = 10
TARGETS = 64
# alone, a sum, a product
COMBINED = (0.5, 0.28, 0.22)
# as it is, exponential, hyperbolic sine, tanh, distance
BENT = (0.68, 0.12, 0.05, 0.07, 0.08)
# Of tasks: those whose noise differs from point to point.
HETEROSCEDASTIC = 0.35
# normal, Student's t, skewed
NOISES, FREEDOM = (0.65, 0.27, 0.08), (3, 5)
MOST_NOISE, LEAST_NOISE = 0.95, 1e-4
SKEW = 0.7
# Targets are as they are up to so many standard deviations of the context.
FARTHEST = 10.0
# Functions go so far, in standard deviations, into an exponential.
REACH = 3.0


class PriorTasks(Sampler):
    """Tables of one to ten columns, of functions of many kinds; the arguments are those of every
    sampler.

    M is from 5 to 1000, its logarithm uniform; N is 64.
    """

    x_width = INPUTS
    default_context = Size(5, 1000)
    reference = "normal distribution of the context's y"

    def default_targets(self, context: int) -> Size:
        return Size(TARGETS, TARGETS)

    def draw_sizes(self) -> tuple[int, int]:
        if self.ragged:
            return super().draw_sizes()
        context = self.size_at(self.host_generator.random())
        targets = self.target_size or self.default_targets(context)
        return context, targets.draw(self.host_generator)

    def size_at(self, u: float) -> int:
        """The M that a share ``u`` of the draws is below."""
        low, high = self.contexts.low, self.contexts.high
        return min(high, int(low * ((high + 1) / low) ** u))

    def draw_lengths(self, batch: int, context: int) -> Tensor:
        low = self.contexts.low
        size = low * ((context + 1) / low) ** self.uniform(0.0, 1.0, batch)
        return size.long().clamp(max=context)

    def sample_sized(self, batch: int, context: int, targets: int) -> Task:
        x, active = draw_inputs(self, batch, context + targets, INPUTS)
        functions = standardised(draw_functions(self, x, active))
        y = self._observed(self._value(functions), functions)
        y = torch.where(chance(self, 0.5, batch, 1, 1), y, -y)
        return Task(x[:, :context], y[:, :context], x[:, context:], y[:, context:])

    def finished(self, task: Task) -> Task:
        x_mean, x_scale = scales_of(task.x_context, task.context_lengths)
        y_mean, y_scale = scales_of(task.y_context, task.context_lengths)
        return replace(
            task,
            x_context=(task.x_context - x_mean) / x_scale,
            y_context=(task.y_context - y_mean) / y_scale,
            x_target=(task.x_target - x_mean) / x_scale,
            y_target=_compressed((task.y_target - y_mean) / y_scale),
        )

    def predict(self, task: Task, x_target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the context's y for every target ``x_target [B, N, d_x]``, each
        ``[B, N, 1]``, fp64.
        """
        mean, scale = scales_of(task.y_context.double(), task.context_lengths)
        size = mean.shape[0], x_target.shape[1], 1
        return mean.expand(size), scale.square().expand(size)

    def reference_log_likelihood(self, task: Task) -> Tensor:
        return normal_log_likelihood(task.y_target, *self.predict(task, task.x_target))

    def _picked(self, functions: Tensor) -> Tensor:
        """One function of each task, ``[B, P, 1]``."""
        number = choice(self, SHARES, len(functions), 1, 1)
        return functions.gather(2, number.expand(-1, functions.shape[1], 1))

    def _value(self, functions: Tensor) -> Tensor:
        """f of every point, ``[B, P, 1]``, with mean 0 and variance 1."""
        batch = len(functions)
        one, other = self._picked(functions), self._picked(functions)
        how = choice(self, COMBINED, batch, 1, 1)
        added = one + self.uniform(0.0, 1.0, batch, 1, 1) * other
        product = (one + self.normal(batch, 1, 1)) * (other + self.normal(batch, 1, 1))
        f = torch.where(how == 0, one, torch.where(how == 1, added, product))
        return standardised(self._bent(standardised(f)))

    def _bent(self, f: Tensor) -> Tensor:
        batch = len(f)
        how = choice(self, BENT, batch, 1, 1)
        strength = self.uniform(0.3, 1.2, batch, 1, 1)
        bounded = strength * f.clamp(-REACH, REACH)
        distance = (f - self.normal(batch, 1, 1)).abs()
        bends = bounded.exp(), bounded.sinh(), (2.0 * bounded).tanh(), distance
        for number, bent in enumerate(bends, 1):
            f = torch.where(how == number, bent, f)
        return f

    def _observed(self, f: Tensor, functions: Tensor) -> Tensor:
        """``f [B, P, 1]`` under its noise."""
        batch, points, _ = f.shape
        share = torch.where(
            chance(self, 0.5, batch, 1, 1),
            self.uniform(0.0, MOST_NOISE, batch, 1, 1),
            log_uniform(self, LEAST_NOISE, MOST_NOISE, batch, 1, 1),
        )
        differs = self.uniform(0.2, 1.0, batch, 1, 1) * chance(self, HETEROSCEDASTIC, batch, 1, 1)
        profile = (differs * self._picked(functions).clamp(-REACH, REACH)).exp()
        profile = profile / profile.square().mean(1, keepdim=True).sqrt()
        noise = share.sqrt() * profile * self._noise(batch, points)
        return (1.0 - share).sqrt() * f + noise

    def _noise(self, batch: int, points: int) -> Tensor:
        """Of mean 0 and variance 1, ``[B, P, 1]``."""
        normal = self.normal(batch, points, 1)
        freedom = one_of(self, FREEDOM, batch, 1, 1)
        square = mean_square(self, freedom, max(FREEDOM), batch, points, 1)
        student = normal / square.sqrt() * ((freedom - 2.0) / freedom).sqrt()
        grown = math.exp(SKEW**2)
        skewed = ((SKEW * normal).exp() - math.sqrt(grown)) / math.sqrt(grown * (grown - 1.0))
        kind = choice(self, NOISES, batch, 1, 1)
        return torch.where(kind == 0, normal, torch.where(kind == 1, student, skewed))


def _compressed(y: Tensor) -> Tensor:
    distance = y.abs()
    far = FARTHEST + (distance - FARTHEST).clamp(min=0.0).log1p()
    return torch.where(distance > FARTHEST, y.sign() * far, y)
