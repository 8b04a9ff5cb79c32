"""Predictions of a TransformerNP in the units of a table: the context is read once, targets part
after part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.columns import Columns
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
        head, output = self.model.head, self.columns.output
        parts: list[list[Tensor]] = []
        for first, params in self._params(x):
            moments = [head.mean(params), head.variance(params).sqrt()]
            found = [*moments, head.quantiles(params, quantiles).squeeze(-2)]
            if y is not None:
                # An unknown y has no probability; what stands in its place counts for nothing.
                part = output.standardised(y[first : first + self.chunk])
                asked = self._tensor(np.nan_to_num(part)).unsqueeze(-1)
                log_p = head.log_likelihood(params, asked)
                found.append(
                    torch.where(self._tensor(np.isnan(part))[..., None] > 0, np.nan, log_p)
                )
            parts.append([each.squeeze(0).double().cpu() for each in found])
        if not parts:
            nothing, none = np.empty(0), np.empty((0, len(quantiles)))
            return Predicted(nothing, nothing, none, None if y is None else nothing)
        columns = [torch.cat(each).numpy() for each in zip(*parts, strict=True)]
        return Predicted(
            columns[0][:, 0] * output.scale + output.mean,
            columns[1][:, 0] * output.scale,
            columns[2] * output.scale + output.mean,
            None if y is None else columns[3][:, 0] - math.log(output.scale),
        )

    def sample(self, x: np.ndarray, count: int, generator: torch.Generator) -> np.ndarray:
        """``[n, count]`` draws, fp64, each target and each draw on its own."""
        output = self.columns.output
        parts = [np.empty((0, count))]
        for _, params in self._params(x):
            many = params.unsqueeze(-3).expand(*params.shape[:-2], count, *params.shape[-2:])
            drawn = self.model.head.sample(many, generator=generator)
            parts.append(drawn.reshape(-1, count).double().cpu().numpy())
        return np.concatenate(parts) * output.scale + output.mean

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
        values: np.ndarray = drawn.squeeze(-1).mT.double().cpu().numpy()
        return values * self.columns.output.scale + self.columns.output.mean

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


def _mixed(params: Tensor) -> Tensor:
    """Mixtures ``[G, n, 1, K, 3]`` as one of all their components, ``[1, n, 1, G K, 3]``."""
    if len(params) == 1:
        return params
    logits, *rest = params.unbind(-1)
    # Each has weights that add up to 1.
    whole = torch.stack([logits.log_softmax(-1), *rest], dim=-1)
    return whole.movedim(0, -3).flatten(-3, -2).unsqueeze(0)
