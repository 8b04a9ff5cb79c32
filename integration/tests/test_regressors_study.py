"""The study of the regressor beside those that are fitted."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch
import typer
from fusewright_models import TransformerNP, TransformerNPConfig, TransformerNPRegressor
from fusewright_models.studies import regressors
from fusewright_models.studies.regression_data import (
    MOST_COLUMNS,
    SIZES,
    SPLITS,
    Split,
    data_sets,
)
from fusewright_models.studies.regression_peers import OURS, PEERS, Ours, ridge
from fusewright_models.studies.regressors import Score, main, merged, score, standing
from fusewright_models.studies.results import read
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from sklearn.preprocessing import StandardScaler

TABLE = data_sets()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    shape = TransformerNPConfig(x_width=10, width=16, layers=1, heads=2, feed_forward_width=20)
    TransformerNP(shape).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", TABLE)
def test_data_has_ten_splits_of_rows_that_are_known_and_others(name):
    splits = [*TABLE[name]()]
    assert len(splits) == SPLITS
    for split in splits:
        assert split.x.shape == (len(split.y), split.x_asked.shape[1])
        assert split.x_asked.shape == (len(split.y_asked), split.x.shape[1])
        assert 1 <= split.x.shape[1] <= MOST_COLUMNS
        assert all(np.isfinite(each).all() for each in split)
        assert split.y.std() > 0.0
    assert not np.array_equal(splits[0].y_asked, splits[1].y_asked)
    if name.partition(", ")[2]:
        assert len(splits[0].y) == int(name.partition(", ")[2])


def test_sets_are_those_of_the_issue():
    names = {"diabetes", "linnerud weight", "linnerud waist", "linnerud pulse"}
    names |= {f"friedman {kind}, {rows}" for kind in (1, 2, 3) for rows in SIZES}
    assert names <= TABLE.keys()
    first = next(iter(TABLE["diabetes"]()))
    rows = np.r_[first.x, first.x_asked]
    assert sorted(map(tuple, rows)) == sorted(map(tuple, load_diabetes().data))
    iris = next(iter(TABLE["iris petal width"]()))
    assert iris.x.shape == (120, 3)


def same(check, found, expected, condition=1.0):
    check(*([torch.from_numpy(np.asarray(each))] for each in (found, expected)), condition)


def test_variance_of_ridge_is_that_of_rows_left_out(assert_same_but_for_rounding):
    split = next(iter(TABLE["wine alcohol"]()))
    # A model for each row and each penalty.
    split = Split(split.x[:40], split.y[:40], split.x_asked[:5], split.y_asked[:5])
    said = ridge(split)
    x = StandardScaler().fit_transform(split.x)
    deviations = []
    for penalty in np.logspace(-3.0, 4.0, 29):
        left = cross_val_predict(Ridge(penalty), x, split.y, cv=LeaveOneOut())
        deviations.append(np.mean((left - split.y) ** 2) ** 0.5)
    expected = np.full(len(said.mean), min(deviations))
    condition = float(np.linalg.cond(x)) ** 2
    same(assert_same_but_for_rounding, deviation_of(said), expected, condition)


def deviation_of(said):
    """The quantile of the normal distribution at 95 %, from the standard library."""
    return (said.high - said.low) / 2.0 / NormalDist().inv_cdf(0.95)


@pytest.mark.parametrize("name", PEERS)
def test_peers_say_a_normal_distribution(name, assert_same_but_for_rounding):
    split = next(iter(TABLE["iris petal width"]()))
    few = Split(split.x[:40], split.y[:40], split.x_asked[:5], split.y_asked[:5])
    said = PEERS[name](few)
    expected = torch.distributions.Normal(*map(torch.from_numpy, (said.mean, deviation_of(said))))
    log_p = expected.log_prob(torch.from_numpy(few.y_asked))
    assert_same_but_for_rounding([torch.from_numpy(said.log_p)], [log_p])


def test_ours_says_what_the_regressor_does(folder):
    split = next(iter(TABLE["linnerud waist"]()))
    said = Ours(folder)(split)
    regressor = TransformerNPRegressor(folder).fit(split.x, split.y)
    mean, quantiles = regressor.predict(split.x_asked, quantiles=(0.05, 0.95))
    assert np.array_equal(said.mean, mean)
    assert np.array_equal(np.c_[said.low, said.high], quantiles)
    assert np.array_equal(said.log_p, regressor.log_prob(split.x_asked, split.y_asked))


def test_scores_are_those_of_the_definition():
    split = next(iter(TABLE["linnerud waist"]()))
    found = score("linnerud waist", 3, split, "ridge", ridge)
    said = ridge(split)
    error = said.mean - split.y_asked
    assert found.rmse == np.mean(error**2) ** 0.5
    assert found.log_likelihood == np.mean(said.log_p) + np.log(split.y.std())
    inside = (said.low <= split.y_asked) & (split.y_asked <= said.high)
    assert found.coverage_90 == inside.mean()
    assert (found.data, found.rows, found.columns, found.split) == ("linnerud waist", 16, 3, 3)


def made(model, values, data="diabetes"):
    return [
        Score(data, 353, 10, number, model, 1.0, value, 0.9, 0.1)
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("ours", "best", "behind", "error", "level"),
    [
        ([1.0, 3.0], OURS, 0.0, 0.0, True),
        ([0.0, 2.0], "ridge", 0.5, 0.5, True),
        ([0.0, 1.0], "ridge", 1.0, 0.0, False),
    ],
    ids=["best", "within", "behind"],
)
def test_standing_is_over_pairs_of_splits(ours, best, behind, error, level):
    peers = made("ridge", [1.0, 2.0]) + made("random forest", [0.5, 0.0])
    found = standing(peers + made(OURS, ours))
    assert (found.best, found.behind, found.error) == (best, behind, error)
    assert found.level is level
    assert standing(peers) is None
    assert standing(made(OURS, ours)) is None


def test_later_rows_replace_earlier_ones_in_order():
    before = made("ridge", [1.0, 2.0], "linnerud waist") + made("ridge", [3.0])
    after = made("ridge", [4.0]) + made(OURS, [5.0])
    found = merged(before, after, [*TABLE])
    told = [(each.data, each.split, each.model, each.log_likelihood) for each in found]
    assert told == [
        ("diabetes", 0, OURS, 5.0),
        ("diabetes", 0, "ridge", 4.0),
        ("linnerud waist", 0, "ridge", 1.0),
        ("linnerud waist", 1, "ridge", 2.0),
    ]


def test_study_writes_scores_and_a_picture_and_goes_on(tmp_path, folder, capsys):
    options = {"out": tmp_path, "only": "linnerud w", "splits": 2}
    main(**options, models="ridge", model=None)
    (file,) = tmp_path.glob("regressors-*.csv")
    assert len(read(Score, file)) == 4
    main(**options, models=f"{OURS},ridge", model=folder)
    scores = read(Score, file)
    assert [each.model for each in scores] == [OURS, "ridge"] * 4
    assert {each.data for each in scores} == {"linnerud weight", "linnerud waist"}
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert f"{OURS} is the best or within a standard error of it on" in capsys.readouterr().out
    for wrong in ({"models": "lasso"}, {"only": "boston"}):
        with pytest.raises(typer.BadParameter, match=r"are .*; got (lasso|boston)"):
            main(**{"out": tmp_path, "models": "ridge", "model": None, "only": None} | wrong)


def test_threads_are_given_back(tmp_path):
    before = torch.get_num_threads()
    main(out=tmp_path, only="linnerud waist", models="ridge", model=None, splits=1)
    assert torch.get_num_threads() == before
    assert regressors.SPLITS == SPLITS
