"""The study of long trainings of a memory, on short ones."""

from __future__ import annotations

import pytest
from fusewright_models.studies import long_training
from fusewright_models.studies.long_training import LongTraining, train_long

from .commands import assert_refused, invoke, rows_of

SMALL = LongTraining(tokens=24, steps=8, batch_size=2, dim=16, hidden=8, chunk=4)


@pytest.mark.parametrize("rule", ["normed", "paper"])
def test_rows_tell_the_inner_loss_of_both_ends(rule):
    points = train_long(LongTraining(**(vars(SMALL) | {"memory_rule": rule, "layers": 3})))
    assert [point.step for point in points] == [2, 4, 6, 8]
    for point in points:
        assert (point.layers, point.tokens, point.memory_rule) == (3, 24, rule)
        assert 0.0 < point.inner_loss_first < 100.0
        assert 0.0 < point.inner_loss_last < 100.0
        assert point.skipped == 0
        assert 0.0 < point.loss < 8.0


def test_rows_of_other_trainings_stay(tmp_path):
    flags = ["--out", tmp_path, "--tokens", 12, "--steps", 2, "--dim", 8, "--hidden", 4]
    for layers in (2, 1, 2):
        result = invoke(long_training.main, *flags, "--layers", layers)
        assert result.exit_code == 0, result.output
    rows = [(row["layers"], row["step"]) for row in rows_of(tmp_path)]
    assert rows == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert_refused(
        invoke(long_training.main, *flags, "--memory-rule", "origin"),
        "memory_rule must be normed or paper; got origin",
    )
