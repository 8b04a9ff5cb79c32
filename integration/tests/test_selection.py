"""What the indexers select: the measures themselves, the experiment's files, the README's words."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from fusewright.gsa import GatedSparseAttention, all_keys, sparse_attention_with_lse
from fusewright_models.cli.hybrid import HybridRun
from fusewright_models.models.hybrid import HYBRID, HybridLM
from fusewright_models.studies import selection
from fusewright_models.studies.attention_mass import (
    dense_attention,
    layer_sums,
    row_masses,
    row_scores,
)
from fusewright_models.studies.late_indexers import LateBatch, late_losses
from fusewright_models.studies.results import columns
from fusewright_models.studies.selection import Point, evaluate_selection
from rich.console import Console

from .commands import assert_refused, invoke, rows_of, written_text

TOKENS = 24
# fp64 sums of fewer than 2^10 terms, in two orders.
ROUNDINGS = 2**10 * torch.finfo(torch.float64).eps


@pytest.fixture
def attention():
    torch.manual_seed(0)
    made = GatedSparseAttention(
        *(16, 4), key_heads=2, index_heads=2, index_width=8, k_base=4, k_min=2, k_max=6, sinks=2
    )
    for p in made.parameters():
        if p.ndim == 2:
            # Attention that looks at something.
            torch.nn.init.normal_(p, std=0.5)
    return made.double().eval()


@pytest.fixture
def u():
    return torch.randn(2, TOKENS, 16, dtype=torch.float64)


def test_masses_of_a_query_are_those_of_its_keys():
    """By enumeration of every random choice."""
    p = torch.tril(torch.rand(7, 7, dtype=torch.float64))
    p /= p.sum(1, keepdim=True)
    count = torch.tensor([1, 2, 2, 2, 3, 3, 2])
    indices = torch.tensor([[0, -1, -1], [0, 1, -1], [0, 2, -1], [1, 3, -1], [0, 1, 4]] * 2)[:7]
    indices[5], indices[6] = torch.tensor([0, 2, 4]), torch.tensor([0, 3, -1])
    found = row_masses(p, indices, count, 1)
    for t in range(7):
        k = int(count[t])
        if t + 1 < 2 * k:
            assert not found[:, t].any()
            continue
        before = p[t, : t + 1 - k].tolist()
        drawn = [sum(some) for some in itertools.combinations(before, k)]
        expected = [
            float(p[t, indices[t, :k]].sum()),
            float(p[t, t + 1 - k : t + 1].sum()),
            sum(drawn) / len(drawn),
            float(p[t, 0]),
            k,
            1.0,
        ]
        assert found[:, t].tolist() == pytest.approx(expected, rel=ROUNDINGS)
    assert found[-1].tolist() == [0, 0, 0, 1, 0, 1, 1]


def test_selected_mass_is_what_the_attention_itself_gives(attention, u):
    """exp(lse over the selected keys - lse over all), of each head."""
    with torch.no_grad():
        _, chosen = attention(u)
        q, k, lse = dense_attention(attention, u)
        _, of_all = sparse_attention_with_lse(q, k, k, *all_keys(2, TOKENS, u.device))
        assert (lse - of_all).abs().max() <= ROUNDINGS * lse.abs().max()
        _, of_chosen = sparse_attention_with_lse(q, k, k, *chosen)
        share = (of_chosen - of_all).exp().mean(1)
        counts = torch.arange(1, TOKENS + 1) >= 2 * chosen.count
        masses, _ = layer_sums(attention, u, chosen)
    assert masses[0] == pytest.approx(float(share[counts].sum()), rel=ROUNDINGS)
    assert masses[-1] == counts.sum()
    assert masses[-2] == chosen.count[counts].sum()


def test_indexer_that_tells_no_key_from_another_diverges_as_the_uniform_one(attention, u):
    with torch.no_grad():
        _, chosen = attention(u)
        attention.index_temperature.zero_()
        _, (kl, uniform) = layer_sums(attention, u, chosen)
        attention.index_temperature.fill_(2.0)
        _, (other, same) = layer_sums(attention, u, chosen)
        p = torch.stack(
            [s.softmax(-1).mean(0) for s in row_scores(*dense_attention(attention, u)[:2])]
        )
    seen = torch.arange(1, TOKENS + 1, dtype=torch.float64)
    expected = torch.xlogy(p, p * seen[:, None]).sum()
    assert kl == pytest.approx(float(uniform), rel=ROUNDINGS)
    assert uniform == same == pytest.approx(float(expected), rel=ROUNDINGS)
    assert abs(other - uniform) > ROUNDINGS * uniform


def test_every_layer_is_evaluated_and_the_model_is_scored():
    torch.manual_seed(0)
    model = HybridLM(replace(HYBRID["tiny"], layers=8), backend="reference").eval()
    text = torch.randint(0, 256, (200,), dtype=torch.uint8)
    options = dict(length=40, windows=3, batch_size=2)
    found = evaluate_selection(model, text, **options)
    layers = {name.partition(" ")[0] for name in found if " " in name}
    assert layers == {"4", "8", "last"}
    assert abs(found["bits_per_byte"] - 8.0) < 0.3
    for layer in layers:
        # At the start attention is nearly uniform: a share of the keys has a share of the mass.
        for other in ("window", "random"):
            assert found[f"{layer} selected"] == pytest.approx(found[f"{layer} {other}"], rel=0.1)
        assert 0.0 < found[f"{layer} kl"] < 0.01
        assert HYBRID["tiny"].k_min <= found[f"{layer} keys"] <= HYBRID["tiny"].k_max
    assert found == evaluate_selection(model, text, **options)


def test_indexers_learn_nothing_of_what_is_not_followed():
    """All else learns the same."""
    torch.manual_seed(0)
    model = HybridLM(HYBRID["tiny"], backend="reference")
    windows = torch.randint(0, 256, (2, 33))
    learned = {}
    for followed in (True, False):
        model.zero_grad()
        late_losses(model, LateBatch(windows, dense=True, followed=followed)).loss.backward()
        learned[followed] = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, grad in learned[False].items():
        if ".index_" in name:
            assert not grad.any()
            assert learned[True][name].any()
        else:
            assert torch.equal(grad, learned[True][name])


def test_steps_are_counted_and_not_their_batches(tmp_path, monkeypatch):
    text = written_text(tmp_path)
    sizes = dict(batch_size=1, gradient_accumulation_steps=2, seq_len=32, lr=1e-3)
    counts = dict(steps=3, eval_every=3, indexer_warmup=2, seed=0)
    flags = dict(preset="tiny", dataset=str(text), device="cpu", backend="reference")
    run = HybridRun.from_flags(sizes | counts | flags)
    batches = []

    def losses(model, batch):
        batches.append((batch.followed, batch.dense))
        return late_losses(model, batch)

    monkeypatch.setattr(selection, "late_losses", losses)
    options = dict(windows=1, minutes=1.0, console=Console(quiet=True))
    selection.train_and_evaluate(run, alone=1, **options)
    assert batches == [(False, True)] * 2 + [(True, True)] * 2 + [(True, False)] * 2


def test_command_leaves_a_table_and_a_picture(tmp_path):
    flags = "--preset tiny --steps 6 --eval-every 2 --batch-size 2 --seq-len 32 --windows 2"
    flags += " --indexer-start 2 --indexer-warmup 4 --backend reference --selected-keys 8"
    flags = [*flags.split(), "--dataset", written_text(tmp_path), "--out", tmp_path]
    result = invoke(selection.main, *flags)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("selection-*.csv")
    rows = rows_of(tmp_path)
    assert list(rows[0]) == columns(Point)
    found = [(row["step"], row["phase"], row["layer"]) for row in rows]
    phases = {"0": "alone", "2": "alone", "4": "dense", "6": "sparse"}
    assert found == [(s, phases[s], layer) for s in phases for layer in ("4", "last")]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    # Time is over at the first evaluation.
    result = invoke(selection.main, *flags, "--minutes", "0")
    assert result.exit_code == 0, result.output
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "0", "2", "2"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "none.txt"], "wanted a file, a folder or a data set's name; none.txt is"),
        (["--seq-len", "900"], "wanted a held-out text of more than 900 bytes; got"),
        (["--selected-keys", "99"], "selected_keys must be from 4 to 16 in preset tiny; got 99"),
        (["--indexer-start", "9"], "indexer_start must be at most indexer_warmup, 2; got 9"),
    ],
    ids=["data", "length", "keys", "start"],
)
def test_bad_flags_get_one_clear_sentence(tmp_path, flags, message):
    (tmp_path / "text.txt").write_text("a line\n" * 1000)
    given = ["--preset", "tiny", "--selected-keys", "8", "--backend", "reference"]
    given += ["--indexer-start", "0", "--indexer-warmup", "2"]
    given += ["--dataset", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *flags]
    assert_refused(invoke(selection.main, *given), re.escape(message), tmp_path / "out")
