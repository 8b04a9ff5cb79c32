"""Regressors as scikit-learn's users have them, and what each says of y as a distribution.

ridge               normal; the penalty by generalised cross-validation, the variance the mean
                    square of the residuals of rows left out
random forest       normal, of 300 trees; the variance the mean square of the residuals of trees
                    that did not see the row
gradient boosting   normal, of scikit-learn's defaults; the variance the mean square of the
                    residuals of five-fold cross-validation
gaussian process    its own, with a length for each column and noise, fitted by its optimiser
                    from two starts; columns standardised, as for ridge
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm  # type: ignore[import-untyped]
from sklearn.ensemble import (  # type: ignore[import-untyped]
    GradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor  # type: ignore[import-untyped]
from sklearn.gaussian_process.kernels import (  # type: ignore[import-untyped]
    RBF,
    ConstantKernel,
    WhiteKernel,
)
from sklearn.linear_model import RidgeCV  # type: ignore[import-untyped]
from sklearn.model_selection import cross_val_predict  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from ..prediction.regressor import TransformerNPRegressor
from .regression_data import Split

OURS = "fusewright"
# Between them are 90 %.
LEVELS = 0.05, 0.95


class Said(NamedTuple):
    """Of rows that are scored, each ``[n]``: the mean, log p(y), and the interval of 90 %."""

    mean: np.ndarray
    log_p: np.ndarray
    low: np.ndarray
    high: np.ndarray


def normal(mean: np.ndarray, deviation: Any, y: np.ndarray) -> Said:
    reach = norm.ppf(LEVELS[1]) * deviation
    return Said(mean, norm.logpdf(y, mean, deviation), mean - reach, mean + reach)


def ridge(split: Split) -> Said:
    scaler = StandardScaler().fit(split.x)
    model = RidgeCV(np.logspace(-3.0, 4.0, 29), store_cv_results=True)
    model.fit(scaler.transform(split.x), split.y)
    # Of each penalty the mean square of the residuals of rows left out; the least was taken.
    deviation = model.cv_results_.mean(0).min() ** 0.5
    return normal(model.predict(scaler.transform(split.x_asked)), deviation, split.y_asked)


def random_forest(split: Split) -> Said:
    model = RandomForestRegressor(300, oob_score=True, random_state=0)
    model.fit(split.x, split.y)
    deviation = np.mean((model.oob_prediction_ - split.y) ** 2) ** 0.5
    return normal(model.predict(split.x_asked), deviation, split.y_asked)


def gradient_boosting(split: Split) -> Said:
    model = GradientBoostingRegressor(random_state=0)
    deviation = np.mean((cross_val_predict(model, split.x, split.y, cv=5) - split.y) ** 2) ** 0.5
    return normal(model.fit(split.x, split.y).predict(split.x_asked), deviation, split.y_asked)


def gaussian_process(split: Split) -> Said:
    scaler = StandardScaler().fit(split.x)
    kernel = ConstantKernel() * RBF(np.ones(split.x.shape[1])) + WhiteKernel()
    model = GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=1, random_state=0
    )
    model.fit(scaler.transform(split.x), split.y)
    mean, deviation = model.predict(scaler.transform(split.x_asked), return_std=True)
    return normal(mean, deviation, split.y_asked)


PEERS: dict[str, Callable[[Split], Said]] = {
    "ridge": ridge,
    "random forest": random_forest,
    "gradient boosting": gradient_boosting,
    "gaussian process": gaussian_process,
}


class Ours:
    """The regressor, without training."""

    def __init__(self, model: str | None) -> None:
        self.regressor = TransformerNPRegressor(model)

    def __call__(self, split: Split) -> Said:
        said = self.regressor.fit(split.x, split.y).predict_distribution(split.x_asked)
        return Said(said.mean, said.log_prob(split.y_asked), *said.quantiles(LEVELS).T)
