"""The study of what distance costs."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.studies import positions
from fusewright_models.studies.positions import PiecePoint, difference, piece_losses
from fusewright_models.text.windows import NOTHING

from .commands import invoke, rows_of

SIZES = "--num-layers 1 --dim 16 --num-heads 2 --chunk-size 8 --memory-chunk 4"


class Distance:
    """Loses a nat for every ten tokens that stand before the first one that is scored."""

    def loss(self, tokens, *, targets):
        scored = targets != NOTHING
        before = int((~scored).sum())
        assert scored[0, before:].all()
        assert torch.equal(targets[0, before:], tokens[0, before + 1 :])
        return torch.tensor(before / 10.0)


def test_same_pieces_are_scored_near_and_far():
    stream = torch.arange(50)
    found = list(piece_losses(Distance(), stream, length=8, near=5, far=20))
    assert found == [(start, 0.5, 2.0) for start in (20, 28, 36)]


def test_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="wanted more than 28 tokens of held-out text; got 28"):
        list(piece_losses(Distance(), torch.arange(28), length=8, near=5, far=20))


def test_difference_is_the_mean_and_its_standard_error():
    points = [PiecePoint("run", 4, 0, 1, 1, 2, 1.0, 1.0 + apart) for apart in (0.1, 0.2, 0.6)]
    mean, error = difference(points)
    assert mean == pytest.approx(0.3)
    assert error == pytest.approx(torch.tensor([0.1, 0.2, 0.6]).std().item() / 3**0.5)


def test_rows_are_the_losses_of_a_runs_model(tmp_path, text):
    folder = tmp_path / "small"
    flags = [*SIZES.split(), "--preset", "tiny", "--seq-len", "20", "--batch-size", "2"]
    flags += ["--steps", "2", "--eval-every", "2", "--device", "cpu", "--dataset", text]
    result = invoke(app, "titan-mac", "--out", folder, *flags)
    assert result.exit_code == 0, result.output
    for _ in range(2):
        sizes = ["--length", 100, "--near", 10, "--far", 40]
        result = invoke(positions.main, folder, "--out", tmp_path, *sizes)
        assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path, "positions-*.csv")
    assert f"{len(rows)} pieces, far - near: " in result.output
    assert {row["run"] for row in rows} == {"small"}
    assert [int(row["start"]) for row in rows] == [40 + 100 * n for n in range(len(rows))]
    assert all(0.0 < float(row["near_loss"]) < 8.0 for row in rows)
