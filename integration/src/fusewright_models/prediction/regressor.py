"""TransformerNP as a regressor of scikit-learn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from ..data.columns import Column, Columns
from ..devices import usable_device
from ..models.transformer_np import TransformerNP
from .predictor import CHUNK, Predicted, PredictedDistribution, Predictor
from .trained import PRETRAINED, load_trained

Scaling = Literal["auto", "rows", "none"]
Width = Literal["float32", "float64"]
LARGEST_DRAWN_SEED = 2**31 - 1
# Of the network that comes with the package, whose training drew the places of columns.
ORDERS = 8


class TransformerNPRegressor(RegressorMixin, BaseEstimator):
    """A regressor whose ``fit`` trains nothing: it keeps the rows that it is given, and a trained
    TransformerNP predicts others from them.

    Args:
        model: folder of a run, folder or repository of ``save_pretrained``, or a TransformerNP, of
            one output; None is the network that comes with the package, for up to ten columns,
            trained on functions of many kinds. A model whose columns had names when it was trained
            takes these columns; one without takes as many as it has inputs or fewer, and reads 0 in
            the place of others.
        scaling: "auto" takes the scales that the columns had in training, and where they had none
            those of the rows in ``fit``: each column less its mean, over its standard deviation.
            "rows" always takes these, "none" takes numbers as they are.
        orders: in how many orders the model sees the columns, whose predictions are mixed; None is
            8 for the network that comes with the package, and 1 for others: only a model that was
            trained on columns in any order bears more.
        chunk: rows that are predicted at once; changes nothing but for rounding.
        dtype: "float32" or "float64", in which everything is computed.
        device: a device of torch.

    Attributes:
        predictor_: the model, having read the rows of ``fit``.
        n_features_in_: columns of X.
        feature_names_in_: their names, where X has some.

    Example:
        >>> regressor = TransformerNPRegressor().fit(X, y)    # or of "runs/my-run"
        >>> mean, std = regressor.predict(X_new, return_std=True)
        >>> said = regressor.predict_distribution(X_new)      # said.mean, said.log_prob(y_new)
        >>> draws = regressor.sample(X_new, 10)                    # [rows, 10]
    """

    def __init__(
        self,
        model: TransformerNP | Path | str | None = None,
        *,
        scaling: Scaling = "auto",
        orders: int | None = None,
        chunk: int = CHUNK,
        dtype: Width = "float32",
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.scaling = scaling
        self.orders = orders
        self.chunk = chunk
        self.dtype = dtype
        self.device = device

    def fit(self, X: Any, y: Any) -> Self:
        """Keep rows ``X [n, columns]`` and ``y [n]`` as context.

        Raises:
            TypeError: ``model`` is no such thing.
            OSError: there is no model there.
            ValueError: a parameter has a value that it cannot have, the model cannot be read, or
                rows are not numbers, none, not finite, or of other columns than the model's.
        """
        self._check_parameters()
        x, known = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        model, trained = self._loaded()
        columns = self._columns(model, trained, x, known)
        rows, orders = (x, known.astype(np.float64)), self._orders(trained)
        self.predictor_ = Predictor(model, columns, *rows, chunk=self.chunk, orders=orders)
        return self

    def predict(
        self, X: Any, return_std: bool = False, quantiles: Sequence[float] | None = None
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """The mean of each row, ``[n]``; beside it, where they are asked for, the standard
        deviation of an observation ``[n]``, then quantiles ``[n, Q]``.

        Raises:
            NotFittedError: before ``fit``.
            ValueError: rows are as ``fit`` would refuse them, or of other columns than there.
        """
        found = self._predicted(X, quantiles=quantiles or ())
        every = [found.mean]
        if return_std:
            every.append(found.standard_deviation)
        if quantiles is not None:
            every.append(found.quantiles)
        return every[0] if len(every) == 1 else tuple(every)

    def predict_distribution(self, X: Any) -> PredictedDistribution:
        """What is said of each row, from one pass of the model: ``mean``, ``standard_deviation``,
        ``quantiles(levels)`` and ``log_prob(y)`` of it are those of the methods of this class,
        which take a pass each; errors as of ``predict``.
        """
        x = self._checked(X)
        return self.predictor_.distribution(x)

    def sample(
        self,
        X: Any,
        n: int = 1,
        *,
        joint: bool = False,
        permuted: bool = False,
        random_state: Any = None,
    ) -> np.ndarray:
        """``[rows, n]`` draws; errors as of ``predict``.

        Args:
            X: rows.
            n: draws of each, 1 or more.
            joint: whether the rows of a draw belong together, each in its turn added to the
                context: one call of the model for each row. Otherwise each row is on its own.
            permuted: with ``joint``, in an order of its own for each draw.
            random_state: a seed, a ``numpy.random.RandomState``, or None.
        """
        _check_count("n", n)
        x = self._checked(X)
        seed = int(check_random_state(random_state).randint(LARGEST_DRAWN_SEED))
        device = self.predictor_.x.device
        generator = torch.Generator(device).manual_seed(seed)
        if joint:
            return self.predictor_.sample_jointly(x, n, generator, permuted=permuted)
        return self.predictor_.sample(x, n, generator)

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """log p(y) of each row on its own, ``[n]``, in nats; errors as of ``predict``."""
        known = column_or_1d(np.asarray(y), dtype=np.float64)
        found = self._predicted(X, y=known).log_probability
        assert found is not None
        return found

    def _predicted(
        self, X: Any, *, quantiles: Sequence[float] = (), y: np.ndarray | None = None
    ) -> Predicted:
        x = self._checked(X)
        if y is not None and len(y) != len(x):
            raise ValueError(f"wanted y of {len(x)} rows; got {len(y)}")
        return self.predictor_.predict(x, quantiles=tuple(quantiles), y=y)

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        rows: np.ndarray = validate_data(self, X, dtype=np.float64, reset=False)
        return rows

    def _check_parameters(self) -> None:
        if not isinstance(self.model, TransformerNP | Path | str | None):
            raise TypeError(
                "wanted model as a TransformerNP, the name of a folder, or None; "
                f"got {type(self.model).__name__}"
            )
        for name, kind in (("scaling", Scaling), ("dtype", Width)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name} must be one of {get_args(kind)}; got {value!r}")
        for name in ("chunk", "orders"):
            value = getattr(self, name)
            if not (name == "orders" and value is None):
                _check_count(name, value)
        usable_device(self.device)

    def _loaded(self) -> tuple[TransformerNP, Columns | None]:
        if isinstance(self.model, TransformerNP):
            if self.model.config.y_width != 1:
                raise ValueError(
                    f"wanted a model of one output; got one of {self.model.config.y_width}"
                )
            # It stays the caller's.
            model, trained = copy.deepcopy(self.model).eval(), None
        else:
            model, trained = load_trained(PRETRAINED if self.model is None else self.model)
        return model.to(self.device, getattr(torch, self.dtype)), trained

    def _orders(self, trained: Columns | None) -> int:
        if self.orders is None:
            return ORDERS if self.model is None else 1
        if self.orders > 1 and trained is not None:
            raise ValueError(
                f"wanted orders 1 of a model whose columns had names in training; got {self.orders}"
            )
        return self.orders

    def _columns(
        self, model: TransformerNP, trained: Columns | None, x: np.ndarray, y: np.ndarray
    ) -> Columns:
        """The scales of the rows."""
        width, count = model.config.x_width, x.shape[1]
        names = list(getattr(self, "feature_names_in_", map(str, range(count))))
        if trained is not None and (
            count != width or (hasattr(self, "feature_names_in_") and names != trained.input_names)
        ):
            raise ValueError(
                f"wanted the columns that the model was trained on, "
                f"{', '.join(trained.input_names)}; got {', '.join(names)}"
            )
        if count > width:
            raise ValueError(f"wanted at most {width} columns, as the model has; got {count}")
        if trained is not None and self.scaling == "auto":
            return trained
        if self.scaling == "none":
            return Columns(tuple(map(Column.as_is, names)), Column.as_is("y"))
        inputs = [Column.of(name, x[:, n]) for n, name in enumerate(names)]
        return Columns(tuple(inputs), Column.of("y", y))


def _check_count(name: str, value: Any) -> None:
    # True is an int to Python.
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1; got {value!r}")
