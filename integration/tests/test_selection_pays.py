"""The study of what selecting costs a model: what it trains, scores, writes and keeps."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from fusewright_models.models.hybrid import HYBRID, HybridLM
from fusewright_models.studies import selection_pays
from fusewright_models.studies.results import columns
from fusewright_models.studies.selection_pays import PaysPoint, difference, evaluated, selecting

from .commands import assert_refused, invoke, rows_of, written_text

TOKENS = 64
# fp64 sums of fewer than 2^10 terms, in two orders.
ROUNDINGS = 2**10 * torch.finfo(torch.float64).eps
# Of a text of 6 KB what is held out is short.
FLAGS = f"--preset tiny --steps 4 --batch-size 2 --seq-len {TOKENS} --windows 3"
FLAGS = [*FLAGS.split(), "--backend", "reference"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = selecting(HYBRID["tiny"], TOKENS // 16)
    return HybridLM(config, backend="reference").eval()


@pytest.fixture(scope="module")
def text():
    return torch.randint(0, 256, (200,), dtype=torch.uint8)


def test_queries_select_a_sixteenth_half_of_it_a_window(model):
    run = selection_pays.PaysRun.from_flags(
        {"preset": "tiny", "device": "cpu", "seq_len": 128, "steps": 4}
    )
    shape = run.shape(256)
    assert (shape.k_min, shape.k_base, shape.k_max, shape.window) == (8, 8, 8, 4)
    tokens = torch.randint(0, 256, (1, 129))
    chosen = []
    wide = HybridLM(shape, backend="reference").eval()
    wide.losses(tokens, observe=lambda _, u, selection: chosen.append(selection))
    for indices, count in chosen:
        place = torch.arange(indices.shape[1])
        assert torch.equal(count[0], (place + 1).clamp(max=8).int())
        for row in place[20:].tolist():
            last = set(range(row - 3, row + 1))
            assert last <= set(indices[0, row].tolist())


def test_score_is_the_mean_over_windows_and_its_error_that_over_batches(model, text):
    sizes = dict(length=TOKENS, windows=3)
    with torch.no_grad():
        bits = [
            float(model.losses(text[None, w * TOKENS : (w + 1) * TOKENS + 1].long()).following)
            for w in range(3)
        ]
    bits = torch.tensor(bits, dtype=torch.float64) / math.log(2.0)
    found = evaluated(model, text, dense=False, batch_size=1, **sizes)
    assert found["bits_per_byte"] == pytest.approx(float(bits.mean()), rel=ROUNDINGS)
    assert found["error"] == pytest.approx(float(bits.std()) / math.sqrt(3), rel=ROUNDINGS)
    # A batch of two counts twice.
    uneven = evaluated(model, text, dense=False, batch_size=2, **sizes)
    assert uneven["bits_per_byte"] == pytest.approx(
        found["bits_per_byte"], rel=8 * torch.finfo(torch.float32).eps
    )
    assert evaluated(model, text, dense=True, batch_size=1, **sizes) != found


def test_selections_that_are_kept_are_those_of_the_model(tmp_path, model, text):
    sizes = (TOKENS, 8), (100, 4), (1000, 4)
    selection_pays.kept(model, text, tmp_path / "kept.npz", sizes)
    chooser = HybridLM(selecting(model.config, 8), backend="reference").eval()
    chooser.load_state_dict(model.state_dict())
    chosen = []
    window = text[None, : TOKENS + 1].long()
    with torch.no_grad():
        chooser.losses(window, observe=lambda _, u, selection: chosen.append(selection.indices[0]))
    with np.load(tmp_path / "kept.npz") as arrays:
        # None of the length that the text has not.
        assert set(arrays) == {f"4 {TOKENS} 8", "4 100 4"}
        distances = torch.from_numpy(arrays[f"4 {TOKENS} 8"].astype(np.int32))
    indices = (distances.cumsum(-1) - 1).masked_fill(distances == 0, -1)
    assert torch.equal(indices, chosen[0].long())


def test_difference_is_of_the_ends_of_seeds_that_both_have():
    def point(variant, seed, step, bits):
        return PaysPoint(variant, seed, TOKENS, 4, 4, step, bits, 0.1)

    ends = {"dense": (2.0, 2.5, 3.0), "selected": (2.25, 2.5, 3.5, 9.0)}
    points = [point(v, seed, 4, x) for v, each in ends.items() for seed, x in enumerate(each)]
    points += [point(variant, seed, 2, 7.0) for variant in ends for seed in range(3)]
    mean, error = difference(points)
    assert mean == pytest.approx(0.25)
    assert error == pytest.approx(0.25 / math.sqrt(3))
    assert all(map(math.isnan, difference(points[:3])))
    assert math.isnan(difference(points[:4])[1])


def test_command_trains_both_variants_beside_one_another(tmp_path, monkeypatch):
    dense, losses = [], selection_pays.all_losses

    def all_losses(model, batch):
        dense.append(batch.dense)
        return losses(model, batch)

    monkeypatch.setattr(selection_pays, "all_losses", all_losses)
    monkeypatch.setattr(selection_pays, "KEPT", ((TOKENS, 4),))
    flags = [*FLAGS, "--dataset", written_text(tmp_path), "--out", tmp_path]
    for variant in ("dense", "selected"):
        kept = tmp_path / f"{variant}.npz"
        result = invoke(
            selection_pays.main, *flags, "--variant", variant, "--steps", "10", "--selections", kept
        )
        assert result.exit_code == 0, result.output
        assert kept.exists()
    # A tenth of the steps is dense before keys are selected.
    assert dense == [True] * 10 + [True] + [False] * 9
    (file,) = tmp_path.glob("selection-pays-*.csv")
    rows = rows_of(tmp_path)
    assert list(rows[0]) == columns(PaysPoint)
    steps = ["0", "2", "4", "6", "8", "10"]
    found = [(row["variant"], row["keys"], row["step"]) for row in rows]
    kinds = (("dense", str(TOKENS)), ("selected", "4"))
    assert found == [(*kind, step) for kind in kinds for step in steps]
    # Both begin with the same weights, and train differently.
    bits = {(row["variant"], row["step"]): row["bits_per_byte"] for row in rows}
    assert bits["dense", "10"] != bits["selected", "10"]
    assert float(bits["dense", "10"]) < float(bits["dense", "0"])
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    again = invoke(selection_pays.main, *flags, "--variant", "dense", "--steps", "10")
    assert again.exit_code == 0, again.output
    assert sorted(map(str, rows_of(tmp_path))) == sorted(map(str, rows))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-len", "1024"], "wanted a held-out text of more than 1024 bytes; got"),
        (["--seq-len", "32"], "wanted sinks + window <= k_min <= k_base <= k_max; got 3, 2, 2, 2"),
    ],
    ids=["length", "keys"],
)
def test_bad_flags_get_one_clear_sentence(tmp_path, flags, message):
    (tmp_path / "text.txt").write_text("a line\n" * 1000)
    given = [*FLAGS, "--variant", "selected", "--dataset", tmp_path / "text.txt"]
    given += ["--out", tmp_path / "out", *flags]
    assert_refused(invoke(selection_pays.main, *given), re.escape(message), tmp_path / "out")
