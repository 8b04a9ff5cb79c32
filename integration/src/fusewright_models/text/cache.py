"""Tokens that are kept for later runs, under digests of the data and of the tokenizer.

A folder of the cache is complete or absent: it is written under another name, synchronised with
the disk and renamed. Processes that want the same one wait for the first, which writes it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from filelock import FileLock

from ..training.files import make_folder, sync_folder
from .corpus import Corpus, load_corpus, write_corpus
from .streams import bytes_of, read_contents
from .tokens import LibraryTokenizer, Tokenizer

# Of what is written: a change makes older folders ones that nothing asks for.
FORMAT = 1
# Streams of more bytes than these stay in their file; a host's always do.
MOST_ON_DEVICE = 2**32


def default_cache() -> Path:
    """The folder for fusewright of the user's cache (XDG_CACHE_HOME, otherwise ~/.cache)."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fusewright" / "text"


def cached_corpus(
    documents: Callable[[], Iterable[bytes]],
    tokenizer: Tokenizer,
    *,
    data: str,
    most_tokens: int,
    held_out_bytes: int,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
) -> Corpus:
    """What `read_corpus` returns, read from the data by the first one that asks for it alone.

    Args:
        documents: begins to read them.
        tokenizer: turns them into tokens.
        data: a digest of them.
        most_tokens: of training.
        held_out_bytes: at most so many are held out.
        device: of held-out tokens, and of those to train on where they are few enough.
        cache: folder of what is kept; None is `default_cache`.

    Raises:
        ValueError: as `read_corpus` and `load_corpus`.
        OSError: the cache cannot be written.
    """
    root = default_cache() if cache is None else cache
    sizes = {"most_tokens": most_tokens, "held_out_bytes": held_out_bytes}
    name = digest_of({"format": FORMAT, "data": data, "tokenizer": identity(tokenizer), **sizes})
    folder = root / name
    make_folder(root)
    with FileLock(root / f"{name}.lock"):
        if not folder.exists():
            partial = root / f"{name}.partial"
            # Of a process that was killed.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                write_corpus(partial, documents(), tokenizer, **sizes)
                for file in partial.iterdir():
                    with file.open("rb+") as opened:
                        os.fsync(opened.fileno())
                sync_folder(partial)
                partial.rename(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_folder(root)
    large = bytes_of(read_contents(folder)["training"]) > MOST_ON_DEVICE
    mapped = large or torch.device(device).type == "cpu"
    return load_corpus(folder, tokenizer, device=device, mapped=mapped)


def identity(tokenizer: Tokenizer) -> str:
    """Of a tokenizer of the tokenizers library its contents and the library's version."""
    if isinstance(tokenizer, LibraryTokenizer):
        return f"{importlib.metadata.version('tokenizers')} {tokenizer.contents}"
    return type(tokenizer).__name__


def digest_of(description: object) -> str:
    """Of numbers and texts, in hexadecimal."""
    return hashlib.blake2b(json.dumps(description).encode(), digest_size=16).hexdigest()
