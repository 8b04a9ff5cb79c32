"""Rows of a file, predicted by the program."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.data.columns import Column, Columns
from fusewright_models.prediction import Predictor, load_trained
from fusewright_models.training import RunFolder

from .commands import assert_refused, invoke, leave_out_pictures

NAMES = ["a", "b", "y"]


def values_of(rows, seed=0):
    a, b, noise = np.random.default_rng(seed).normal(size=(3, rows))
    return np.stack([100.0 + 5.0 * a, b, 20.0 + 3.0 * a - b + 0.1 * noise], axis=1)


def write(path, values, names=NAMES):
    lines = [",".join(names), *(",".join(map(repr, row)) for row in values.tolist())]
    path.write_text("\n".join(lines) + "\n")
    return path


def trained(folder, *flags):
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        sizes = ["--preset", "tiny", "--steps", "2", "--eval-every", "2"]
        result = invoke(app, "transformer-np", *sizes, *flags, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    data = write(folder / "data.csv", values_of(60))
    return trained(folder / "run", "--data", data, "--inputs", "a,b", "--output", "y")


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("unnamed") / "run", "--data", "gp-rbf")


@pytest.fixture
def files(tmp_path):
    context = write(tmp_path / "context.csv", values_of(20, seed=1))
    target = write(tmp_path / "target.csv", values_of(9, seed=2)[:, [2, 1, 0]], ["y", "b", "a"])
    return ["--context", context, "--target", target, "--out", tmp_path / "out.csv"]


def predict(*arguments):
    return invoke(app, "predict", *arguments)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def expected_of(folder, context, target, dtype=torch.float64):
    """By one call of the model, in the units of the output."""
    model, columns = load_trained(folder)
    every = [*columns.inputs, columns.output]
    known, asked = (
        torch.from_numpy(
            np.stack([each.standardised(rows[:, n]) for n, each in enumerate(every)], 1)
        ).to(dtype)[None]
        for rows in (context, target)
    )
    with torch.no_grad():
        params = model.to(dtype)(known[..., :2], known[..., 2:], asked[..., :2])
    return model.head, params, asked[..., 2:], columns.output


def root_mean_square(x):
    return float(np.sqrt(np.mean(np.square(x))))


def test_predictions_are_those_of_one_call_in_the_units_of_the_table(run, files, tmp_path):
    result = predict(run, *files, "--quantiles", "0.1,0.5")
    assert result.exit_code == 0, result.output
    assert f"9 rows in {tmp_path / 'out.csv'}, given 20; mean log-probability" in result.output
    rows = rows_of(tmp_path / "out.csv")
    names = ["mean", "standard_deviation", "quantile_0.1", "quantile_0.5", "log_probability"]
    assert list(rows[0]) == names
    found = np.array([[float(row[name]) for name in names] for row in rows])
    exact, allowed = (
        of_table(*expected_of(run, values_of(20, seed=1), values_of(9, seed=2), dtype))
        for dtype in (torch.float64, torch.float32)
    )
    for n in range(len(names)):
        own, theirs = (root_mean_square(x[:, n] - exact[:, n]) for x in (found, allowed))
        last_place = np.finfo(np.float32).eps * np.abs(exact[:, n]).max()
        assert own <= 2.0 * theirs + 2.0 * last_place


def of_table(head, params, y, column):
    quantiles = head.quantiles(params, (0.1, 0.5))[0, :, 0].double()
    found = [
        head.mean(params)[0, :, 0].double() * column.scale + column.mean,
        head.variance(params)[0, :, 0].sqrt().double() * column.scale,
        *(quantiles * column.scale + column.mean).T,
        head.log_likelihood(params, y)[0, :, 0].double() - np.log(column.scale),
    ]
    return torch.stack(found, 1).numpy()


def test_density_of_the_output_sums_to_one_in_its_own_units(run):
    model, columns = load_trained(run)
    context = values_of(20, seed=1)
    made = Predictor(model.double(), columns, context[:, :2], context[:, 2])
    line = np.linspace(-400.0, 400.0, 200_001)
    x = np.broadcast_to(values_of(1, seed=3)[:, :2], (1, 2))
    head, params = model.head, next(made._params(x))[1]
    scaled = torch.from_numpy(columns.output.standardised(line))[:, None]
    log_p = head.log_likelihood(params[0].expand(len(line), 1, -1, 3), scaled)[:, 0]
    density = np.exp(log_p.detach().numpy()) / columns.output.scale
    one = made.predict(x, y=line[:1] * 0.0 + 20.0)
    total = np.trapezoid(density, line)
    mean = np.trapezoid(density * line, line)
    spacing = line[1] - line[0]
    assert abs(total - 1.0) <= spacing**2
    assert abs(mean - one.mean[0]) <= spacing**2 * 400.0


def test_parts_of_the_targets_change_nothing(run, assert_same_but_for_rounding):
    model, columns = load_trained(run)
    context, target = values_of(20, seed=1), values_of(11, seed=2)
    both = [
        Predictor(model.double(), columns, context[:, :2], context[:, 2], chunk=chunk).predict(
            target[:, :2], quantiles=(0.3, 0.9), y=target[:, 2]
        )
        for chunk in (4, 100)
    ]
    parts, whole = ([torch.from_numpy(each) for each in predicted] for predicted in both)
    assert_same_but_for_rounding(parts, whole)


def test_exported_model_predicts_the_same(run, files, tmp_path):
    assert predict(run, *files).exit_code == 0
    expected = (tmp_path / "out.csv").read_bytes()
    assert invoke(app, "export", run, "--out", tmp_path / "exported").exit_code == 0
    assert predict(tmp_path / "exported", *files).exit_code == 0
    assert (tmp_path / "out.csv").read_bytes() == expected


def test_target_without_the_output_or_with_gaps_in_it_has_no_probability_there(
    run, files, tmp_path
):
    target = files[3]
    write(target, values_of(3, seed=2)[:, :2], NAMES[:2])
    result = predict(run, *files)
    assert result.output.endswith("given 20\n")
    assert "log_probability" not in rows_of(tmp_path / "out.csv")[0]
    target.write_text("a,b,y\n100,0,\n101,1,21.5\n")
    assert predict(run, *files).exit_code == 0
    first, second = rows_of(tmp_path / "out.csv")
    assert first["log_probability"] == ""
    assert float(second["log_probability"]) < 10.0


def test_model_that_was_trained_without_names_takes_those_that_are_given(unnamed, files, tmp_path):
    assert_refused(predict(unnamed, *files), "wanted the names of columns in --inputs and --output")
    named = ["--inputs", "b", "--output", "y"]
    result = predict(unnamed, *files, *named)
    assert result.exit_code == 0, result.output
    model, none = load_trained(unnamed)
    assert none is None
    columns = Columns((Column("b", 0.0, 1.0),), Column("y", 0.0, 1.0))
    context = values_of(20, seed=1)
    made = Predictor(model, columns, context[:, 1:2], context[:, 2])
    expected = made.predict(values_of(9, seed=2)[:, 1:2]).mean
    found = [float(row["mean"]) for row in rows_of(tmp_path / "out.csv")]
    assert found == [float(f"{x:.9g}") for x in expected]
    two = predict(unnamed, *files, "--inputs", "a,b", "--output", "y")
    assert_refused(two, "as many --inputs as the model has, 1; got 'a,b'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--quantiles", "0.5,2"], "wanted numbers between 0 and 1 in --quantiles; got '0.5,2'"),
        (["--quantiles", "half"], "got 'half'"),
        (["--out", "out.txt"], "wanted the name of a .csv file in --out; got out.txt"),
        (["--inputs", "a,b"], "are for models that were trained without names; .* has a, b and y"),
        (["--device", "mps"], "--device must be cpu, cuda"),
        (["--context", "absent.csv"], "wanted a file of columns; absent.csv is none"),
        (["--target", "absent.csv"], "absent.csv"),
        (["--target", "target.txt"], "wanted a file that ends in .csv or .parquet"),
    ],
    ids=["level", "word", "out", "names", "device", "context", "target", "suffix"],
)
def test_what_cannot_be_served_is_refused_before_anything_is_written(
    run, files, tmp_path, monkeypatch, change, message
):
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert_refused(predict(run, *files, *change), message)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_bad_rows_folders_and_outputs_are_refused(run, files, tmp_path):
    context, target = files[1], files[3]
    assert_refused(predict(run, *files[:4], "--out", target), "wanted another file in --out")
    target.write_text("a,b\n1,2\n3,red\n")
    assert_refused(predict(run, *files), "column 'b' of row 2 of .*target.csv; got 'red'")
    context.write_text("a,b\n1,2\n")
    assert_refused(predict(run, *files), "wanted a column 'y' in .*context.csv; got a, b")
    context.write_text("a,b,y\n")
    assert_refused(predict(run, *files), "wanted one row or more in .*context.csv; got none")
    assert_refused(predict(tmp_path / "nowhere", *files), "nowhere")
    begun = tmp_path / "begun"
    shutil.copytree(run, begun, ignore=shutil.ignore_patterns("checkpoints"))
    assert_refused(predict(begun, *files), "wanted the folder of a run with a checkpoint")
    (begun / "columns.json").write_text('{"inputs": [], "output": {"name": "y"}}')
    shutil.copytree(run / "checkpoints", begun / "checkpoints")
    assert_refused(predict(begun, *files), "wanted the columns of a run in .*columns.json")
    assert not (tmp_path / "out.csv").exists()


def test_exported_model_may_have_no_columns(run, tmp_path):
    assert invoke(app, "export", run, "--out", tmp_path / "model").exit_code == 0
    _, columns = load_trained(tmp_path / "model")
    assert columns is not None
    (tmp_path / "model/columns.json").unlink()
    model, columns = load_trained(tmp_path / "model")
    assert columns is None
    assert model.config.x_width == 2


def test_loading_draws_no_random_number(run):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model, _ = load_trained(run)
    assert torch.equal(torch.rand(1), expected)
    state = RunFolder(run).load_checkpoint()["model"]
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
