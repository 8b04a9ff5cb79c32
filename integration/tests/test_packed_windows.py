"""Windows of several documents each, which see and predict nothing of one another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.cli.hybrid import HybridBatch, all_losses
from fusewright_models.text import PackedWindows
from fusewright_models.text.packed_windows import rows_of
from fusewright_models.text.windows import documents_in

from .commands import invoke, metrics
from .test_document_windows import ENDS, SIZES, STREAM, losses_of, model_of, scored

# Units of the small TitanMAC's segments, and of tokens.
UNITS = {"titan-mac": 8, "hybrid": 1}


def windows(length=16, most=3, unit=1, **options):
    return PackedWindows(STREAM, ENDS, length=length, most=most, unit=unit, seed=2, **options)


def documents_of(batch):
    """Of each document of a batch what is read, and the token behind."""
    for row, bounds in enumerate(batch.bounds.tolist()):
        for first, last in itertools.pairwise(bounds):
            if last > first:
                following = int(batch.targets[row, last - 1])
                yield (*batch.windows[row, first:last].tolist(), following)


@pytest.mark.parametrize(("most", "unit"), [(3, 1), (2, 4), (8, 5)])
def test_every_window_is_in_one_row_that_has_room_for_it(most, unit):
    counts = np.random.default_rng(0).integers(2, 41, size=200)
    rows = rows_of(counts, 40, most=most, unit=unit, seed=1)
    assert sorted(rows[rows >= 0].tolist()) == list(range(200))
    assert rows.shape[1] == most
    for row in rows:
        own = row[row >= 0]
        assert 1 <= len(own) <= most
        assert len(own) == 1 or sum(-(-counts[own] // unit) * unit) <= 40
    # Of any two rows that may take more windows one is full enough for neither to take the other.
    open_rows = [row[row >= 0] for row in rows if (row < 0).any()]
    taken = sorted(sum(-(-counts[row] // unit) * unit) for row in open_rows if len(row) == 1)
    assert all(a + b > 40 for a, b in itertools.pairwise(taken))


def test_rows_hold_whole_documents_and_predict_within_them():
    documents = [STREAM[end - size : end].tolist() for end, size in zip(ENDS, SIZES, strict=True)]
    expected = {tuple(document) for document in documents if len(document) > 2}
    found = set()
    for _ in range(20):
        batch = windows().sample(4)
        found |= set(documents_of(batch))
        place = torch.arange(16)
        inside = place < batch.bounds[:, -1:]
        assert torch.equal(batch.predicted, inside.sum(1))
        assert batch.padding == (~inside).sum()
        assert (batch.targets[~inside] == -100).all()
        within = inside[:, 1:] & ~(batch.bounds[:, 1:, None] == place[1:]).any(1)
        assert torch.equal(batch.windows[:, 1:-1][within], batch.targets[:, :-1][within])
    assert found <= expected
    source = windows()
    assert set(documents_of(source.sample(200))) == expected
    assert source.rows < len(expected)


def test_long_documents_are_windows_of_their_own():
    batch = windows(length=4).sample(200)
    assert (batch.bounds[batch.predicted == 4] == torch.tensor([0, 4, 4, 4])).all(1).any()
    assert {len(document) - 1 for document in documents_of(batch)} == {2, 3, 4}


def test_windows_go_on_where_they_were_left_and_know_their_rows():
    one, other = windows(digest="of the tokens"), windows(digest="of the tokens")
    one.sample(3)
    other.load_state_dict(one.state_dict())
    again, expected = other.sample(3), one.sample(3)
    assert torch.equal(again.windows, expected.windows)
    assert torch.equal(again.bounds, expected.bounds)
    with pytest.raises(ValueError, match="wanted the data that the run was begun with"):
        windows(most=2, digest="of the tokens").load_state_dict(one.state_dict())


@pytest.mark.parametrize("kind", ["titan-mac", "hybrid"])
def test_loss_is_the_mean_over_documents(kind, assert_same_but_for_rounding):
    model = model_of(kind)
    batch = windows(unit=UNITS[kind]).sample(3)
    assert (batch.bounds[:, 1:] > batch.bounds[:, :-1]).sum() > 3
    found = losses_of(kind, model, batch)
    found = found.reshape(-1)[:1]
    documents = [torch.tensor([document]) for document in documents_of(batch)]
    loss = scored(model).loss
    total = sum((len(x[0]) - 1) * loss(x) for x in documents)
    expected = total / sum(len(x[0]) - 1 for x in documents)
    assert_same_but_for_rounding([found], [expected.detach().view(1)])


@pytest.mark.parametrize("kind", ["titan-mac", "hybrid"])
def test_losses_of_processes_have_the_mean_of_all_rows(kind, assert_same_but_for_rounding):
    model = model_of(kind)
    batch = windows(unit=UNITS[kind]).sample(4)
    parts = [batch.part(0, 2), batch.part(2, 4)]
    assert parts[0].predicted.sum() != parts[1].predicted.sum()
    whole = losses_of(kind, model, batch)
    mean = torch.stack([losses_of(kind, model, part) for part in parts]).mean(0)
    assert_same_but_for_rounding([mean], [whole])


def test_dense_attention_goes_to_the_keys_of_a_document(assert_same_but_for_rounding):
    model, batch = model_of("hybrid"), windows().sample(2)
    found = all_losses(model, HybridBatch(**vars(batch), dense=True)).means["next_token_loss"]
    documents = [torch.tensor([document]) for document in documents_of(batch)]
    total = sum((len(x[0]) - 1) * model.losses(x, dense=True).following for x in documents)
    expected = total / sum(len(x[0]) - 1 for x in documents)
    assert_same_but_for_rounding([found], [expected])


@pytest.mark.parametrize("kind", ["titan-mac", "hybrid"])
@pytest.mark.usefixtures("short_samples", "without_pictures")
def test_run_of_packed_documents_trains_and_resumes(kind, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.txt").write_text(f"text {number} of {number**2}\n" * (1 + number % 3))
    flags = [kind, "--preset", "tiny", "--device", "cpu", "--dataset", folder]
    flags += ["--documents-per-window", "3", "--seq-len", "64", "--batch-size", "2"]
    flags += ["--steps", "2", "--log-every", "1", "--out", tmp_path / "run"]
    refused = invoke(app, *flags)
    assert refused.exit_code == 2
    assert "wanted --documents beside --documents-per-window 3" in " ".join(refused.output.split())
    if kind == "titan-mac":
        # Of the preset a segment is as long as the window.
        refused = invoke(app, *flags, "--documents")
        assert refused.exit_code == 2
        assert "wanted a --seq-len of 128 or more" in " ".join(refused.output.split())
        flags += ["--chunk-size", "16"]
    packed = []
    sample = PackedWindows.sample
    monkeypatch.setattr(
        PackedWindows, "sample", lambda *given: packed.append(sample(*given)) or packed[-1]
    )
    result = invoke(app, *flags, "--documents")
    assert result.exit_code == 0, result.output
    assert any((documents_in(batch.bounds) > 1).any() for batch in packed)
    lines = metrics(tmp_path / "run")
    assert all(line["padded_tokens_per_second"] > 0 for line in lines if "loss" in line)
    assert invoke(app, kind, "--resume", tmp_path / "run", "--steps", "3").exit_code == 0
