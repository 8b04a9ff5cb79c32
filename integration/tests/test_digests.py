"""Digests of data: files that have not changed are read once, by one of those that ask."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fusewright_models.cli.titan_mac import TitanMACRun
from fusewright_models.text import data_digest, digests

from .commands import written_text


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Files count as settled as soon as they are written."""
    monkeypatch.setattr(digests, "SETTLED", -1)


@pytest.fixture
def read(monkeypatch):
    """The names of the files that were read for their digests."""
    names, of = [], digests.content_digest

    def noted(file):
        names.append(file.name)
        return of(file)

    monkeypatch.setattr(digests, "content_digest", noted)
    return names


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_text(name)
    return folder


def test_unchanged_files_are_read_once_and_changed_ones_again(tmp_path, data, read):
    cache = tmp_path / "cache"

    def found():
        read.clear()
        digest = data_digest(str(data), cache=cache)
        assert digest == data_digest(str(data))
        return digest

    first = found()
    assert read == ["a.txt", "b.txt", "c.txt"]
    assert found() == first
    assert read == []
    (data / "b.txt").write_text("other length")
    second = found()
    assert read == ["b.txt"]
    (data / "d.txt").write_text("one more")
    assert len({first, second, found()}) == 3
    assert read == ["d.txt"]
    (data / "d.txt").unlink()
    assert found() == second
    assert read == []


def replaced(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_text("B.txt")
    other.replace(file)


@pytest.mark.parametrize(
    "change", [lambda file: file.write_text("B.txt"), replaced], ids=["in place", "replaced"]
)
def test_change_that_keeps_size_and_time_is_found(tmp_path, data, read, change):
    """As rsync and touch can leave one."""
    cache, file = tmp_path / "cache", data / "b.txt"
    before = data_digest(str(data), cache=cache)
    times = file.stat()
    change(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert data_digest(str(data), cache=cache) != before


def test_file_that_has_just_changed_is_not_remembered(tmp_path, data, read, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED", 10**12)
    for _ in range(2):
        read.clear()
        data_digest(str(data), cache=tmp_path / "cache")
        assert len(read) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\xff", b'{"a": [1, 2, 3]}'])
def test_memory_that_is_damaged_is_written_again(tmp_path, data, read, content):
    cache = tmp_path / "cache"
    expected = data_digest(str(data), cache=cache)
    (memory,) = cache.glob("*.digests")
    memory.write_bytes(content)
    for names in (["a.txt", "b.txt", "c.txt"], []):
        read.clear()
        assert data_digest(str(data), cache=cache) == expected
        assert read == names


def test_of_two_that_ask_at_once_one_reads(tmp_path, data, read, monkeypatch):
    of = digests.content_digest
    monkeypatch.setattr(digests, "content_digest", lambda file: (time.sleep(0.05), of(file))[1])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: data_digest(str(data), cache=tmp_path / "cache"), range(2)))
    assert read == ["a.txt", "b.txt", "c.txt"]
    assert found == [data_digest(str(data))] * 2


def test_second_run_on_a_file_does_not_read_it(tmp_path, read):
    file, cache = written_text(tmp_path), tmp_path / "cache"
    flags = dict(preset="tiny", seq_len=20, device="cpu", dataset=str(file), cache=str(cache))
    first = TitanMACRun.from_flags(flags).corpus()
    assert read == [file.name]
    second = TitanMACRun.from_flags(flags).corpus()
    assert read == [file.name]
    assert second.digest == first.digest
