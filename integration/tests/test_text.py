"""Text as tokens: what is read, what is held out, what is drawn, what is scored."""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from fusewright_models.text import ByteTokenizer, Windows, documents, evaluate_text, read_corpus
from fusewright_models.text.corpus import FEW, beginning, by_position, is_held_out, split
from fusewright_models.text.documents import standard_library

# Enough documents to be split one by one.
MANY = [f"document {number}\n".encode() * (1 + number % 7) for number in range(2 * FEW)]


def corpus_of(texts, *, most_tokens=2**20, held_out_bytes=2**12):
    return read_corpus(
        iter(texts), ByteTokenizer(), most_tokens=most_tokens, held_out_bytes=held_out_bytes
    )


def test_standard_library_is_read_whole_and_without_tests_or_packages(tmp_path):
    for name in ("b.py", "a/c.py", "a/test/d.py", "site-packages/e.py", "tests/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(standard_library(tmp_path)) == [b"a/c.py", b"b.py"]


def test_default_documents_are_the_running_pythons_sources():
    read = list(documents())
    assert (Path(sysconfig.get_path("stdlib")) / "ast.py").read_bytes() in read
    assert len(read) > FEW
    assert sum(map(len, read)) > 2**22


def test_text_files_are_documents_byte_for_byte(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe no UTF-8")
    (tmp_path / "a.md").write_bytes(b"first\n")
    (tmp_path / "c.csv").write_bytes(b"not text\n")
    assert list(documents(str(tmp_path / "b.txt"))) == [b"\xff\xfe no UTF-8"]
    assert list(documents(str(tmp_path))) == [b"first\n", b"\xff\xfe no UTF-8"]


@pytest.mark.parametrize(
    ("dataset", "subset", "message"),
    [
        ("missing.txt", None, "wanted a file, a folder or a data set's name; missing.txt is none"),
        ("./missing", None, r"\./missing is none"),
        ("a/b/c", None, "a/b/c is none"),
        (None, "part", "a named data set has subsets and revisions; got subset 'part' alone"),
        (".", "part", r"files have no subsets or revisions; got subset 'part' beside \."),
        (".", None, r"wanted files of \.parquet, \.jsonl, .*; \. holds none"),
    ],
)
def test_data_sets_that_are_none_are_refused(tmp_path, monkeypatch, dataset, subset, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        list(documents(dataset, subset=subset))


def test_no_document_is_both_held_out_and_trained_on():
    # Every document a second time: a copy goes where the first one went.
    training, held_out = split([*MANY, *MANY], held_out_bytes=2**20)
    trained = list(training)
    assert held_out
    assert set(trained).isdisjoint(held_out)
    assert set(trained) | set(held_out) == set(MANY)
    assert sorted(trained + held_out) == sorted([*MANY, *MANY])


def test_split_of_a_document_does_not_depend_on_the_others():
    held_out = {text for text in MANY if is_held_out(text)}
    training, found = split(reversed(MANY), held_out_bytes=2**20)
    assert held_out.isdisjoint(training)
    assert set(found) == held_out


def test_what_is_held_out_beyond_the_limit_is_never_trained_on():
    everything = [text for text in MANY if is_held_out(text)]
    room = len(everything[0]) + len(everything[1]) - 1
    training, held_out = split(MANY, held_out_bytes=room)
    assert set(training) == set(MANY) - set(everything)
    assert sum(map(len, held_out)) <= room
    assert held_out[0] == everything[0]
    assert all(
        text.startswith(part) for text, part in zip(everything[1:], held_out[1:], strict=False)
    )


def test_of_lines_longer_than_what_may_be_held_out_one_is_cut():
    texts = ["ä".encode() * 500 + b"%d\n" % number for number in range(2 * FEW)]
    training, held_out = split(texts, held_out_bytes=101)
    assert len(list(training)) < len(texts)
    assert held_out == ["ä".encode() * 50]


@pytest.mark.parametrize(
    ("text", "bytes_held_out", "held_out"),
    [
        (b"line\n" * 64, 64, b"line\n"),
        (b"line\n" * 64, 3, b""),
        (b"x" * 64, 64, b"xx"),
        ("ä".encode() * 32, 1, b""),
        (b"x" * 63 + "ä".encode() * 16, 64, "ä".encode()),
        (b"", 64, b""),
    ],
    ids=["lines", "less than a line", "no line", "character", "inside a character", "empty"],
)
def test_few_documents_are_split_by_position(text, bytes_held_out, held_out):
    training, rest = by_position(text, held_out_bytes=bytes_held_out)
    assert training + rest == text
    assert rest.endswith(held_out)
    if held_out:
        assert len(rest) <= len(held_out)
    rest.decode()
    training.decode()


def test_one_file_has_its_end_held_out():
    text = b"".join(b"line %d\n" % number for number in range(1000))
    corpus = corpus_of([text])
    assert corpus.training_text.tobytes() + bytes(corpus.held_out.tolist()) == text
    assert len(text) // 40 < len(corpus.held_out) < len(text) // 20
    assert bytes(corpus.held_out.tolist()).startswith(b"line ")


@pytest.mark.parametrize("texts", [MANY, MANY[:40]], ids=["many", "few"])
def test_ends_of_documents_are_kept(texts):
    corpus = corpus_of(texts)
    parts = []
    for tokens, ends in (
        (corpus.training, corpus.training_ends),
        (corpus.held_out, corpus.held_out_ends),
    ):
        whole = bytes(tokens.tolist())
        parts += [whole[a:b] for a, b in pairwise([0, *ends])]
        assert ends[-1] == len(whole)
    if len(texts) == len(MANY):
        assert sorted(parts) == sorted(texts)
    else:
        # The one in which what is held out begins is cut in two.
        assert b"".join(parts) == b"".join(texts)
        assert [part for part in parts if part in texts] == [
            text for text in texts if text in parts
        ]
        assert len(parts) - len(texts) in (0, 1)


def test_beginning_is_whole_lines():
    assert beginning(b"ab\ncd\nef", 7) == b"ab\ncd\n"
    assert beginning(b"ab\ncd\n", 6) == b"ab\ncd\n"
    assert beginning(b"abcdef", 5) == b""


def test_documents_end_with_a_newline_and_empty_ones_are_none():
    corpus = corpus_of([b"", b"a" * 100, b"b" * 100 + b"\n", b""])
    stream = bytes([*corpus.training.tolist(), *corpus.held_out.tolist()])
    assert stream == b"a" * 100 + b"\n" + b"b" * 100 + b"\n"


def test_corpus_reads_no_more_than_it_keeps():
    read = []

    def counted():
        for text in MANY:
            read.append(text)
            yield text

    corpus = read_corpus(counted(), ByteTokenizer(), most_tokens=5000, held_out_bytes=2**12)
    assert len(corpus.training) == 5000
    assert len(read) < len(MANY)
    kept = corpus.training_text.tobytes()
    assert kept[:5000] == bytes(corpus.training.tolist())
    assert corpus.digest == hashlib.blake2b(kept[:5000], digest_size=8).hexdigest()


def test_something_is_held_out_however_little_is_trained_on():
    corpus = corpus_of(MANY, most_tokens=2)
    assert len(corpus.training) == 2
    assert bytes(corpus.held_out.tolist()) == next(text for text in MANY if is_held_out(text))


def test_held_out_text_is_what_can_be_predicted_of_it():
    corpus = corpus_of(MANY)
    assert corpus.held_out_text.tobytes() == bytes(corpus.held_out.tolist())[1:]


@pytest.mark.parametrize("texts", [[], [b""], [b"a"], [b"\n", b"a\n"]], ids=len)
def test_too_little_text_is_refused(texts):
    with pytest.raises(ValueError, match="wanted text with two tokens or more to"):
        corpus_of(texts)


def test_windows_are_pieces_of_the_stream():
    windows = Windows(torch.arange(100, dtype=torch.int32), length=9, seed=1)
    batch = windows.sample(500)
    assert batch.windows.shape == (500, 10)
    assert batch.windows.dtype == torch.int64
    assert batch.tokens == 500 * 9
    starts = batch.windows[:, :1]
    assert torch.equal(batch.windows, starts + torch.arange(10))
    # Both ends of the stream are reached, 500 draws of 91 places missing one once in 250 times.
    assert {0, 90} & set(starts.flatten().tolist())
    assert starts.max() <= 90


def test_windows_depend_on_seed_and_number_alone():
    stream = torch.arange(1000)
    one, other = (Windows(stream, length=5, seed=3) for _ in range(2))
    first, second = one.sample(4).windows, one.sample(4).windows
    assert not torch.equal(first, second)
    torch.manual_seed(99)
    other.load_state_dict({"batches": 1, "digest": ""})
    assert torch.equal(other.sample(4).windows, second)
    third = Windows(stream, length=5, seed=4)
    # The draws of seed 4 are not those of seed 3 one batch later.
    assert not torch.equal(third.sample(4).windows, second)


def test_a_window_may_be_the_whole_stream():
    stream = torch.arange(6)
    assert torch.equal(Windows(stream, length=5).sample(2).windows, stream.expand(2, 6))


def test_impossible_windows_are_refused():
    with pytest.raises(ValueError, match=r"windows of 6 \+ 1 tokens want a stream as long; got 6"):
        Windows(torch.arange(6), length=6)
    with pytest.raises(ValueError, match="one token long or more; got 0"):
        Windows(torch.arange(6), length=0)


def test_windows_of_other_data_are_not_continued():
    state = Windows(torch.arange(9), length=2, digest="ab").state_dict()
    with pytest.raises(ValueError, match="of digest ab; got other data, of digest cd"):
        Windows(torch.arange(9), length=2, digest="cd").load_state_dict(state)
    with pytest.raises(ValueError, match="wanted windows of seed 0; got those of 1"):
        Windows(torch.arange(9), length=2, digest="ab", seed=1).load_state_dict(state)


class Pairs(torch.nn.Module):
    """log p(b | a) of a random table, and no memory of anything before a."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.table = table.log_softmax(-1)

    def loss(self, tokens):
        return -self.table[tokens[:, :-1], tokens[:, 1:]].mean()


@pytest.mark.parametrize("length", [1, 4, 7, 99, 500], ids=lambda length: f"T{length}")
@pytest.mark.parametrize("batch_size", [1, 3], ids=lambda batch: f"B{batch}")
def test_every_token_but_the_first_is_scored_once(assert_same_but_for_rounding, length, batch_size):
    """Of a model that looks one token back, so that windows make no difference: any length, ragged
    or not, shorter than a window or not, has one score.
    """
    stream = torch.randint(11, (100,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    model = Pairs()
    found = evaluate_text(model, stream, length=length, batch_size=batch_size, text_bytes=120)
    wide = stream.long()
    expected = sum(float(model.table[a, b]) for a, b in pairwise(wide))
    values = torch.tensor([found.log_likelihood, found.bits_per_byte], dtype=torch.float64)
    truth = torch.tensor([expected / 99, -expected / math.log(2) / 120], dtype=torch.float64)
    assert_same_but_for_rounding([values], [truth])


def test_a_model_that_knows_nothing_needs_eight_bits_per_byte():
    class Uniform:
        def loss(self, tokens):
            return torch.tensor(math.log(256.0), dtype=torch.float64)

    stream = torch.zeros(1000, dtype=torch.uint8)
    found = evaluate_text(Uniform(), stream, length=64, batch_size=4, text_bytes=999)
    # One rounding for each of the bytes.
    assert found.bits_per_byte == pytest.approx(8.0, rel=2**10 * sys.float_info.epsilon)


@pytest.mark.parametrize(("tokens", "text_bytes"), [(1, 1), (0, 1), (5, 0)])
def test_nothing_cannot_be_scored(tokens, text_bytes):
    stream = torch.zeros(tokens, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"got {max(tokens - 1, 0)} of {text_bytes}"):
        evaluate_text(Pairs(), stream, length=4, batch_size=2, text_bytes=text_bytes)


def test_bytes_go_to_tokens_and_back():
    every = bytes(range(256))
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([every])
    assert np.array_equal(tokens, np.arange(256))
    assert tokenizer.decode(tokens.astype(np.int64)) == every
