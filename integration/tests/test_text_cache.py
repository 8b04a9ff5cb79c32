"""Tokens that are kept: the same ones as read again, whole or not there, in bounded memory."""

from __future__ import annotations

import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from fusewright_models.cli import app
from fusewright_models.text import (
    ByteTokenizer,
    Windows,
    cached_corpus,
    data_digest,
    documents,
    read_corpus,
)
from fusewright_models.text.cache import default_cache
from fusewright_models.text.corpus import FEW
from fusewright_models.training import Processes
from fusewright_testkit.fresh import run_python

from .commands import assert_same_metrics, assert_same_weights, interrupted, invoke, written_text

TINY = (
    "--preset tiny --num-layers 1 --dim 16 --num-heads 2 --chunk-size 8 --memory-chunk 4 "
    "--seq-len 20 --batch-size 2 --steps 4 --log-every 1 --eval-every 2"
)
MANY = [f"document {number}\n".encode() * (1 + number % 7) for number in range(2 * FEW)]
SIZES = {"most_tokens": 2**20, "held_out_bytes": 2**12}


def cached(folder, texts=MANY, *, data="data", **sizes):
    return cached_corpus(
        lambda: iter(texts), ByteTokenizer(), data=data, cache=folder, **(SIZES | sizes)
    )


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def unread():
    raise AssertionError("the data is read again")
    yield b""


@pytest.mark.parametrize("texts", [MANY, MANY[:3]], ids=["many", "few"])
def test_kept_tokens_are_those_that_are_read_and_are_read_once(tmp_path, texts):
    expected = read_corpus(texts, ByteTokenizer(), **SIZES)
    for read in (texts, unread()):
        found = cached(tmp_path, read)
        assert found.digest == expected.digest
        for name in ("training", "held_out"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        for name in ("training_ends", "held_out_ends", "training_text", "held_out_text"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert len(folders(tmp_path)) == 1


def test_other_data_and_other_sizes_are_kept_beside(tmp_path):
    whole = cached(tmp_path)
    other = cached(tmp_path, MANY[::-1], data="other")
    short = cached(tmp_path, most_tokens=1000)
    assert len({whole.digest, other.digest, short.digest}) == len(folders(tmp_path)) == 3
    assert torch.equal(short.training, whole.training[:1000])


def test_data_is_known_by_contents_and_names(tmp_path):
    one, other = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_text("one")
    other.write_text("other")
    digests = [data_digest(str(tmp_path)), data_digest(str(tmp_path), column="content")]
    one.write_text("two")
    digests.append(data_digest(str(tmp_path)))
    other.rename(tmp_path / "0.txt")
    digests.append(data_digest(str(tmp_path)))
    assert len(set(digests)) == 4
    one.rename(tmp_path / "elsewhere.txt")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/other name.txt").write_text("two")
    elsewhere = data_digest(str(tmp_path / "elsewhere.txt"))
    assert elsewhere == data_digest(str(tmp_path / "copy/other name.txt"))
    assert len({data_digest(None), data_digest(None)}) == 1


def test_reading_that_fails_or_is_killed_leaves_nothing_that_is_taken(tmp_path):
    def failing():
        yield from MANY
        raise OSError("the network is gone")

    with pytest.raises(OSError, match="the network is gone"):
        cached(tmp_path, failing())
    assert folders(tmp_path) == []
    expected = cached(tmp_path).digest
    (folder,) = folders(tmp_path)
    # As if killed before the last step.
    partial = folder.rename(folder.with_name(f"{folder.name}.partial"))
    (partial / "training.tokens").write_bytes(b"half")
    assert cached(tmp_path).digest == expected
    assert folders(tmp_path) == [folder]


@pytest.mark.parametrize("name", ["training.tokens", "held_out.ends", "contents.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_tokens_are_refused(tmp_path, name, damage):
    cached(tmp_path)
    (folder,) = folders(tmp_path)
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-5])
    with pytest.raises(ValueError, match=r"wanted the tokens that were written to .*: remove that"):
        cached(tmp_path)


WRITER = """
import time
from pathlib import Path
from fusewright_models.text import ByteTokenizer, cached_corpus
cache, log = Path({cache!r}), Path({log!r})
def read():
    with log.open("a") as file:
        file.write("read\\n")
    for number in range(600):
        time.sleep(0.001)
        yield b"document %d" % number
found = cached_corpus(
    read, ByteTokenizer(), data="data", most_tokens=2**20, held_out_bytes=2**12, cache=cache
)
print(found.digest, len(found.training))
"""


def test_of_two_processes_one_reads_and_both_have_the_tokens(tmp_path):
    program = WRITER.format(cache=str(tmp_path / "cache"), log=str(tmp_path / "log"))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(run_python, [program] * 2)
    assert one == other != ""
    assert (tmp_path / "log").read_text() == "read\n"


@pytest.mark.parametrize("kind", ["documents", "lines of a file", "one line"])
def test_memory_does_not_grow_with_the_data(tmp_path, monkeypatch, kind):
    """32 MB are read, made into tokens and trained on with 6 MB of the process's own memory."""
    text_documents = sys.modules["fusewright_models.text.documents"]
    corpus = sys.modules["fusewright_models.text.corpus"]
    monkeypatch.setattr(text_documents, "PART", 2**13)
    monkeypatch.setattr(corpus, "KEPT_BYTES", 2**16)
    count, line = 2**12, b"x" * (2**13 - 1)
    texts = (line + b"\n" for _ in range(count))
    if kind != "documents":
        path = tmp_path / "large.txt"
        end = b"\n" if kind == "lines of a file" else b"x"
        with path.open("wb") as file:
            for number in range(count):
                file.write(b"%8d" % number + line[8:] + end)
        texts = documents(str(path))
    else:
        texts = (b"%8d" % number + text[8:] for number, text in enumerate(texts))
    tracemalloc.start()
    try:
        found = cached(tmp_path / "cache", texts, most_tokens=2**30)
        windows = Windows(found.training, length=128)
        batch = windows.sample(64)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.training) > 2**24
    assert batch.windows.shape == (64, 129)
    assert peak < 6 * 2**20


def test_windows_resume_to_the_token_in_any_number_of_processes(tmp_path):
    """Of mapped tokens, each process takes its rows of the batch that one alone would draw."""
    stream = cached(tmp_path).training
    generator = torch.Generator().manual_seed(0)
    length, size, whole = 7, 8, 12
    stop = int(torch.randint(1, whole, (), generator=generator))
    alone = Windows(stream, length=length, seed=5)
    expected = [alone.sample(size).windows for _ in range(whole)]
    begun = Windows(torch.from_numpy(stream.numpy().copy()), length=length, seed=5)
    for _ in range(stop):
        begun.sample(size)
    for count in (1, 2, 4):
        rows = []
        for rank in range(count):
            processes = Processes()
            processes.parallel, processes.rank, processes.count = "ddp", rank, count
            windows = Windows(cached(tmp_path, unread()).training, length=length, seed=5)
            windows.load_state_dict(begun.state_dict())
            batches = [windows.sample(size) for _ in range(stop, whole)]
            rows.append([processes.rows(batch, size).windows for batch in batches])
        found = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected[stop:], strict=True))


def test_cache_is_the_users_where_no_other_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "fusewright" / "text"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "fusewright" / "text"


@pytest.mark.usefixtures("short_samples")
def test_run_resumes_from_the_cache(tmp_path, monkeypatch):
    def run(*flags):
        return invoke(app, "titan-mac", *flags)

    text, cache = written_text(tmp_path), tmp_path / "cache"
    flags = [*TINY.split(), "--dataset", text, "--cache", cache, "--checkpoint-every", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*flags, "--out", whole).exit_code == 0
    monkeypatch.setattr("fusewright_models.cli.text.documents", lambda *given, **named: unread())
    stopped = interrupted(monkeypatch, Windows, 3, lambda: run(*flags, "--out", parts))
    assert stopped.exit_code == 130, stopped.output
    resumed = run("--resume", parts)
    assert resumed.exit_code == 0, resumed.output
    assert_same_weights(whole, parts)
    assert_same_metrics(whole, parts)
    assert len(folders(cache)) == 1
