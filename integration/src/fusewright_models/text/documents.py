"""Documents to train on, as bytes: a standard library, local files, a data set of a hub."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..extras import imported
from .digests import content_digest, remembered_digests

# Folders of tests, and of what was installed beside the standard library.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# What datasets calls the readers of these files; what is not listed is text as it stands.
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
ARRAY = ".npy"
KNOWN = (*READERS, ARRAY, ".txt", ".text", ".md", ".py")
# Their bytes are no text.
PACKED = (".npz", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".arrow")
# A whole commit of the hub.
COMMIT = re.compile("[0-9a-f]{40}")
# A document of more bytes is read part after part.
PART = 2**20


class Unreadable(ValueError):
    """Rows without the text that is wanted."""


class Part(bytes):
    """The part of a document that another one follows."""


def documents(
    dataset: str | None = None,
    *,
    subset: str | None = None,
    column: str = "text",
    revision: str | None = None,
) -> Iterator[bytes]:
    """The documents of a data set one after the other, in an order that is always the same.

    Args:
        dataset: None for the Python sources of the running Python's standard library; a local
            parquet, JSON-lines, NumPy or text file, or a folder of such files; otherwise the name
            of a Hugging Face data set, of which the split "train" is read as it streams in.
        subset: the configuration of a Hugging Face data set.
        column: of parquet, JSON-lines and Hugging Face rows, the one that holds the text.
        revision: commit, tag or branch of a Hugging Face data set; None is the newest commit.

    Raises:
        ValueError: a local path holds nothing that can be read, or a row has no such column.
        OSError: a file or a hub cannot be read.
        RuntimeError: the extra "text" is needed and not installed.
    """
    place = local_place(dataset, subset, revision)
    if place is not None:
        return standard_library(place) if dataset is None else local_documents(place, column=column)
    return hub_documents(str(dataset), subset=subset, column=column, revision=revision)


def local_place(
    dataset: str | None, subset: str | None = None, revision: str | None = None
) -> Path | None:
    """The file or folder of a data set; None of one on the hub."""
    of_hub = {"subset": subset, "revision": revision}
    said = [f"{name} {value!r}" for name, value in of_hub.items() if value is not None]
    if dataset is None:
        if said:
            raise ValueError(f"a named data set has subsets and revisions; got {said[0]} alone")
        return Path(sysconfig.get_path("stdlib"))
    path = Path(dataset)
    if path.exists():
        if said:
            raise ValueError(
                f"local files have no subsets or revisions; got {said[0]} beside {dataset}"
            )
        return path
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1 or path.suffix in KNOWN:
        raise FileNotFoundError(f"wanted a file, a folder or a data set's name; {dataset} is none")
    return None


def standard_library(folder: Path) -> Iterator[bytes]:
    """The .py files of a Python's standard library, sorted by path, without its tests."""
    for path in library_files(folder):
        yield path.read_bytes()


def library_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if not LEFT_OUT.intersection(path.relative_to(folder).parts)
    ]


def local_documents(path: Path, *, column: str = "text") -> Iterator[bytes]:
    """The documents of a file, or of a folder's files sorted by path.

    A text file is one document, whatever its bytes are, and comes in parts if it is a large one; a
    row of parquet or JSON-lines is one; an array of NumPy is a document for each text in it, or one
    of its bytes.
    """
    for file in files_of(path):
        if file.suffix in PACKED:
            raise ValueError(f"wanted files of {', '.join(KNOWN)}; got {file}, which is packed")
        if file.suffix in READERS:
            yield from row_documents(file, READERS[file.suffix], column)
        elif file.suffix == ARRAY:
            yield from array_documents(file)
        else:
            yield from text_parts(file)


def files_of(path: Path) -> list[Path]:
    """A file, or a folder's files that can be read, sorted by path."""
    if not path.is_dir():
        return [path]
    files = sorted(f for f in path.rglob("*") if f.suffix in KNOWN and f.is_file())
    if not files:
        raise ValueError(f"wanted files of {', '.join(KNOWN)}; {path} holds none")
    return files


def row_documents(file: Path, reader: str, column: str) -> Iterator[bytes]:
    """The rows of a file that datasets reads."""
    library = _datasets()
    if file.stat().st_size == 0:
        return
    try:
        rows = library.load_dataset(reader, data_files=[str(file)], split="train", streaming=True)
        yield from column_of(rows, column, str(file))
    except (OSError, Unreadable):
        raise
    except Exception as error:
        # The library has errors of its own for each of its readers, with the cause behind it.
        cause = str(error.__cause__ or error).partition("\n")[0]
        raise ValueError(f"wanted rows of {reader} in {file}; got: {cause}") from error


def array_documents(file: Path) -> Iterator[bytes]:
    """Of an array of texts or of bytes."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"wanted an array of NumPy in {file}; got: {error}") from error
    if array.ndim != 1 or not (array.dtype == np.uint8 or array.dtype.kind in "US"):
        raise ValueError(
            f"wanted texts [n] or bytes [n], uint8, in {file}; got {array.dtype.name} "
            f"{list(array.shape)}"
        )
    if array.dtype.kind == "U":
        for text in array:
            yield str(text).encode("utf-8", errors="replace")
    elif array.dtype.kind == "S":
        yield from map(bytes, array)
    else:
        yield from _parts_of(array[n : n + PART].tobytes() for n in range(0, len(array), PART))


def text_parts(file: Path) -> Iterator[bytes]:
    """A file as it stands."""
    with file.open("rb") as opened:
        yield from _parts_of(iter(lambda: opened.read(PART), b""))


def parts(document: bytes) -> Iterator[bytes]:
    """A document in parts of ``PART`` bytes at most, one where it is no longer."""
    place = 0
    while len(document) - place > PART:
        end = place + part_length(document[place : place + PART + 1], PART)
        yield Part(document[place:end])
        place = end
    yield document if place == 0 else type(document)(document[place:])


def part_length(text: bytes, most: int) -> int:
    """How much of a text of more than ``most`` bytes is a part: whole lines; where there are none,
    whole characters of UTF-8; where these are none either, ``most`` bytes.
    """
    if lines := text.rfind(b"\n", 0, most) + 1:
        return lines
    for end in range(most, max(most - 4, 0), -1):
        if text[end] & 0xC0 != 0x80:
            return end
    return most


def _parts_of(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        rest += block
        while len(rest) > PART:
            length = part_length(rest, PART)
            yield Part(rest[:length])
            rest = rest[length:]
    yield rest


def hub_documents(
    name: str, *, subset: str | None = None, column: str = "text", revision: str | None = None
) -> Iterator[bytes]:
    """The documents of a Hugging Face data set, streamed: what is not asked for is not loaded."""
    options = {"split": "train", "streaming": True, "revision": revision}
    rows = _datasets().load_dataset(name, subset, **options)
    return column_of(rows, column, name)


def column_of(rows: Iterable[dict[str, Any]], column: str, where: str) -> Iterator[bytes]:
    """The text of every row, as UTF-8."""
    for number, row in enumerate(rows):
        text = row.get(column)
        if not isinstance(text, str):
            raise Unreadable(
                f"wanted text in column {column!r} of {where}; got {type(text).__name__} in row "
                f"{number}, whose columns are {', '.join(row)}"
            )
        yield text.encode("utf-8", errors="replace")


def hub_commit(dataset: str, revision: str | None = None) -> str:
    """The commit of a Hugging Face data set at a tag or branch, or its newest one; that of a whole
    commit is known without the hub.

    Raises:
        RuntimeError: the hub is not reached, or has no such data set.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    hub = imported("huggingface_hub", extra="text", purpose="data sets of the hub")
    try:
        return str(hub.dataset_info(dataset, revision=revision).sha)
    except Exception as error:
        # Of what goes wrong on the way its libraries have kinds of their own.
        raise RuntimeError(f"could not ask the hub for {dataset}: {error}") from error


def data_digest(
    dataset: str | None,
    *,
    subset: str | None = None,
    column: str = "text",
    cache: Path | None = None,
    revision: str | None = None,
) -> str:
    """Of all that `documents` would read, in hexadecimal: of the bytes of files and their names, of
    the commit of a data set on the hub.

    Args:
        dataset, subset, column, revision: as in `documents`.
        cache: folder of digests that are remembered, so that files which have not changed are not
            read again; None reads all files.

    Raises:
        ValueError, OSError, RuntimeError: as `documents`.
    """
    digest = hashlib.blake2b(repr((subset, column)).encode(), digest_size=16)
    root = local_place(dataset, subset, revision)
    if root is not None:
        files = library_files(root) if dataset is None else files_of(root)
        if cache is None:
            contents = [content_digest(file) for file in files]
        else:
            contents = remembered_digests(files, root, cache)
        for file, content in zip(files, contents, strict=True):
            name = file.relative_to(root).as_posix() if root.is_dir() else file.suffix
            digest.update(repr((name, content)).encode())
    else:
        digest.update(repr((dataset, hub_commit(str(dataset), revision))).encode())
    return digest.hexdigest()


def _datasets() -> Any:
    return imported("datasets", extra="text", purpose="data sets other than text files")
