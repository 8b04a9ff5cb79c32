"""Predictions of a TransformerNP in the units of a table: the context is read once, targets part
after part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from fusewright.mixture_head import GaussianMixtureHead
from torch import Tensor

from ..data.columns import Column, Columns
from ..models.transformer_np import TransformerNP, sample_jointly

# Targets that go through the model at once: 110 MB of the base preset's hidden values in its head.
CHUNK = 2048
# Of the orders of inputs: the same ones whenever they are asked for.
ORDERS_SEED = 0


class Predicted(NamedTuple):
    """Of n targets, fp64, in the units of the output.

    Attributes:
        mean: ``[n]``.
        standard_deviation: ``[n]``, of an observation.
        quantiles: ``[n, Q]``.
        log_probability: ``[n]``, of the given y, NaN where that is; None without y.
    """

    mean: np.ndarray
    standard_deviation: np.ndarray
    quantiles: np.ndarray
    log_probability: np.ndarray | None


class PredictedDistribution:
    """What is said of n targets: a mixture of normals for each, of which everything else is
    computed without the model, in fp64 and the units of the output.
    """

    def __init__(self, head: GaussianMixtureHead, output: Column, params: Tensor) -> None:
        """Take mixtures ``params [1, n, 1, K, 3]`` of standardised outputs."""
        self._head, self._output, self._params = head, output, params

    @property
    def mean(self) -> np.ndarray:
        """``[n]``."""
        return self._values(self._head.mean(self._params).flatten())

    @property
    def standard_deviation(self) -> np.ndarray:
        """``[n]``, of an observation."""
        return _numpy(self._head.variance(self._params).sqrt().flatten()) * self._output.scale

    def quantiles(self, levels: Sequence[float]) -> np.ndarray:
        """``[n, Q]``, of levels between 0 and 1."""
        return self._values(self._head.quantiles(self._params, levels)[0, :, 0])

    def log_prob(self, y: np.ndarray) -> np.ndarray:
        """log p(y) of the targets' ``y [n]``, in nats; NaN where that is.

        Raises:
            ValueError: y is of another number of targets.
        """
        y = np.asarray(y, dtype=np.float64)
        if y.shape != (wanted := (self._params.shape[1],)):
            raise ValueError(f"wanted y of shape {wanted}; got {y.shape}")
        # An unknown y has no probability; what stands in its place counts for nothing.
        asked = torch.from_numpy(np.nan_to_num(self._output.standardised(y)))
        log_p = self._head.log_likelihood(self._params, asked.to(self._params)[None, :, None])
        return np.where(np.isnan(y), np.nan, _numpy(log_p.flatten()) - math.log(self._output.scale))

    def sample(self, count: int, generator: torch.Generator) -> np.ndarray:
        """``[n, count]`` draws, each target and each draw on its own."""
        many = self._params.unsqueeze(-3)
        many = many.expand(*many.shape[:-3], count, *many.shape[-2:])
        return self._values(self._head.sample(many, generator=generator).reshape(-1, count))

    def _values(self, standardised: Tensor) -> np.ndarray:
        """Outputs in their own units."""
        return _numpy(standardised) * self._output.scale + self._output.mean


class Predictor:
    """A model that has read a context.

    Args:
        model: of one output, in evaluation mode; it computes in the dtype and on the device of its
            parameters.
        columns: the scales of inputs and output. Inputs of the model beyond those are 0.
        x: ``[M, d_x]``, M >= 1, context inputs in their own units, fp64.
        y: ``[M]``, fp64.
        chunk: targets that go through the model at once. It changes no prediction but for rounding.
        orders: in how many orders the model sees its inputs, the first of them as they come; what
            is predicted is the mixture of all, each as likely. For models that were trained on
            inputs in any order.
    """

    def __init__(
        self,
        model: TransformerNP,
        columns: Columns,
        x: np.ndarray,
        y: np.ndarray,
        *,
        chunk: int = CHUNK,
        orders: int = 1,
    ) -> None:
        self.model, self.columns, self.chunk = model, columns, chunk
        generator, width = torch.Generator().manual_seed(ORDERS_SEED), model.config.x_width
        others = [torch.randperm(width, generator=generator) for _ in range(orders - 1)]
        self.orders = [torch.arange(width), *others]
        self.x = self._inputs(x)
        self.y = self._tensor(columns.output.standardised(y)).unsqueeze(-1)
        with torch.no_grad():
            self.context = model.encode(self._ordered(self.x), self.y.expand(orders, -1, -1))

    def predict(
        self, x: np.ndarray, *, quantiles: Sequence[float] = (), y: np.ndarray | None = None
    ) -> Predicted:
        """Of targets ``x [n, d_x]``, n >= 0, and their ``y [n]`` where these are known."""
        parts: list[list[np.ndarray]] = []
        for first, part in self._parts(x):
            found = [part.mean, part.standard_deviation, part.quantiles(quantiles)]
            if y is not None:
                found.append(part.log_prob(y[first : first + self.chunk]))
            parts.append(found)
        if not parts:
            nothing, none = np.empty(0), np.empty((0, len(quantiles)))
            return Predicted(nothing, nothing, none, None if y is None else nothing)
        mean, deviation, of_levels, *rest = map(np.concatenate, zip(*parts, strict=True))
        return Predicted(mean, deviation, of_levels, rest[0] if rest else None)

    def distribution(self, x: np.ndarray) -> PredictedDistribution:
        """Of targets ``x [n, d_x]``, all at once: 12 K bytes each in fp32, of K components."""
        model = self.model
        none = self.y.new_empty(1, 0, 1, model.config.components * len(self.orders), 3)
        found = torch.cat([none, *(params for _, params in self._params(x))], 1)
        return PredictedDistribution(model.head, self.columns.output, found)

    def sample(self, x: np.ndarray, count: int, generator: torch.Generator) -> np.ndarray:
        """``[n, count]`` draws, fp64, each target and each draw on its own."""
        parts = [part.sample(count, generator) for _, part in self._parts(x)]
        return np.concatenate([np.empty((0, count)), *parts])

    def sample_jointly(
        self, x: np.ndarray, count: int, generator: torch.Generator, *, permuted: bool = False
    ) -> np.ndarray:
        """``[n, count]`` draws, fp64, of all targets together, each of them in its turn added to
        the context, for each draw in an order of its own where ``permuted``; the inputs as they
        come.
        """
        if not len(x):
            return np.empty((0, count))
        rows = [each.expand(count, -1, -1) for each in (self.x, self.y, self._inputs(x))]
        drawn = sample_jointly(self.model, *rows, permuted=permuted, generator=generator).y
        return _numpy(drawn.squeeze(-1).mT) * self.columns.output.scale + self.columns.output.mean

    def _parts(self, x: np.ndarray) -> Iterator[tuple[int, PredictedDistribution]]:
        """Of each part the number of its first target, and what is said of it."""
        head, output = self.model.head, self.columns.output
        for first, params in self._params(x):
            yield first, PredictedDistribution(head, output, params)

    @torch.no_grad()
    def _params(self, x: np.ndarray) -> Iterator[tuple[int, Tensor]]:
        """Of each part the number of its first target, and its mixtures ``[1, n, 1, G K, 3]``."""
        for first in range(0, len(x), self.chunk):
            targets = self._ordered(self._inputs(x[first : first + self.chunk]))
            yield first, _mixed(self.model.decode(self.context, targets))

    def _ordered(self, x: Tensor) -> Tensor:
        """``x [1, n, d_x]`` in every order, ``[orders, n, d_x]``."""
        return torch.cat([x[..., order.to(x.device)] for order in self.orders])

    def _inputs(self, x: np.ndarray) -> Tensor:
        """``x [n, d_x]`` as the model takes it, ``[1, n, inputs of the model]``."""
        scaled = self.columns.standardised_inputs(x)
        absent = self.model.config.x_width - scaled.shape[1]
        return self._tensor(np.pad(scaled, ((0, 0), (0, absent))))

    def _tensor(self, values: np.ndarray) -> Tensor:
        """``values [...]`` as one task, ``[1, ...]``."""
        like = self.model.embedder.hidden.weight
        return torch.from_numpy(values).to(like.dtype).to(like.device).unsqueeze(0)


def _numpy(found: Tensor) -> np.ndarray:
    """In fp64, on the host."""
    return found.double().cpu().numpy()


def _mixed(params: Tensor) -> Tensor:
    """Mixtures ``[G, n, 1, K, 3]`` as one of all their components, ``[1, n, 1, G K, 3]``."""
    if len(params) == 1:
        return params
    logits, *rest = params.unbind(-1)
    # Each has weights that add up to 1.
    whole = torch.stack([logits.log_softmax(-1), *rest], dim=-1)
    return whole.movedim(0, -3).flatten(-3, -2).unsqueeze(0)
