"""Documents to train on, as bytes: a standard library, local files, a data set of a hub."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..extras import imported

# Folders of tests, and of what was installed beside the standard library.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# What datasets calls the readers of these files; what is not listed is text as it stands.
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
KNOWN = (*READERS, ".txt", ".text", ".md", ".py")


def documents(
    dataset: str | None = None, *, subset: str | None = None, column: str = "text"
) -> Iterator[bytes]:
    """The documents of a data set one after the other, in an order that is always the same.

    Args:
        dataset: None for the Python sources of the running Python's standard library; a local
            parquet, JSON-lines or text file, or a folder of such files; otherwise the name of a
            Hugging Face data set, of which the split "train" is read as it streams in.
        subset: the configuration of a Hugging Face data set.
        column: of parquet, JSON-lines and Hugging Face rows, the one that holds the text.

    Raises:
        ValueError: a local path holds nothing that can be read, or a row has no such column.
        OSError: a file or a hub cannot be read.
        RuntimeError: the extra "text" is needed and not installed.
    """
    if dataset is None:
        if subset is not None:
            raise ValueError(f"a subset is part of a named data set; got {subset!r} without one")
        return standard_library()
    path = Path(dataset)
    if path.exists():
        if subset is not None:
            raise ValueError(f"local files have no subsets; got {subset!r} beside {dataset}")
        return local_documents(path, column=column)
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1 or path.suffix in KNOWN:
        raise FileNotFoundError(f"wanted a file, a folder or a data set's name; {dataset} is none")
    return hub_documents(dataset, subset=subset, column=column)


def standard_library(folder: Path | None = None) -> Iterator[bytes]:
    """The .py files of the running Python's standard library, sorted by path, without its tests."""
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    for path in sorted(folder.rglob("*.py")):
        if not LEFT_OUT.intersection(path.relative_to(folder).parts):
            yield path.read_bytes()


def local_documents(path: Path, *, column: str = "text") -> Iterator[bytes]:
    """The documents of a file, or of a folder's files sorted by path.

    A text file is one document, whatever its bytes are; a row of parquet or JSON-lines is one.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in KNOWN and f.is_file())
        if not files:
            raise ValueError(f"wanted files of {', '.join(KNOWN)}; {path} holds none")
    for file in files:
        if file.suffix in READERS:
            rows = _datasets().load_dataset(
                READERS[file.suffix], data_files=[str(file)], split="train", streaming=True
            )
            yield from column_of(rows, column, str(file))
        else:
            yield file.read_bytes()


def hub_documents(name: str, *, subset: str | None = None, column: str = "text") -> Iterator[bytes]:
    """The documents of a Hugging Face data set, streamed: what is not asked for is not loaded."""
    rows = _datasets().load_dataset(name, subset, split="train", streaming=True)
    return column_of(rows, column, name)


def column_of(rows: Iterable[dict[str, Any]], column: str, where: str) -> Iterator[bytes]:
    """The text of every row, as UTF-8."""
    for number, row in enumerate(rows):
        text = row.get(column)
        if not isinstance(text, str):
            raise ValueError(
                f"wanted text in column {column!r} of {where}; got {type(text).__name__} in row "
                f"{number}, whose columns are {', '.join(row)}"
            )
        yield text.encode("utf-8", errors="replace")


def _datasets() -> Any:
    return imported("datasets", extra="text", purpose="data sets other than text files")
