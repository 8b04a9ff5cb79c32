"""Models are scored as their runs and exports leave them, by tokens of their own tokenizers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from fusewright_models import (
    TITAN_MAC,
    TitanMAC,
    TitanMACConfig,
    TransformerNP,
    TransformerNPConfig,
)
from fusewright_models.cli import app
from fusewright_models.evaluation import Scorer, load_scorer
from fusewright_models.text import LibraryTokenizer

from .commands import invoke

pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FLAGS = [
    *("--preset", "tiny", "--device", "cpu", "--batch-size", "2"),
    *("--steps", "1", "--eval-every", "1", "--seq-len", "20"),
]
# Tokens of `byte_level`: two special ones, 256 bytes and all merges that its text has.
TOKENS = 278
TEXTS = ["the cat", "sat on \N{SNOWMAN} that was that and that was more than a window of it"]


def byte_level() -> Tokenizer:
    """A tokenizer with a few merges, and with a token that ends documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=["<s>", "</s>"], **options)
    tokenizer.train_from_iterator(["the cat sat on the mat and that was that"] * 9, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokenizer") / "own.json"
    byte_level().save(str(file))
    return file


@pytest.fixture
def trained(tmp_path, text, short_samples, without_pictures):
    def train(model, *more):
        flags = [model, *FLAGS, "--dataset", text, "--out", tmp_path / "run", *more]
        result = invoke(app, *flags)
        assert result.exit_code == 0, result.output
        result = invoke(app, "export", tmp_path / "run", "--out", tmp_path / "exported")
        assert result.exit_code == 0, result.output
        return tmp_path / "run", tmp_path / "exported"

    return train


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["titan-mac", "hybrid"])
@pytest.mark.parametrize("tokens", ["bytes", "words"])
def test_runs_and_exports_have_the_same_scores(model, tokens, trained, tokenizer_file, tmp_path):
    own = shutil.copy(tokenizer_file, tmp_path / "own.json")
    more = ["--tokenizer", own, "--vocab-size", 300] if tokens == "words" else []
    run, exported = trained(model, *more)
    scorers = [load_scorer(folder, batch_size=2) for folder in (run, exported)]
    one, other = (each.of_texts(TEXTS) for each in scorers)
    assert one == other
    for scorer in scorers:
        assert (scorer.length, scorer.batch_size, scorer.autocast) == (20, 2, None)
        assert scorer.tokenizer.vocab_size == (TOKENS if tokens == "words" else 256)
    asked = {"max_length": 30, "dtype": "float64", "backend": "reference"}
    if tokens == "words":
        # What the run was trained with is gone, and the export has it.
        own.unlink()
        assert load_scorer(exported, batch_size=2).of_texts(TEXTS) == one
        asked["tokenizer"] = str(exported / "tokenizer.json")
    for folder in (run, exported):
        scorer = load_scorer(folder, **asked)
        assert (scorer.length, scorer.model.backend) == (30, "reference")
        assert {p.dtype for p in scorer.model.parameters()} == {torch.float64}


def test_precision_is_that_of_the_training(trained):
    for folder in trained("titan-mac", "--precision", "bf16"):
        found = load_scorer(folder)
        assert found.autocast is torch.bfloat16
        assert {p.dtype for p in found.model.parameters()} == {torch.float32}
        rounded, exact = (load_scorer(folder, dtype=x).of_texts(TEXTS) for x in ("auto", "float32"))
        assert rounded != exact
        assert found.of_texts(TEXTS) == rounded


def test_weights_that_say_nothing_of_their_training_read_bytes_where_they_can(
    tmp_path, tokenizer_file
):
    TitanMAC(TITAN_MAC["tiny"]).save_pretrained(tmp_path / "bytes")
    found = load_scorer(tmp_path / "bytes")
    assert (found.tokenizer.vocab_size, found.length) == (256, 2048)
    shape = TitanMACConfig(vocab_size=290, dim=16, layers=1, heads=2, segment=64)
    TitanMAC(shape).save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match=r"wanted a tokenizer of 290 tokens: .*words has no token"):
        load_scorer(tmp_path / "words")
    found = load_scorer(tmp_path / "words", tokenizer=str(tokenizer_file))
    assert found.tokenizer.vocab_size == TOKENS


def test_what_cannot_be_scored_is_told_in_a_sentence(tmp_path, tokenizer_file):
    (tmp_path / "nothing").mkdir()
    TransformerNP(TransformerNPConfig(x_width=1, width=16, layers=1, heads=2)).save_pretrained(
        tmp_path / "tasks"
    )
    bytes_ = tmp_path / "bytes"
    TitanMAC(TITAN_MAC["tiny"]).save_pretrained(bytes_)
    shutil.copytree(bytes_, tmp_path / "other")
    (tmp_path / "other/run.json").write_text(json.dumps({"model": "hybrid", "seq_len": 3}))
    refused = [
        (tmp_path / "nothing", {}, FileNotFoundError, r"config\.json"),
        (tmp_path / "tasks", {}, ValueError, "wanted a TitanMAC or HybridLM; .* is a Transfor"),
        (tmp_path / "other", {}, ValueError, "wanted settings of titan-mac in .*run.json"),
        (bytes_, {"tokenizer": str(tokenizer_file)}, ValueError, "a tokenizer of 256 tokens at m"),
        (bytes_, {"max_length": 0}, ValueError, "length must be at least 1; got 0"),
        (bytes_, {"batch_size": 0}, ValueError, "batch_size must be at least 1; got 0"),
        (bytes_, {"dtype": "int8"}, ValueError, "dtype must be one of auto, float64"),
        (bytes_, {"device": "tpu"}, ValueError, "device must be cpu, cuda or cuda:N"),
    ]
    for folder, options, error, message in refused:
        with pytest.raises(error, match=message):
            load_scorer(folder, **options)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A scorer that reads tokens of a tokenizer, changed before it is saved."""

    def make(change=lambda tokenizer: None, length: int = 12) -> Scorer:
        torch.manual_seed(0)
        tokenizer = byte_level()
        change(tokenizer)
        file = tmp_path_factory.mktemp("words") / "tokenizer.json"
        tokenizer.save(str(file))
        shape = TitanMACConfig(vocab_size=300, dim=16, layers=1, heads=2, segment=64)
        return Scorer(TitanMAC(shape).double().eval(), LibraryTokenizer(str(file)), length)

    return make


AROUND = {
    "an end": (lambda t: None, ["</s>"], ["</s>"]),
    "a beginning": (
        lambda t: setattr(
            t,
            "post_processor",
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ),
        ["<s>"],
        [],
    ),
    "both": (
        lambda t: setattr(
            t,
            "post_processor",
            processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            ),
        ),
        ["<s>"],
        ["</s>"],
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_empty_contexts_are_what_stands_before_a_document(name, words):
    change, before, ends = AROUND[name]
    scorer = words(change)
    found = [scorer.tokenizer._tokenizer.id_to_token(token) for token in scorer.tokenizer.before]
    assert found == before
    numbers = {scorer.tokenizer._tokenizer.id_to_token(token) for token in scorer.tokenizer.ends}
    assert numbers == set(ends)
    context, continuation = scorer.encoded("", "the cat")
    assert context.tolist() == list(scorer.tokenizer.before)
    assert continuation.tolist() == scorer.tokenizer.prompt(b"the cat").tolist()


def test_documents_with_nothing_between_them_follow_a_newline(words, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "\n": 1, "?": 2}, unk_token="?"))
    tokenizer.save(str(tmp_path / "words.json"))
    assert list(LibraryTokenizer(str(tmp_path / "words.json")).before) == [1]
    # One that splits at white space has no token of it.
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "split.json"))
    scorer = words()
    scorer = Scorer(scorer.model, LibraryTokenizer(str(tmp_path / "split.json")), 9)
    assert np.isfinite(scorer.log_likelihoods([("a", "a")])[0][0])
    with pytest.raises(ValueError, match="wanted a context, or a tokenizer with a token of a"):
        scorer.of_texts(["a"])


@pytest.mark.parametrize(
    "pair",
    [
        ("the cat", " sat"),
        ("the c", "at"),
        ("th", "e"),
        ("\N{SNOWMAN}", "\N{SNOWMAN}"),
        ("a", "\N{SNOWMAN}"),
        ("that ", "was"),
        (" ", " "),
    ],
)
def test_tokens_of_both_are_those_of_the_text(pair, words):
    """Also where the context's last token and the continuation's first are one in the whole."""
    scorer = words()
    context, continuation = scorer.encoded(*pair)
    assert len(context)
    assert len(continuation)
    decode = scorer.tokenizer.decode
    assert decode(np.concatenate([context, continuation])) == "".join(pair).encode()
    nats, _ = scorer.log_likelihoods([pair])[0]
    tokens = torch.tensor([[*context.tolist(), *continuation.tolist()]])
    with torch.no_grad():
        logits = scorer.model.logits(scorer.model(tokens[:, :-1])[0])[0]
    found = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[len(context) - 1 :].sum()
    assert abs(nats - float(found)) <= 2**10 * torch.finfo(torch.float64).eps * abs(nats)


def test_writing_ends_with_the_document(words, monkeypatch):
    """And neither the token that ends it nor what is written after it is text."""
    scorer = words()
    own = scorer.tokenizer._tokenizer
    spelled = [*own.encode("the cat").ids, own.token_to_id("</s>"), *own.encode("mat").ids]
    asked = []

    def logits(hidden):
        found = torch.zeros(len(hidden), 300)
        # A token that the tokenizer lacks is the most likely one, and never written.
        found[:, 299], found[:, spelled[len(asked)]] = 9.0, 8.0
        asked.append(hidden)
        return found

    monkeypatch.setattr(scorer.model, "logits", logits)
    assert scorer.continuations(["the"], tokens=99) == ["the cat"]
    assert len(asked) == spelled.index(own.token_to_id("</s>")) + 1


def test_windows_that_cut_characters_score_their_tokens(words):
    """A snowman is three tokens of a byte each, of which a window reads two."""
    scorer = words(length=2)
    tokens = [
        *scorer.tokenizer.before,
        *scorer.tokenizer.prompt("\N{SNOWMAN}".encode() * 2).tolist(),
    ]
    assert len(tokens) == 7
    wanted = 0.0
    for place in (0, 2, 4):
        with torch.no_grad():
            hidden = scorer.model(torch.tensor([tokens[place : place + 2]]))[0]
            found = scorer.model.logits(hidden)[0].log_softmax(-1)
        wanted += float(found[0, tokens[place + 1]] + found[1, tokens[place + 2]])
    (nats,) = scorer.of_texts(["\N{SNOWMAN}" * 2])
    assert abs(nats - wanted) <= 2**10 * torch.finfo(torch.float64).eps * abs(wanted)


def test_special_tokens_of_another_name_end_no_document(words):
    scorer = words(lambda t: t.add_special_tokens([AddedToken("<mask>", special=True)]))
    assert [scorer.tokenizer._tokenizer.id_to_token(t) for t in scorer.tokenizer.ends] == ["</s>"]
