"""Windows of one document each: nothing of a document is predicted from what was packed before."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fusewright_models import HYBRID, TITAN_MAC, HybridLM, TitanMAC
from fusewright_models.cli import app
from fusewright_models.cli.hybrid import HybridBatch, all_losses
from fusewright_models.cli.titan_mac import next_token_loss
from fusewright_models.text import (
    ByteTokenizer,
    DocumentWindows,
    TextBatch,
    evaluate_text,
    read_corpus,
)

from .commands import invoke, metrics

VOCABULARY = 11
SIZES = (1, 2, 3, 4, 5, 9, 1, 10, 3)


def drawn(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator).to(torch.uint8)


def packed(*documents):
    return torch.cat(documents), np.cumsum([len(document) for document in documents])


STREAM, ENDS = packed(*(drawn(size, seed) for seed, size in enumerate(SIZES)))


def rows_of(batch):
    """Of each row what is read and predicted: its first tokens, and one more."""
    for row, count in zip(batch.windows.tolist(), batch.predicted.tolist(), strict=True):
        yield tuple(row[: count + 1])


def test_windows_begin_with_documents_and_end_with_them():
    """All windows of four predictions are drawn, and nothing else."""
    documents = [STREAM[end - size : end].tolist() for end, size in zip(ENDS, SIZES, strict=True)]
    expected = {
        tuple(document[first : first + 5])
        for document in documents
        for first in range(0, len(document) - 2, 4)
    }
    windows = DocumentWindows(STREAM, ENDS, length=4, seed=3)
    found = [row for _ in range(40) for row in rows_of(windows.sample(8))]
    assert set(found) == expected
    # Each has the same probability: some forty of 320, and 5 standard deviations.
    share = 1 / windows.total
    spread = 5 * math.sqrt(share * (1 - share) * len(found))
    assert windows.total == len(expected) == 8
    whole = tuple(documents[7][:5])
    assert abs(found.count(whole) - share * len(found)) < spread


def test_targets_behind_the_end_stand_for_nothing():
    batch = DocumentWindows(STREAM, ENDS, length=6, seed=1).sample(16)
    place = torch.arange(6)
    inside = place < batch.predicted[:, None]
    assert torch.equal(batch.targets[inside], batch.windows[:, 1:][inside])
    assert (batch.targets[~inside] == -100).all()
    assert batch.padding == (~inside).sum() > 0
    assert batch.predicted.min() >= 2


def test_windows_go_on_where_they_were_left():
    one, other = (DocumentWindows(STREAM, ENDS, length=4, seed=5) for _ in range(2))
    one.sample(3)
    other.load_state_dict(one.state_dict())
    again, expected = other.sample(3), one.sample(3)
    assert torch.equal(again.windows, expected.windows)
    assert torch.equal(again.predicted, expected.predicted)


def test_the_same_tokens_in_other_documents_are_other_data():
    """Of which a run that is resumed would draw other windows."""
    windows, others = (
        DocumentWindows(STREAM, ends, length=4, digest="of the tokens")
        for ends in (ENDS, np.delete(ENDS, 3))
    )
    windows.load_state_dict(windows.state_dict())
    with pytest.raises(ValueError, match="wanted the data that the run was begun with"):
        others.load_state_dict(windows.state_dict())


@pytest.mark.parametrize("length", [1, 2, 4])
def test_empty_documents_change_no_window(length):
    windows, others = (
        DocumentWindows(STREAM, ends, length=length, seed=3)
        for ends in (ENDS, np.insert(ENDS, [0, 2, 2], [0, ENDS[1], ENDS[1]]))
    )
    assert windows.total == others.total
    one, other = windows.sample(32), others.sample(32)
    assert torch.equal(one.windows, other.windows)
    assert torch.equal(one.predicted, other.predicted)


def test_documents_of_two_tokens_cannot_be_trained_on():
    with pytest.raises(ValueError, match="wanted a document of 3 tokens or more; got none"):
        DocumentWindows(STREAM, np.arange(2, len(STREAM) + 1, 2), length=4)


def model_of(kind):
    torch.manual_seed(0)
    if kind == "hybrid":
        model = HybridLM(replace(HYBRID["tiny"], vocab_size=VOCABULARY, dim=32))
    else:
        sizes = dict(vocab_size=VOCABULARY, dim=16, heads=2, segment=8, memory_chunk=4)
        model = TitanMAC(replace(TITAN_MAC["tiny"], memory_hidden=8, **sizes))
    return model.double().eval()


def scored(model):
    class Scored:
        loss = staticmethod(getattr(model, "next_token_loss", model.loss))

    return Scored


@pytest.mark.parametrize("kind", ["titan-mac", "hybrid"])
def test_score_of_a_document_does_not_depend_on_those_before_it(kind, assert_same_but_for_rounding):
    model = scored(model_of(kind))
    asked = dict(length=6, batch_size=3, text_bytes=1)

    def nats(*documents):
        stream, ends = packed(*documents)
        found = evaluate_text(model, stream, ends=ends, **asked)
        return -found.log_likelihood * (len(stream) - len(documents))

    document, others = drawn(15), [drawn(size, size) for size in (20, 1, 4)]
    alone = nats(document)
    for before in ([others[0]], others, others[::-1]):
        found = nats(*before, document) - nats(*before)
        found, expected = (torch.tensor(x, dtype=torch.float64) for x in (found, alone))
        # Of a difference of two sums of up to three times as many terms.
        assert_same_but_for_rounding([found], [expected])
    apart = sum(nats(each) for each in [*others, document] if len(each) > 1)
    both = torch.tensor([apart, nats(*others, document)], dtype=torch.float64)
    assert_same_but_for_rounding([both[:1]], [both[1:]])


def losses_of(kind, model, batch):
    if kind == "titan-mac":
        return next_token_loss(model, batch)
    told = all_losses(model, HybridBatch(**vars(batch), dense=False))
    return torch.stack([told.means["next_token_loss"], told.means["second_token_loss"]])


@pytest.mark.parametrize("kind", ["titan-mac", "hybrid"])
def test_loss_of_a_document_does_not_depend_on_those_around_it(kind):
    model, document = model_of(kind), drawn(9)
    found = []
    for before, after in ((3, 4), (10, 11)):
        parts = drawn(before, before), document, drawn(after, after)
        stream, ends = packed(*parts)
        places = torch.arange(before, before + 13).clamp(max=len(stream) - 1)
        batch = TextBatch(
            stream[places][None].long(), predicted=torch.tensor([8]), mean=torch.tensor(8.0)
        )
        assert batch.windows[0, :9].tolist() == document.tolist()
        assert ends[1] == before + 9
        found.append(losses_of(kind, model, batch))
    assert torch.equal(found[0], found[1])
    # As of the document alone.
    alone = TextBatch(document[None].long())
    expected = losses_of(kind, model, alone)
    assert (found[0] - expected).abs().max() <= 2**10 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("kind", ["titan-mac", "hybrid"])
def test_losses_of_processes_have_the_mean_of_all_rows(kind, assert_same_but_for_rounding):
    model = model_of(kind)
    batch = DocumentWindows(STREAM, ENDS, length=6, seed=2).sample(4)
    parts = [batch.part(0, 2), batch.part(2, 4)]
    assert parts[0].predicted.sum() != parts[1].predicted.sum()
    whole = losses_of(kind, model, batch)
    mean = torch.stack([losses_of(kind, model, part) for part in parts]).mean(0)
    assert_same_but_for_rounding([mean], [whole])


def test_total_of_a_part_is_of_its_shares():
    model = model_of("hybrid")
    batch = DocumentWindows(STREAM, ENDS, length=6, seed=2).sample(4).part(0, 1)
    told = all_losses(model, HybridBatch(**vars(batch), dense=False))
    means = told.means
    expected = means["next_token_loss"] + means["indexer_loss"]
    expected = expected + model.config.second_weight * means["second_token_loss"]
    assert (told.loss - expected).abs() <= 2**10 * torch.finfo(torch.float64).eps * expected


def test_bytes_of_predictions_are_those_behind_first_tokens():
    texts = [b"%d\n" % number for number in range(600)]
    corpus = read_corpus(texts, ByteTokenizer(), most_tokens=2**20, held_out_bytes=2**12)
    tokens, documents = len(corpus.held_out), len(corpus.held_out_ends)
    assert documents > 1
    assert corpus.scored_bytes(by_document=True) == tokens - documents
    assert corpus.scored_bytes(by_document=False) == tokens - 1


@pytest.mark.parametrize("kind", ["titan-mac", "hybrid"])
@pytest.mark.usefixtures("short_samples", "without_pictures")
def test_run_by_documents_trains_scores_and_resumes(kind, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.txt").write_text(f"text {number} of {number**2}\n" * (1 + number % 3))
    flags = [kind, "--preset", "tiny", "--device", "cpu", "--dataset", folder, "--documents"]
    flags += ["--seq-len", "24", "--batch-size", "2", "--steps", "2", "--log-every", "1"]
    result = invoke(app, *flags, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    lines = metrics(tmp_path / "run")
    assert all(line["padded_tokens_per_second"] > 0 for line in lines if "loss" in line)
    again = invoke(app, "evaluate", tmp_path / "run")
    assert f"{lines[-1]['held_out_bits_per_byte']:.4f}" in again.output
    assert invoke(app, kind, "--resume", tmp_path / "run", "--steps", "3").exit_code == 0
