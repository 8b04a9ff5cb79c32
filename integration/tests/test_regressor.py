"""TransformerNP in scikit-learn's form."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fusewright_models import TransformerNP, TransformerNPConfig, TransformerNPRegressor
from fusewright_models.data.columns import Column, Columns
from fusewright_models.prediction import Predictor, load_trained
from fusewright_models.prediction import regressor as regressor_module
from fusewright_models.prediction.trained import PRETRAINED
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

WIDTH = 12
SMALL = TransformerNPConfig(
    x_width=WIDTH, width=16, layers=2, heads=2, feed_forward_width=20, components=3
)
# Each with the reason why it cannot hold of what is tested here.
EXPECTED_TO_FAIL = {
    "check_regressors_train": "wants an R2 above 0.5, and these weights were drawn, not trained",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    TransformerNP(SMALL).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def named(tmp_path_factory, folder):
    """One whose two columns had names."""
    path = tmp_path_factory.mktemp("named")
    torch.manual_seed(1)
    TransformerNP(TransformerNPConfig(x_width=2, width=16, layers=1, heads=2)).save_pretrained(path)
    columns = Columns((Column("a", 3.0, 2.0), Column("b", -1.0, 0.5)), Column("y", 10.0, 4.0))
    (path / "columns.json").write_bytes(columns.to_json())
    return str(path)


def rows_of(count, width=3, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, width))
    return 2.0 + 5.0 * x, 30.0 + 7.0 * x[:, 0] - x[:, -1]


# What it warns of is what is not checked: input of other array libraries, for one.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.EstimatorCheckFailedWarning")
def test_checks_of_scikit_learn_pass(folder):
    results = check_estimator(
        TransformerNPRegressor(folder), expected_failed_checks=EXPECTED_TO_FAIL
    )
    failed = {each["check_name"] for each in results if each["status"] == "xfail"}
    assert failed == EXPECTED_TO_FAIL.keys()
    assert len([each for each in results if each["status"] == "passed"]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.EstimatorCheckFailedWarning")
def test_checks_of_scikit_learn_pass_without_a_model(dtype):
    assert (PRETRAINED / "model.safetensors").stat().st_size <= 5_000_000
    # Products of other numbers of rows are rounded otherwise in 32 bits; the check allows 1e-7.
    names = ["check_methods_subset_invariance"] if dtype == "float32" else []
    results = check_estimator(
        TransformerNPRegressor(dtype=dtype),
        expected_failed_checks=dict.fromkeys(names, "rounding of 32 bits"),
    )
    assert len([each for each in results if each["status"] == "passed"]) > 40


def test_predictions_are_those_of_the_model_on_standardised_rows(
    folder, assert_same_but_for_rounding
):
    (x, y), (asked, truth) = rows_of(20), rows_of(9, seed=1)
    regressor = TransformerNPRegressor(folder, dtype="float64", chunk=4).fit(x, y)
    model = TransformerNP.from_pretrained(folder).double()
    means, spreads = np.r_[x.mean(0), y.mean()], np.r_[x.std(0), y.std()]
    known, targets = (
        torch.from_numpy((np.c_[rows, out] - means) / spreads)[None]
        for rows, out in ((x, y), (asked, truth))
    )
    absent = torch.zeros(1, 20, WIDTH - 3, dtype=torch.float64)
    with torch.no_grad():
        params = model(
            torch.cat([known[..., :3], absent], -1),
            known[..., 3:],
            torch.cat([targets[..., :3], absent[:, :9]], -1),
        )
    head = model.head
    mean, deviation, quantiles = regressor.predict(asked, return_std=True, quantiles=(0.2, 0.9))
    assert regressor.predict(asked).shape == mean.shape == (9,)
    expected = [
        head.mean(params)[0, :, 0] * spreads[3] + means[3],
        head.variance(params)[0, :, 0].sqrt() * spreads[3],
        head.quantiles(params, (0.2, 0.9))[0, :, 0] * spreads[3] + means[3],
        head.log_likelihood(params, targets[..., 3:])[0, :, 0] - np.log(spreads[3]),
    ]
    found = mean, deviation, quantiles, regressor.log_prob(asked, truth)
    assert_same_but_for_rounding([torch.from_numpy(each) for each in found], expected)


@pytest.mark.parametrize("rows", [9, 1, 0])
def test_one_pass_of_the_model_says_all_of_a_row(folder, rows, monkeypatch):
    (x, y), (asked, truth) = rows_of(20), rows_of(9, seed=1)
    asked, truth = asked[:rows], truth[:rows]
    regressor = TransformerNPRegressor(folder, chunk=20, orders=2).fit(x, y)
    truth[:1] = np.nan
    predictor = regressor.predictor_
    every = predictor.predict(asked, quantiles=(0.2, 0.9), y=truth)
    passes, decode = [], predictor.model.decode

    def counted(*arguments):
        passes.append(1)
        return decode(*arguments)

    monkeypatch.setattr(predictor.model, "decode", counted)
    # scikit-learn takes no rows for a mistake.
    said = regressor.predict_distribution(asked) if rows else predictor.distribution(asked)
    found = said.mean, said.standard_deviation, said.quantiles((0.2, 0.9)), said.log_prob(truth)
    assert sum(passes) == min(rows, 1)
    for one, other in zip(found, every, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=rf"wanted y of shape \({rows},\); got \({rows + 1},\)"):
        said.log_prob(np.zeros(rows + 1))


def test_orders_of_columns_are_mixed_as_likely_each(folder, assert_same_but_for_rounding):
    (x, y), (asked, truth) = rows_of(20), rows_of(9, seed=1)
    options = {"dtype": "float64", "chunk": 4}
    regressor = TransformerNPRegressor(folder, orders=3, **options).fit(x, y)
    standard = (np.r_[x, asked] - x.mean(0)) / x.std(0)
    rows = np.pad(standard, ((0, 0), (0, WIDTH - 3)))
    output, single = Column.of("y", y), TransformerNPRegressor(folder, scaling="none", **options)
    densities, means, squares = [], [], []
    orders = regressor.predictor_.orders
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert all(sorted(order.tolist()) == list(range(WIDTH)) for order in orders)
    for order in orders:
        known, others = np.split(rows[:, order], [20])
        alone = single.fit(known, output.standardised(y))
        mean, deviation = alone.predict(others, return_std=True)
        densities.append(np.exp(alone.log_prob(others, output.standardised(truth))))
        means.append(mean)
        squares.append(mean**2 + deviation**2)
    mean = np.mean(means, 0)
    expected = [
        output.mean + output.scale * mean,
        output.scale * np.sqrt(np.mean(squares, 0) - mean**2),
        np.log(np.mean(densities, 0)) - np.log(output.scale),
    ]
    found = *regressor.predict(asked, return_std=True), regressor.log_prob(asked, truth)
    assert_same_but_for_rounding(
        *([torch.from_numpy(x) for x in each] for each in (found, expected))
    )
    quantiles = regressor.predict(asked, quantiles=(0.1, 0.5))[1]
    below = regressor.sample(asked, 4000, random_state=0)[..., None] <= quantiles[:, None]
    # Five standard errors.
    assert (np.abs(below.mean(1) - [0.1, 0.5]) <= 5.0 * 0.5 / 4000**0.5).all()
    assert regressor.sample(asked, 2, joint=True).shape == (9, 2)


def test_one_order_is_that_of_the_columns(folder):
    x, y = rows_of(20)
    expected = TransformerNPRegressor(folder).fit(x, y).predict(x)
    assert np.array_equal(TransformerNPRegressor(folder, orders=1).fit(x, y).predict(x), expected)
    more = TransformerNPRegressor(folder, orders=2).fit(x, y).predict(x)
    assert not np.array_equal(more, expected)


def test_columns_with_names_have_one_order(named):
    with pytest.raises(ValueError, match="wanted orders 1 of a model whose columns had names"):
        TransformerNPRegressor(named, orders=2).fit(*rows_of(20, width=2))


def test_network_of_the_package_is_the_one_without_a_model(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(regressor_module, "PRETRAINED", Path(folder))
    x, y = rows_of(20)
    found = TransformerNPRegressor().fit(x, y).predict(x)
    assert np.array_equal(found, TransformerNPRegressor(folder, orders=8).fit(x, y).predict(x))
    shutil.copytree(folder, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    monkeypatch.setattr(regressor_module, "PRETRAINED", tmp_path / "damaged")
    with pytest.raises(ValueError, match="wanted weights of SHA-256"):
        TransformerNPRegressor().fit(x, y)


def test_weights_of_16_bits_are_computed_with_in_32(tmp_path, folder):
    TransformerNP.from_pretrained(folder).half().save_pretrained(tmp_path)
    regressor = TransformerNPRegressor(tmp_path).fit(*rows_of(20))
    assert {p.dtype for p in regressor.predictor_.model.parameters()} == {torch.float32}


def test_draws_have_the_distribution_that_is_predicted(folder):
    x, y = rows_of(20)
    regressor = TransformerNPRegressor(folder).fit(x, y)
    count = 4000
    draws = regressor.sample(x[:3], count, random_state=0)
    mean, deviation = regressor.predict(x[:3], return_std=True)
    assert draws.shape == (3, count)
    # Five standard errors.
    assert (np.abs(draws.mean(1) - mean) <= 5.0 * deviation / count**0.5).all()
    assert np.array_equal(draws, regressor.sample(x[:3], count, random_state=0))
    assert not np.array_equal(draws[:, :2], regressor.sample(x[:3], 2, random_state=1))


def test_columns_that_had_names_are_taken_in_their_training_scale(named):
    x, y = rows_of(20, width=2)
    model, columns = load_trained(named)
    expected = Predictor(model, columns, x, y).predict(x[:5]).mean
    assert np.array_equal(TransformerNPRegressor(named).fit(x, y).predict(x[:5]), expected)
    frame = pd.DataFrame(x, columns=["a", "b"])
    regressor = TransformerNPRegressor(named).fit(frame, y)
    assert np.array_equal(regressor.predict(frame[:5]), expected)
    rows = TransformerNPRegressor(named, scaling="rows").fit(x, y)
    plain = TransformerNPRegressor(named, scaling="none").fit(x, y)
    assert not np.array_equal(rows.predict(x[:5]), expected)
    assert plain.predictor_.columns.output == Column("y", 0.0, 1.0)
    for other in (frame[["b", "a"]], frame.rename(columns={"b": "c"}), frame[["a"]]):
        with pytest.raises(ValueError, match="wanted the columns that the model was trained on"):
            TransformerNPRegressor(named).fit(other, y)


def test_it_is_cloned_pickled_and_validated_across_folds(folder):
    x, y = rows_of(30)
    regressor = clone(TransformerNPRegressor("elsewhere", chunk=7).set_params(model=folder))
    assert regressor.get_params() == {
        "model": folder,
        "scaling": "auto",
        "orders": None,
        "chunk": 7,
        "dtype": "float32",
        "device": "cpu",
    }
    regressor.fit(x, y)
    again = pickle.loads(pickle.dumps(regressor))
    assert np.array_equal(again.predict(x), regressor.predict(x))
    assert np.isfinite(cross_val_score(regressor, x, y, cv=3)).all()


def test_model_that_is_given_is_left_as_it_is(folder):
    x, y = rows_of(20)
    model = TransformerNP.from_pretrained(folder).train()
    regressor = TransformerNPRegressor(model, dtype="float64").fit(x, y)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = TransformerNPRegressor(folder, dtype="float64").fit(x, y).predict(x)
    assert np.array_equal(regressor.predict(x), expected)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": 3}, TypeError, "wanted model as a TransformerNP, .* or None; got int"),
        ({"model": "/nowhere"}, OSError, "/nowhere"),
        ({"scaling": "mean"}, ValueError, "scaling must be one of .*; got 'mean'"),
        ({"dtype": "float16"}, ValueError, "dtype must be one of .*; got 'float16'"),
        ({"chunk": 0}, ValueError, "chunk must be an int of at least 1; got 0"),
        ({"orders": 0}, ValueError, "orders must be an int of at least 1; got 0"),
        ({"orders": 2.0}, ValueError, "orders must be an int of at least 1; got 2.0"),
    ],
    ids=["model", "nowhere", "scaling", "dtype", "chunk", "no-orders", "half-orders"],
)
def test_parameters_that_cannot_be_are_refused(folder, changes, kind, message):
    regressor = TransformerNPRegressor(folder).set_params(**changes)
    with pytest.raises(kind, match=message):
        regressor.fit(*rows_of(20))


@pytest.mark.parametrize("joint", [False, True])
def test_no_draws_and_parts_of_one_are_refused(folder, joint):
    regressor = TransformerNPRegressor(folder).fit(*rows_of(20))
    for n in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"n must be an int of at least 1; got {n}"):
            regressor.sample(rows_of(3)[0], n, joint=joint)
    assert regressor.sample(rows_of(3)[0], np.int64(2), joint=joint).shape == (3, 2)


def test_device_that_torch_cannot_use_is_refused(folder):
    message = "wanted a device that torch can use here; got quantum: Expected one of cpu, cuda"
    with pytest.raises(ValueError, match=message):
        TransformerNPRegressor(folder, device="quantum").fit(*rows_of(20))


def test_rows_that_cannot_be_are_refused(folder):
    regressor = TransformerNPRegressor(folder)
    with pytest.raises(NotFittedError):
        regressor.predict(rows_of(3)[0])
    with pytest.raises(ValueError, match=f"wanted at most {WIDTH} columns.* got {WIDTH + 1}"):
        regressor.fit(*rows_of(20, width=WIDTH + 1))
    regressor.fit(*rows_of(20))
    with pytest.raises(ValueError, match="wanted y of 5 rows; got 4"):
        regressor.log_prob(rows_of(5)[0], rows_of(4)[1])
    two = TransformerNP(TransformerNPConfig(x_width=3, y_width=2, width=16, layers=1, heads=2))
    with pytest.raises(ValueError, match="wanted a model of one output; got one of 2"):
        TransformerNPRegressor(two).fit(*rows_of(20))
