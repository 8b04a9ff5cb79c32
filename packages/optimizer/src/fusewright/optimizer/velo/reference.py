r"""VeLO in plain torch: the features of elements, tensors and losses, and the update.

Statistics are those of ``common.statistics.reference`` with the decays as they start, of a gradient
with weight decay added, clipped to 1000: g' = clip(g + wd x, -1000, 1000), and the loss is L + wd
sum x^2. Features of each element, each divided by its root mean square over the tensor, are 30:

    g, clip(g, -.1, .1), x, m_i, v, m_i s, s, g R_i C_i, g s,
    r_i, c_i, (r_i + 1e-8)^-1/2, (c_i + 1e-8)^-1/2, m_i R_i C_i

with s = (v + 1e-6)^-1/2, and for tensors of fewer than two axes m_i r_i^-1/2 in place of m_i R_i
C_i. Where the two longest axes are of one length, the earlier counts as the longest, but of the
first two of four axes the later. Those of a tensor are 30 too, from its values before the step,
means over the tensor, and n = max(mean x^2, 1e-9)^-1/2:

    tanh(10 (t / T - tau_k)), tau = .03, .1, .2, .4, .6, .8, .9, 1, 1.1     t steps of T were taken
    losses: where nine of ten means of L lie between their lowest and the next slower mean
    l(n mean v)       l(x) = clip(log(1e-8 + 10 |x|), -5, 5) / 2
    how many axes are longer than 1, as one of five
    l(n^2 mean (m_i - mean m_i)^2), l(n^2 mean (v - mean m_i)^2)

An LSTM of each tensor makes of them controls c of 256 banks of weights and a multiplier a:

    W = 100 mean_k c_k W_k and so for all weights and biases of a perceptron 30 -> 4 -> 4 -> 3
    (d, e, unused) = W3 relu(W2 relu(W1 f + b1) + b2) + b3
    x' = x - lr a sqrt(mean x^2 + 1e-9) d exp(.001 e) .001

Metz et al., VeLO, arXiv 2211.09760, and HyperV2 of google/learned_optimization, whose wrapper for
pretrained ones has the weight decay; Janson et al., PyLO, arXiv 2506.10315.
"""

# Where PyLO differs this is the original: PyLO's decay is decoupled, and it raises for more than
# four axes. Of axes of one length the original takes the later for the longer, on matrices [inputs,
# outputs]: the earlier here, and in PyLO. Of the first two of four axes PyLO takes the later.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..common.statistics.reference import (
    START_DECAYS,
    Decays,
    Statistics,
    Weights,
    perceptron,
)
from ..common.tables import upload

Tensor = torch.Tensor
ELEMENT_FEATURES = 30
TENSOR_FEATURES = 30
# Of the perceptron of each element.
WIDTH, OUTPUTS = 4, 3
# Its weights and biases, in the order of the layers.
SHAPES = (
    (WIDTH, ELEMENT_FEATURES),
    (WIDTH,),
    (WIDTH, WIDTH),
    (WIDTH,),
    (OUTPUTS, WIDTH),
    (OUTPUTS,),
)
SIZES = tuple(torch.Size(shape).numel() for shape in SHAPES)
BOUND = 1000.0
FRACTIONS = (0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1)
LOSS_MEANS = 10
RANKS = 5
# Before there is a loss.
HIGHEST = 999999999999.0


class LossStatistics(NamedTuple):
    """What VeLO keeps of the losses, in fp64.

    Attributes:
        step: how many there were, 0-d.
        means: ``[10]``: running means that start at 0, the fastest first.
        lowest: ``[10]``: the lowest that each was, corrected for its start.
    """

    step: Tensor
    means: Tensor
    lowest: Tensor


class Moments(NamedTuple):
    """Of tensors before a step, fp64.

    Attributes:
        p2: ``[tensors]``: mean x^2.
        mean_m, var_m: ``[tensors, 3]``: of the momenta.
        mean_v, var_v: ``[tensors]``: of the mean squares.
    """

    p2: Tensor
    mean_m: Tensor
    var_m: Tensor
    mean_v: Tensor
    var_v: Tensor


class Constants(NamedTuple):
    """Numbers that VeLO's step reads on a device, fp64.

    Attributes:
        loss_decays: ``[10]``: exp(-1 / h) for h from 10 to num_steps, evenly in their logarithms.
        fractions: ``[9]``: the tau of progress.
    """

    loss_decays: Tensor
    fractions: Tensor


def constants_on(device: torch.device, num_steps: int) -> Constants:
    last = math.log10(num_steps)
    lives = [10.0 ** (1.0 + (last - 1.0) * k / (LOSS_MEANS - 1)) for k in range(LOSS_MEANS)]
    decays = [math.exp(-1.0 / life) for life in lives]
    return Constants(*(upload(some, torch.float64, device) for some in (decays, FRACTIONS)))


def start_decays(device: torch.device) -> Decays:
    """The statistics' decays, which nothing learns."""
    return Decays(*(upload(some, torch.float64, device) for some in START_DECAYS))


def new_loss_statistics(device: torch.device) -> LossStatistics:
    """Before the first loss."""
    means = torch.zeros(LOSS_MEANS, dtype=torch.float64, device=device)
    return LossStatistics(means.new_zeros(()), means, torch.full_like(means, HIGHEST))


def advanced_losses(before: LossStatistics, loss: Tensor, decays: Tensor) -> LossStatistics:
    """After one more loss, which is clipped to twice the highest mean's size."""
    t = before.step + 1.0
    correction = 1.0 - decays**t
    highest = (before.means / correction).amax()
    bound = 2.0 * torch.where(before.step == 0.0, loss, highest).abs()
    means = decays * before.means + (1.0 - decays) * torch.minimum(bound, loss)
    return LossStatistics(t, means, torch.minimum(before.lowest, means / correction))


def loss_features(losses: LossStatistics, decays: Tensor) -> Tensor:
    """``[9]``: 0 where a mean is as high as the next slower one, -1 where it is at its lowest;
    zeros in the first two steps.
    """
    means = losses.means / (1.0 - decays**losses.step)
    faster, slower, lowest = means[:-1], means[1:], losses.lowest[:-1]
    features = (faster - lowest) / (slower - lowest).clamp(min=1e-8) - 1.0
    return features.clamp(-1.0, 1.0).masked_fill(losses.step <= 2.0, 0.0)


def moments_of(p: Tensor, statistics: Statistics) -> Moments:
    """Of one tensor, from its statistics before the step."""
    m = statistics.momenta.reshape(3, -1)
    v = statistics.square.reshape(-1)
    var_m, mean_m = torch.var_mean(m, 1, correction=0)
    var_v, mean_v = torch.var_mean(v, 0, correction=0)
    p2 = p.to(v.dtype).square().mean()
    return Moments(*(x.double()[None] for x in (p2, mean_m, var_m, mean_v, var_v)))


def moment_sums(p: Tensor, statistics: Statistics) -> Tensor:
    """``[9]`` in fp64: sums over some elements of x^2, m_i, v, m_i^2 and v^2."""
    m, v = statistics.momenta.reshape(3, -1).double(), statistics.square.reshape(-1).double()
    sums = p.double().square().sum()[None], m.sum(1), v.sum()[None]
    return torch.cat((*sums, m.square().sum(1), v.square().sum()[None]))


def moments_from(sums: Tensor, count: int) -> Moments:
    """``moments_of`` from ``moment_sums`` over all ``count`` elements; squares of fp32 are exact in
    fp64, where a variance is the difference of two means.
    """
    p2, mean_m, mean_v, square_m, square_v = (sums / count)[None].split((1, 3, 1, 3, 1), 1)
    var_m, var_v = square_m - mean_m.square(), square_v - mean_v.square()
    return Moments(p2[:, 0], mean_m, var_m, mean_v[:, 0], var_v[:, 0])


def progress_features(fraction: Tensor, fractions: Tensor) -> Tensor:
    """``[9]`` of what fraction of all steps was taken, 0-d."""
    return torch.tanh(10.0 * (fraction - fractions))


def rank_features(shapes: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``[tensors, 5]``: how many axes are longer than 1, as one of five; of more than four none."""
    longer = [sum(length > 1 for length in shape) for shape in shapes]
    lines = [[float(count == rank) for rank in range(RANKS)] for count in longer]
    return upload([x for line in lines for x in line], torch.float64, device).view(-1, RANKS)


def tensor_features(moments: Moments, ranks: Tensor, progress: Tensor, losses: Tensor) -> Tensor:
    """``[tensors, 30]``, fp64: what the LSTM sees, of ``rank_features``, ``progress_features`` and
    ``loss_features``.
    """
    tensors = len(ranks)
    n2 = moments.p2.clamp(min=1e-9).reciprocal()[:, None]
    mean_v, var_v = moments.mean_v[:, None], moments.var_v[:, None]
    about_m = var_v + (mean_v - moments.mean_m).square()
    return torch.cat(
        (
            *(progress.expand(tensors, -1), losses.expand(tensors, -1)),
            *(log_size(n2.sqrt() * mean_v), ranks),
            *(log_size(n2 * moments.var_m), log_size(n2 * about_m)),
        ),
        1,
    )


def log_size(x: Tensor) -> Tensor:
    return 0.5 * torch.log(1e-8 + 10.0 * x.abs()).clamp(-5.0, 5.0)


def decayed_gradient(g: Tensor, p: Tensor, weight_decay: float | Tensor) -> Tensor:
    """The gradient with weight decay added, clipped to 1000."""
    return (g + weight_decay * p).clamp(-BOUND, BOUND)


def step_of(
    weights: Weights, features: Tensor, scale: Tensor, exp_mult: float, step_mult: float
) -> Tensor:
    """``[*shape]``: what lr times is taken off p.

    Args:
        weights: of this tensor's perceptron: ``[4, 30]``, ``[4]``, ``[4, 4]``, ``[4]``, ``[3, 4]``
            and ``[3]``.
        features: ``[*shape, 30]``, normalised, of the gradient of ``decayed_gradient`` and of
            statistics that have seen it.
        scale: 0-d: a sqrt(mean x^2 + 1e-9).
    """
    direction, magnitude, _ = perceptron(features, weights).unbind(-1)
    return scale.to(features.dtype) * direction * torch.exp(exp_mult * magnitude) * step_mult


def scales_of(multipliers: Tensor, moments: Moments) -> Tensor:
    """``[tensors]``, fp64: the LSTM's multipliers times the parameters' root mean squares."""
    return multipliers.double() * (moments.p2 + 1e-9).sqrt()


def split(mixed: Tensor) -> Weights:
    """Of a tensor's ``[159]``: weights and biases of its perceptron."""
    parts = mixed.split(SIZES)
    return Weights(*(x.view(shape) for x, shape in zip(parts, SHAPES, strict=True)))
