"""Training on the rows of one's own tables."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.data import Size, TableTasks, read_table
from fusewright_models.data.columns import Column, Columns, has_column, names_in, read_columns
from pyarrow import parquet

from .commands import assert_refused, assert_same_weights, interrupted, invoke, metrics, weights

TINY = ["--preset", "tiny", "--steps", "4", "--log-every", "2", "--eval-every", "2"]
NAMES = ["a", "b", "y"]


def values_of(rows: int) -> np.ndarray:
    a, b, noise = np.random.default_rng(0).normal(size=(3, rows))
    return np.stack([100.0 + 5.0 * a, b, 3.0 * a - b + 0.1 * noise], axis=1)


def write(path, values, names=NAMES):
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(dict(zip(names, values.T, strict=True))), path)
    else:
        lines = [",".join(names), *(",".join(map(repr, row)) for row in values.tolist())]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("table") / "data.csv", values_of(200))


@pytest.fixture(scope="module")
def table(file):
    return read_table(file, ["a", "b"], "y")


def flags(file, *more):
    return ["transformer-np", *TINY, "--data", file, "--inputs", "a,b", "--output", "y", *more]


def test_parquet_and_csv_hold_the_same_columns_in_any_order(file, tmp_path):
    other = write(tmp_path / "data.parquet", values_of(200)[:, ::-1], NAMES[::-1])
    for path in (file, other):
        assert np.array_equal(read_columns(path, NAMES), values_of(200))
        assert has_column(path, "b")
        assert not has_column(path, "c")
    digests = {read_table(path, ["a", "b"], "y").digest for path in (file, other)}
    assert len(digests) == 1


def rows_in(rows, table):
    """For each row which of a table's it is."""
    return (rows.unsqueeze(-2) == table).all(-1)


def held_out_of(values, table):
    """Which rows of a file are held out."""
    every = [*table.columns.inputs, table.columns.output]
    scaled = np.stack([each.standardised(values[:, n]) for n, each in enumerate(every)], axis=1)
    rows = torch.from_numpy(scaled).float()
    held_out = rows_in(rows, table.held_out).any(-1)
    assert torch.equal(held_out, ~rows_in(rows, table.training).any(-1))
    return held_out.numpy()


def test_columns_are_standardised_by_the_training_rows(table):
    values = values_of(200)
    held_out = held_out_of(values, table)
    assert held_out.sum() == 40
    for n, column in enumerate([*table.columns.inputs, table.columns.output]):
        training = values[~held_out, n]
        assert (column.name, column.mean, column.scale) == (
            NAMES[n],
            training.mean(),
            training.std(),
        )


@pytest.mark.parametrize("value", [0.1, 1.7e18 / 3, 1e300], ids=["small", "time", "large"])
def test_column_of_one_value_keeps_its_size_and_is_zero_to_the_model(value):
    """Whatever its mean is rounded to."""
    column = Column.of("a", np.full(7, value))
    assert column.scale == 1.0
    assert (column.standardised(np.full(3, value)) == 0.0).all()


def test_held_out_rows_are_the_same_in_any_order_and_with_their_equals(tmp_path):
    values = values_of(60)
    twice = np.tile(values, (2, 1))[np.random.default_rng(1).permutation(120)]
    found = []
    for name, rows in (("one.csv", values), ("two.csv", twice)):
        held_out = held_out_of(rows, read_table(write(tmp_path / name, rows), ["a", "b"], "y"))
        found.append((held_out.sum(), {tuple(row) for row in rows[held_out].tolist()}))
    (one, rows), (two, same) = found
    assert (one, two) == (12, 24)
    assert rows == same


def test_training_tasks_have_no_held_out_row_and_held_out_ones_ask_for_no_other(table):
    training = TableTasks(table=table)
    held_out = TableTasks(table=table, held_out=True)
    for _ in range(20):
        tasks = [each.sample(4) for each in (training, held_out)]
        drawn = [
            (torch.cat([t.x_context, t.y_context], -1), torch.cat([t.x_target, t.y_target], -1))
            for t in tasks
        ]
        (context, target), (known, asked) = drawn
        for rows in (context, target, known):
            assert rows_in(rows, table.training).any(-1).all()
            assert not rows_in(rows, table.held_out).any()
        assert rows_in(asked, table.held_out).any(-1).all()
        whole = rows_in(torch.cat([context, target], 1), table.training).long()
        assert whole.sum(1).max() == 1


@pytest.mark.parametrize("rows", [12, 5000], ids=["of-few", "of-many"])
def test_choices_of_rows_are_equally_likely(table, rows):
    sampler = TableTasks(table=table)
    drawn = sampler.draw_rows(2000, rows, 8)
    assert drawn.sort(dim=1).values.diff(dim=1).min() > 0
    expected = 2000 / rows
    for place in (0, 7):
        counts = torch.bincount(drawn[:, place], minlength=rows).double()
        squares = (counts - expected).square().sum() / expected
        # Five standard deviations of a chi-squared variable of so many degrees of freedom.
        assert abs(squares - (rows - 1)) <= 5.0 * (2 * (rows - 1)) ** 0.5


def test_sizes_are_those_of_flags_or_fit_the_table(table):
    sampler = TableTasks(table=table)
    sizes = {
        (t.x_context.shape[1], t.x_target.shape[1]) for t in (sampler.sample(1) for _ in range(900))
    }
    assert {m for m, _ in sizes} == set(range(8, 81))
    assert {n for _, n in sizes} == {40}
    ragged = TableTasks(table=table, ragged=True, context_size=Size(2, 9), target_size=Size(5, 5))
    task = ragged.sample(64)
    assert set(task.context_lengths.tolist()) == set(range(2, 10))
    assert task.x_target.shape == (64, 5, 2)
    for context, targets in ((155, 10), (20, 41)):
        with pytest.raises(ValueError, match=f"160 training rows.* 40 targets.* got {context} and"):
            TableTasks(table=table, context_size=Size(1, context), target_size=Size(1, targets))


def test_reference_is_least_squares_on_the_training_rows(table, assert_same_but_for_rounding):
    sampler = TableTasks(table=table, held_out=True)
    task = sampler.sample(3)
    x = torch.cat([torch.ones(160, 1), table.training[:, :2]], dim=1).double()
    y = table.training[:, 2].double()
    weights = torch.linalg.solve(x.T @ x, x.T @ y)
    spread = (y - x @ weights).square().mean().sqrt()
    targets = torch.cat([torch.ones_like(task.x_target[..., :1]), task.x_target], -1).double()
    expected = torch.distributions.Normal(targets @ weights, spread).log_prob(task.y_target[..., 0])
    condition = float(torch.linalg.cond(x.T @ x))
    found = sampler.reference_log_likelihood(task)[..., 0]
    assert_same_but_for_rounding([found], [expected], condition)


def test_run_on_a_table_resumes_bit_for_bit(file, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = invoke(app, *flags(file, "--out", whole))
    assert result.exit_code == 0, result.output
    assert "least squares" in result.output
    assert (whole / "predictions.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((whole / "config.json").read_text())
    assert (config["data"], config["inputs"], config["output"]) == (str(file), "a,b", "y")
    first, *_, last = [line for line in metrics(whole) if "held_out_crps" in line]
    coverage = {f"held_out_coverage_{level}" for level in (50, 80, 95)}
    pit = [f"held_out_pit_{number}" for number in range(10)]
    assert coverage | {*pit} <= last.keys()
    assert not first.keys() & {*pit}
    assert abs(sum(last[name] for name in pit) - 1.0) <= 10 * np.finfo(float).eps
    columns = Columns.read(whole / "columns.json")
    assert columns == read_table(file, ["a", "b"], "y").columns
    # Two batches are the evaluations of steps 0 and 2, two are training steps before it.
    begun = lambda: invoke(app, *flags(file, "--out", parts))  # noqa: E731
    assert interrupted(monkeypatch, TableTasks, 6, begun).exit_code == 130
    resumed = invoke(app, "transformer-np", "--resume", parts)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, parts)
    assert (
        metrics(whole)[-1]["held_out_log_likelihood"]
        == metrics(parts)[-1]["held_out_log_likelihood"]
    )


@pytest.mark.usefixtures("without_pictures")
def test_run_is_not_resumed_on_another_table(tmp_path):
    path, out = write(tmp_path / "data.csv", values_of(50)), tmp_path / "run"
    assert invoke(app, *flags(path, "--out", out)).exit_code == 0
    write(path, values_of(51))
    result = invoke(app, "transformer-np", "--resume", out, "--steps", "6")
    assert_refused(
        result, "wanted the tasks that the run was begun with, of table of a,b and y, 50 rows"
    )


@pytest.mark.usefixtures("without_pictures")
def test_export_keeps_the_columns_and_needs_no_table(tmp_path):
    path, run, out = write(tmp_path / "data.csv", values_of(50)), tmp_path / "run", tmp_path / "out"
    assert invoke(app, *flags(path, "--out", run)).exit_code == 0
    path.unlink()
    result = invoke(app, "export", run, "--out", out)
    assert result.exit_code == 0, result.output
    assert (out / "columns.json").read_bytes() == (run / "columns.json").read_bytes()
    assert weights(run).keys()


BAD = {
    "missing": ("1,2,3\n4,,6\n", "wanted a number in column 'b' of row 2 of {file}; got nothing"),
    "text": ("1,2,3\n\n4,5,6\n7,red,9\n", "column 'b' of row 3 of {file}; got 'red'"),
    "nan": ("1,2,3\n4,5,nan\n", "column 'y' of row 2 of {file}; got nan"),
    "infinite": ("inf,2,3\n", "column 'a' of row 1 of {file}; got inf"),
    "short": ("1,2,3\n4,5\n", "wanted 3 values in row 2 of {file}, as in its header; got 2"),
    "few": ("1,2,3\n4,5,6\n", "wanted 10 rows or more in {file}; got 2"),
    "equal": ("1,2,3\n" * 30, "one in 5 can be held out in {file}; got 1 different ones"),
    "null-byte": ("1,\0,3\n", "column 'b' of row 1 of {file}; got '\\x00'"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_rows_that_are_no_numbers_are_refused_by_column_and_row(tmp_path, text, message):
    path = tmp_path / "data.csv"
    path.write_text("a,b,y\n" + text)
    with pytest.raises(ValueError, match=re.escape(message.format(file=path))):
        read_table(path, ["a", "b"], "y")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["1", "red"], "wanted a number in column 'b' of row 1 of .*; got a string, '1'"),
        ([1.0, None], "wanted a number in column 'b' of row 2 of .*; got nothing"),
        ([1.0, float("nan")], "wanted a number in column 'b' of row 2 of .*; got nan"),
        ([True, False], "wanted a number in column 'b' of row 1 of .*; got a bool, True"),
    ],
    ids=["text", "null", "nan", "bool"],
)
def test_columns_of_parquet_that_are_no_numbers_are_refused(tmp_path, column, message):
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"a": [1, 2], "b": column}), path)
    with pytest.raises(ValueError, match=message):
        read_columns(path, ["a", "b"])


def test_missing_values_are_kept_where_they_may_be(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,y\n1,NA\n2,\n3,4\n")
    found = read_columns(path, ["a", "y"], gaps=("y",))
    assert np.isnan(found[:2, 1]).all()
    assert found[2].tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match=r"column 'y' of row 1 of .*; got 'NA'"):
        read_columns(path, ["a", "y"])
    other = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"a": [1, 2], "y": [None, 2.5]}), other)
    assert np.array_equal(
        read_columns(other, ["a", "y"], gaps=("y",)), [[1, np.nan], [2, 2.5]], equal_nan=True
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--inputs", "a,b"],
            "wants the names of its columns in --inputs and --output; got no --output",
        ),
        (["--output", "y"], "got no --inputs"),
        (["--inputs", "a,c", "--output", "y"], "wanted a column 'c' in .*; got a, b, y"),
        (["--inputs", "a,a", "--output", "y"], "each of them once; got 'a,a'"),
        (
            ["--inputs", "a,y", "--output", "y"],
            "wanted an output that is none of the inputs; got 'y'",
        ),
        (["--data", "absent.csv", "--inputs", "a", "--output", "y"], "absent.csv is none"),
        (["--data", "blr", "--inputs", "a"], "got --inputs beside --data blr"),
        (["--inputs", "a,b", "--output", "y", "--target-size", "41"], "at most 40 targets"),
    ],
    ids=lambda value: "",
)
def test_flags_that_do_not_fit_a_table_are_refused(file, tmp_path, given, message):
    result = invoke(app, "transformer-np", *TINY, "--data", file, *given, "--out", tmp_path / "run")
    assert_refused(result, message, tmp_path / "run")


def test_table_and_parquet_without_its_library_are_told_apart(file, tmp_path, monkeypatch):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"wanted a parquet file in .*; got"):
        read_columns(path, ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RuntimeError, match=r"parquet files need pyarrow.*integration\[tables\]"):
        read_columns(path, ["a"])
    assert len(read_columns(file, ["a"])) == 200


def test_names_are_written_as_in_a_header():
    assert names_in('a, "b,c",d') == ("a", "b,c", "d")
    for text in ("", "a,,b", "a,a"):
        with pytest.raises(ValueError, match="wanted names of columns"):
            names_in(text)
