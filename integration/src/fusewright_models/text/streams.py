"""Streams of tokens in files, written in order and mapped into memory to be read.

contents.json       of every stream its dtype, its numbers of tokens and documents, its digest
NAME.tokens         the tokens of all documents, one document after the other
NAME.ends           int64: the place in the stream where each document ends
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

CONTENTS = "contents.json"


class Stream:
    """Writes documents to a stream until it is full.

    Args:
        folder: that both files will lie in.
        name: of the stream.
        most: tokens; what comes after them is left out. None takes all.
    """

    def __init__(self, folder: Path, name: str, most: int | None = None) -> None:
        self.stem, self.most = name, most
        self.name = f"{name}.tokens"
        self.dtype = np.dtype(np.uint8)
        self.count = self.documents = 0
        self._digest = hashlib.blake2b(digest_size=8)
        self._tokens = (folder / self.name).open("wb")
        self._ends = (folder / f"{name}.ends").open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tokens.close()
        self._ends.close()

    def add(self, tokens: np.ndarray) -> bool:
        """The tokens ``[n]`` of a document, all documents' of one dtype; returns whether the stream
        is full.
        """
        tokens = tokens[: None if self.most is None else self.most - self.count]
        if len(tokens):
            self.dtype = tokens.dtype
            self.count += len(tokens)
            self.documents += 1
            content = np.ascontiguousarray(tokens).data
            self._digest.update(content)
            self._tokens.write(content)
            self._ends.write(np.int64(self.count).tobytes())
        return self.count == self.most

    def contents(self) -> dict[str, Any]:
        return {
            "stem": self.stem,
            "dtype": self.dtype.name,
            "tokens": self.count,
            "documents": self.documents,
            "digest": self._digest.hexdigest(),
        }


def write_contents(folder: Path, streams: list[Stream]) -> None:
    """Of streams that are closed."""
    found = {stream.stem: stream.contents() for stream in streams}
    (folder / CONTENTS).write_text(json.dumps(found, indent=2) + "\n")


def read_contents(folder: Path) -> dict[str, dict[str, Any]]:
    """
    Raises:
        ValueError: files are missing, or have another size than was written.
    """
    try:
        found = json.loads((folder / CONTENTS).read_bytes())
        for stream in found.values():
            for path, size in _files(folder, stream):
                if path.stat().st_size != size:
                    raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"wanted the tokens that were written to {folder}; got other files ({error}): remove "
            "that folder, and they are written again"
        ) from error
    return found


def stream_of(folder: Path, stream: dict[str, Any], device: torch.device | str | None) -> Tensor:
    """The tokens ``[N]`` on a device; None leaves them in the file."""
    path, dtype = folder / f"{stream['stem']}.tokens", np.dtype(stream["dtype"])
    if device is None:
        # Torch asks for memory that can be written: what was written would be this process's own.
        return torch.from_numpy(np.memmap(path, dtype=dtype, mode="c"))
    return torch.from_numpy(np.fromfile(path, dtype=dtype)).to(device)


def ends_of(folder: Path, stream: dict[str, Any], *, mapped: bool) -> np.ndarray:
    """Where its documents end, ``[D]``."""
    path = folder / f"{stream['stem']}.ends"
    return np.memmap(path, np.int64, mode="c") if mapped else np.fromfile(path, np.int64)


def bytes_of(stream: dict[str, Any]) -> int:
    """Of its tokens."""
    return stream["tokens"] * np.dtype(stream["dtype"]).itemsize


def _files(folder: Path, stream: dict[str, Any]) -> list[tuple[Path, int]]:
    stem, ends = stream["stem"], np.dtype(np.int64).itemsize * stream["documents"]
    return [(folder / f"{stem}.tokens", bytes_of(stream)), (folder / f"{stem}.ends", ends)]
