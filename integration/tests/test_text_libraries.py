"""What the libraries of the extra "text" read: rows of files, and tokens. Nothing is downloaded."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fusewright_models.text import LibraryTokenizer, documents, make_tokenizer, read_corpus
from fusewright_models.text.corpus import FEW, is_held_out

datasets = pytest.importorskip("datasets", reason="the extra 'text' is not installed")
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: E402

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
ROWS = ["first row", "second, with ä and \N{SNOWMAN}", "", "fourth\nof two lines"]


@pytest.fixture
def write(tmp_path):
    """Writes rows to a file by the suffix of its name; returns its path as text."""

    def to(name: str, rows: list[str], column: str = "text") -> str:
        path = tmp_path / name
        table = {column: rows, "number": list(range(len(rows)))}
        if path.suffix == ".parquet":
            datasets.Dataset.from_dict(table).to_parquet(str(path))
        else:
            lines = [
                dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)
            ]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return to


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A byte-level tokenizer with a few merges that puts <s> before every document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and that was that"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_lowest_versions_of_the_extra_are_those_that_tests_install():
    table = tomllib.loads(PYPROJECT.read_text())
    extra = table["project"]["optional-dependencies"]["text"]
    assert set(extra) <= set(table["dependency-groups"]["test"])


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.json"])
def test_rows_are_documents(write, name):
    assert [text.decode() for text in documents(write(name, ROWS))] == ROWS


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_text_is_in_the_column_that_is_named(write, name):
    path = write(name, ROWS, column="content")
    assert [text.decode() for text in documents(path, column="content")] == ROWS
    with pytest.raises(ValueError, match=r"column 'text' of .*, whose columns are content, nu"):
        list(documents(path))
    with pytest.raises(ValueError, match=r"column 'number' of .*; got int in row 0"):
        list(documents(path, column="number"))


def test_folder_is_read_file_after_file(write, tmp_path):
    write("c.parquet", ROWS[:1])
    write("a.jsonl", ROWS[1:2])
    (tmp_path / "b.txt").write_text("text")
    assert list(documents(str(tmp_path))) == [ROWS[1].encode(), b"text", ROWS[0].encode()]


def test_name_of_a_data_set_is_streamed_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"text": "a"}, {"text": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read = documents("HuggingFaceFW/fineweb-edu", subset="sample-10BT", revision="v1")
    assert list(read) == [b"a", b"b"]
    options = {"split": "train", "streaming": True, "revision": "v1"}
    assert asked == [(("HuggingFaceFW/fineweb-edu", "sample-10BT"), options)]


def test_streamed_data_set_is_split_by_document(write):
    rows = [f"row {number} of many" for number in range(2 * FEW)]
    tokenizer = make_tokenizer(None)
    path = write("rows.parquet", rows)
    corpus = read_corpus(documents(path), tokenizer, most_tokens=2**20, held_out_bytes=2**20)
    kept = bytes(corpus.training.tolist()).decode().splitlines()
    held_out = bytes(corpus.held_out.tolist()).decode().splitlines()
    assert held_out == [row for row in rows if is_held_out(f"{row}\n".encode())]
    assert kept == [row for row in rows if row not in held_out]


def test_tokens_are_the_librarys_and_decode_to_the_text(tokenizer_file):
    tokenizer = LibraryTokenizer(tokenizer_file)
    texts = [text.encode() for text in ("the cat", "ä \N{SNOWMAN} that", "\n")]
    theirs = Tokenizer.from_file(tokenizer_file)
    first = theirs.token_to_id("<s>")
    assert tokenizer.vocab_size == theirs.get_vocab_size() > 257
    for text, tokens in zip(texts, tokenizer.encode(iter(texts)), strict=True):
        assert tokens.tolist() == theirs.encode(text.decode()).ids
        assert tokens[0] == first
        assert tokens[1:].tolist() == tokenizer.prompt(text).tolist()
        assert tokenizer.decode(tokens) == text


def test_bits_are_per_byte_of_the_text_and_not_per_token(tokenizer_file):
    """A held-out text of few tokens for its bytes; what stands around documents has no bytes."""
    tokenizer = LibraryTokenizer(tokenizer_file)
    text = b"the cat sat on the mat and that was that\n" * 200
    corpus = read_corpus([text], tokenizer, most_tokens=2**20, held_out_bytes=2**10)
    tokens = corpus.held_out.numpy()
    assert len(tokens) < len(corpus.held_out_text) / 2
    # The first token, which nothing predicts, is <s>.
    assert tokens[0] == Tokenizer.from_file(tokenizer_file).token_to_id("<s>")
    assert corpus.held_out_text.tobytes() == text[-len(corpus.held_out_text) :]
    trained = corpus.training_text.tobytes()
    assert trained + corpus.held_out_text.tobytes() == text
    assert tokenizer.decode(corpus.training.numpy()) == trained


@pytest.mark.parametrize("documents", [1, 2 * FEW], ids=["one text", "many texts"])
def test_tokenizer_that_does_not_decode_to_what_it_read_is_refused(
    tokenizer_file, tmp_path, documents
):
    """A BPE without a decoder puts spaces between tokens, and the bytes of a score would be more
    than those of the text.
    """
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.decoder = None
    tokenizer.save(str(tmp_path / "bare.json"))
    texts = [b"%d: the cat sat on the mat and that was that\n" % n * 9 for n in range(documents)]
    with pytest.raises(ValueError, match=r"decode to the text that it read; of .* gives back '"):
        read_corpus(
            texts, make_tokenizer(str(tmp_path / "bare.json")), most_tokens=99, held_out_bytes=999
        )


@pytest.mark.parametrize(
    ("name", "special", "around", "ends"),
    [
        ("<|endoftext|>", True, False, True),
        ("</s>", True, False, True),
        ("</s>", True, True, False),
        ("</s>", False, False, False),
        ("<mask>", True, False, False),
    ],
)
def test_token_that_ends_documents_stands_between_them(
    tokenizer_file, tmp_path, name, special, around, ends
):
    """Where the vocabulary has one, as a special token, and nothing else stands around them."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.add_tokens([AddedToken(name, special=special)])
    if not around:
        tokenizer.post_processor = processors.Sequence([])
    tokenizer.save(str(tmp_path / "ends.json"))
    found = LibraryTokenizer(str(tmp_path / "ends.json"))
    end = [tokenizer.token_to_id(name)] if ends else []
    texts = [b"the cat", b"the mat"]
    tokens = [*found.encode(texts)]
    assert [one.tolist() for one in tokens] == [
        tokenizer.encode(text.decode()).ids + end for text in texts
    ]
    assert found.decode(np.concatenate(tokens)) == b"the catthe mat"
    corpus = read_corpus([b"the cat\n" * 20] * 9, found, most_tokens=999, held_out_bytes=99)
    places = np.flatnonzero(corpus.training.numpy() == tokenizer.token_to_id(name)) + 1
    assert not ends or np.array_equal(places, corpus.training_ends)


def test_documents_of_a_library_are_neither_cut_nor_filled_up(tokenizer_file, tmp_path):
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "short.json"))
    texts = [b"the", b"the cat sat on the mat"]
    short, whole = (
        [found.tolist() for found in LibraryTokenizer(str(path)).encode(texts)]
        for path in (tmp_path / "short.json", tokenizer_file)
    )
    assert short == whole


def test_vocabulary_with_gaps_counts_to_its_largest_number(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 9, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "gaps.json"))
    found = LibraryTokenizer(str(tmp_path / "gaps.json"))
    assert found.vocab_size == 10
    assert np.concatenate(list(found.encode([b"b a z"]))).tolist() == [9, 0, 3]


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"wanted a tokenizer in .*broken\.json; got: "):
        LibraryTokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(
        FileNotFoundError, match=r"wanted a tokenizer's file or name; got .*none\.js"
    ):
        LibraryTokenizer(str(tmp_path / "none.json"))


def test_tokenizer_without_vocabulary_is_refused(tmp_path):
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(ValueError, match=r"with a vocabulary; .*empty\.json has none"):
        LibraryTokenizer(str(tmp_path / "empty.json"))


@pytest.mark.parametrize(
    ("library", "use"),
    [
        ("datasets", lambda path: list(documents(path))),
        ("datasets", lambda path: list(documents("owner/name"))),
        ("tokenizers", lambda path: LibraryTokenizer("owner/name")),
    ],
    ids=["file", "hub", "tokenizer"],
)
def test_missing_library_is_told_with_the_extra_that_brings_it(write, monkeypatch, library, use):
    path = write("rows.jsonl", ROWS)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        RuntimeError, match=rf'need {library}, .*"\./integration\[text\]" brings it'
    ):
        use(path)


def test_library_that_is_itself_broken_is_not_called_missing(write, monkeypatch):
    """Something that datasets needs is not there: its own error says what."""
    path = write("rows.jsonl", ROWS)
    monkeypatch.delitem(sys.modules, "datasets")

    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "datasets":
                raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=Broken.find_spec)])
    with pytest.raises(ModuleNotFoundError, match="pyarrow"):
        list(documents(path))
