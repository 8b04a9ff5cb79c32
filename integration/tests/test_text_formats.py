"""What data sets may be: a clear result, or an error in a sentence."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fusewright_models.text import cached_corpus, data_digest, documents, make_tokenizer

datasets = pytest.importorskip("datasets", reason="the extra 'text' is not installed")
import huggingface_hub  # noqa: E402

LINE = json.dumps({"text": "x"}) + "\n"


def array(dtype, *texts):
    return lambda path: np.save(path, np.array(texts, dtype=dtype), allow_pickle=True)


def content(text: bytes):
    return lambda path: path.write_bytes(text)


def rows(*texts, column="text"):
    return lambda path: datasets.Dataset.from_dict({column: [*texts]}).to_parquet(str(path))


@pytest.mark.parametrize(
    ("name", "write", "expected"),
    [
        ("empty.txt", content(b""), [b""]),
        ("no_utf8.txt", content(b"\xff\xfe\n\x00"), [b"\xff\xfe\n\x00"]),
        ("no_suffix", content(b"text"), [b"text"]),
        ("empty.jsonl", content(b""), []),
        ("one.jsonl", content(LINE.encode()), [b"x"]),
        ("no_newline.jsonl", content(LINE.strip().encode()), [b"x"]),
        ("blank.jsonl", content(f"{LINE}\n{LINE}".encode()), [b"x", b"x"]),
        (
            "surrogate.jsonl",
            content(b'{"text": "\\ud800"}\n'),
            "rows of json in .*; got: .*surrogate",
        ),
        ("broken.jsonl", content(b'{"text": '), "wanted rows of json in .*broken.jsonl; got: "),
        ("no_utf8.jsonl", content(b'{"text": "\xff"}\n'), "rows of json in .*; got: 'utf-8' codec"),
        ("null.jsonl", content(b'{"text": null}\n'), "wanted text in column 'text' of .*NoneType"),
        ("number.jsonl", content(b'{"text": 1}\n'), "wanted text in column 'text' of .*; got int"),
        ("other.jsonl", content(b'{"a": "x"}\n'), "wanted text in column 'text' .*columns are a"),
        ("rows.parquet", rows("a", "b"), [b"a", b"b"]),
        ("other.parquet", rows("a", column="b"), "wanted text in column 'text' .* columns are b"),
        ("empty.parquet", content(b""), []),
        ("broken.parquet", content(b"no parquet"), "wanted rows of parquet in .*; got: "),
        ("texts.npy", array(str, "a", "\u00e4"), [b"a", "\u00e4".encode()]),
        ("bytes.npy", array("S", b"a", b"bc"), [b"a", b"bc"]),
        ("text.npy", array(np.uint8, *b"text"), [b"text"]),
        ("numbers.npy", array(np.int64, 1, 2), r"wanted texts \[n\] or bytes .*; got int64 \[2\]"),
        ("square.npy", array(np.uint8, [1], [2]), r"wanted texts \[n\] .*; got uint8 \[2, 1\]"),
        (
            "objects.npy",
            array(object, "a", None),
            "wanted an array of NumPy in .*Python objects",
        ),
        ("empty.npy", content(b""), "wanted an array of NumPy in .*empty.npy; got: "),
        ("packed.jsonl.gz", content(b"\x1f\x8b"), "wanted files of .*jsonl.gz, which is packed"),
        ("arrays.npz", content(b"PK"), "wanted files of .*arrays.npz, which is packed"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:20] else "",
)
def test_every_file_is_read_or_refused_in_a_sentence(tmp_path, name, write, expected):
    path = tmp_path / name
    write(path)
    if isinstance(expected, list):
        assert list(documents(str(path))) == expected
        return
    with pytest.raises(ValueError, match=expected) as told:
        list(documents(str(path)))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("most", [2**10, 2**14])
@pytest.mark.parametrize("line", [b"x", "\u00e4".encode(), b"\xff", b"\x80", b"a b\n"], ids=ascii)
def test_lines_of_any_length_are_read_in_parts(tmp_path, monkeypatch, line, most):
    """As long beside a part as lines of a gigabyte are."""
    monkeypatch.setattr(sys.modules["fusewright_models.text.documents"], "PART", most)
    text = line * (9 * most // len(line)) + b"\nend\n"
    (tmp_path / "long.txt").write_bytes(text)
    np.save(tmp_path / "long.npy", np.frombuffer(text, dtype=np.uint8))
    for name in ("long.txt", "long.npy"):
        parts = list(documents(str(tmp_path / name)))
        assert b"".join(parts) == text
        assert max(map(len, parts)) <= most
        assert len(parts) > 8
        if line not in (b"\xff", b"\x80"):
            assert all(part.decode() for part in parts)
        corpus = cached_corpus(
            lambda parts=parts: iter(parts),
            make_tokenizer(None),
            data=name,
            most_tokens=2**30,
            held_out_bytes=500,
            cache=tmp_path / "cache",
        )
        both = [*corpus.training.tolist(), *corpus.held_out.tolist()]
        assert bytes(both) == text


def test_a_row_longer_than_the_readers_block_is_read(tmp_path):
    long = "x" * 12 * 2**20
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": long}) + "\n" + LINE)
    assert list(documents(str(path))) == [long.encode(), b"x"]


@pytest.mark.parametrize("kind", ["generator", "json"])
def test_streamed_data_set_is_read_once_for_each_of_its_commits(tmp_path, monkeypatch, kind):
    """And a run goes on from the tokens, however far the stream was read."""
    read = []

    def generated():
        for number in range(600):
            read.append(number)
            yield {"text": f"row {number} of many"}

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in generated()))
    load = datasets.load_dataset

    def load_dataset(name, subset, *, split, streaming, revision):
        assert (name, subset, split, streaming) == ("owner/name", None, "train", True)
        asked.append(name)
        if kind == "json":
            return load("json", data_files=[str(file)], split="train", streaming=True)
        return datasets.IterableDataset.from_generator(generated)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    asked, digests = [], []
    for commit in ("1", "1", "2"):
        info = SimpleNamespace(sha=commit)
        monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name, revision, info=info: info)
        read.clear()
        corpus = cached_corpus(
            lambda: documents("owner/name"),
            make_tokenizer(None),
            data=data_digest("owner/name"),
            most_tokens=2000,
            held_out_bytes=100,
            cache=tmp_path / "cache",
        )
        # What is not asked for is not loaded.
        assert len(read) < 400
        digests.append(corpus.digest)
    assert len(asked) == 2
    assert len(set(digests)) == 1
    assert len(corpus.training) == 2000
