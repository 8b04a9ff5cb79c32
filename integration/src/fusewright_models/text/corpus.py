"""Documents split into what is trained on and what is held out, as tokens on one device.

A document is held out where a digest of its bytes says so, one in 32: of two equal ones both
are or neither is, whatever else the data set holds and in whatever order. What is held out beyond
``held_out_bytes`` is dropped, and never trained on. A data set of few documents is split by
position instead: its end is held out, from the beginning of a line.

Documents end with a newline, and lie one after the other; where each ends is kept beside them.
Those of more than a mebibyte are several: they are read and made into tokens part after part.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import numpy as np
import torch
from torch import Tensor

from .documents import Part, part_length, parts
from .streams import Stream, ends_of, read_contents, stream_of, write_contents
from .tokens import Tokenizer, check_decoded

# One document, or one byte, in so many is held out.
SHARE = 32
# Fewer documents than this are split by position.
FEW = 256
# What is held out and about so many bytes of the training text are decoded again, and compared.
COMPARED_BYTES = 2**20
# Of the training text, so many bytes are kept as text: enough for a model that counts bytes.
KEPT_BYTES = 2**24
TRAINING_TEXT, HELD_OUT_TEXT = "training.txt", "held_out.txt"


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens to score, of different documents or of different parts of one.

    Attributes:
        training: ``[N]`` uint8 or int32, on the device that trains or mapped from a file.
        held_out: ``[M]``, likewise, on the device.
        training_ends: ``[D]`` int64 on the host: where the documents of ``training`` end, the last
            one at N, which may be cut there.
        held_out_ends: likewise.
        training_text: the first bytes of the training documents, uint8 on the host.
        held_out_text: the bytes that ``held_out`` decodes to, its first token's left out: that one
            is never predicted.
        tokenizer: what made the tokens.
        digest: of all training tokens, in hexadecimal.
    """

    training: Tensor
    held_out: Tensor
    training_ends: np.ndarray
    held_out_ends: np.ndarray
    training_text: np.ndarray
    held_out_text: np.ndarray
    tokenizer: Tokenizer
    digest: str

    def beginning(self, tokens: int) -> Self:
        """The same with no more held out than its first token and so many that follow it."""
        if tokens >= len(self.held_out) - 1:
            return self
        held_out = self.held_out[: tokens + 1]
        ends = self.held_out_ends[self.held_out_ends <= tokens]
        text = self.tokenizer.decode(held_out[1:].cpu().numpy())
        return replace(
            self,
            held_out=held_out,
            held_out_ends=np.append(ends, tokens + 1),
            held_out_text=np.frombuffer(text, dtype=np.uint8),
        )

    def scored_bytes(self, *, by_document: bool) -> int:
        """Of the held-out tokens that are predicted: all but the first one, or but the first one of
        each document.
        """
        if not by_document:
            return len(self.held_out_text)
        tokens = self.held_out.cpu().numpy().astype(np.int64)
        each = np.split(tokens, self.held_out_ends[:-1])
        return sum(len(self.tokenizer.decode(document[1:])) for document in each)


def read_corpus(
    documents: Iterable[bytes],
    tokenizer: Tokenizer,
    *,
    most_tokens: int,
    held_out_bytes: int,
    device: torch.device | str = "cpu",
) -> Corpus:
    """Read documents until ``most_tokens`` are there to train on.

    Args:
        documents: bytes each; empty ones are left out.
        tokenizer: turns them into tokens.
        most_tokens: of training; what comes after them is not read.
        held_out_bytes: at most so many bytes are held out.
        device: where the tokens will lie.

    Raises:
        ValueError: there are too few documents or bytes for both parts, or tokens do not decode to
            the text that they stand for.
        OSError: they cannot be written to a temporary folder.
    """
    with TemporaryDirectory(prefix="fusewright-") as folder:
        sizes = {"most_tokens": most_tokens, "held_out_bytes": held_out_bytes}
        write_corpus(Path(folder), documents, tokenizer, **sizes)
        return load_corpus(Path(folder), tokenizer, device=device, mapped=False)


def write_corpus(
    folder: Path,
    documents: Iterable[bytes],
    tokenizer: Tokenizer,
    *,
    most_tokens: int,
    held_out_bytes: int,
) -> None:
    """What ``read_corpus`` reads, into the files of an empty folder, in memory that does not grow
    with it.

    Raises:
        ValueError: as `read_corpus`.
        OSError: the disk is full, for instance.
    """
    training_documents, held_out_documents = split(documents, held_out_bytes=held_out_bytes)
    waiting: deque[bytes] = deque()
    with (
        Stream(folder, "training", most_tokens) as training,
        (folder / TRAINING_TEXT).open("wb") as text,
    ):

        def noted(documents: Iterable[bytes]) -> Iterator[bytes]:
            for document in documents:
                waiting.append(document)
                text.write(document[: KEPT_BYTES - text.tell()])
                yield document

        compared = 0
        for tokens in tokenizer.encode(noted(training_documents)):
            document = waiting.popleft()
            if compared < COMPARED_BYTES:
                check_decoded(tokenizer, document, tokens)
                compared += len(document)
            if training.add(tokens):
                break
        # Where little is trained on, none of the documents so far may be one to hold out.
        while not held_out_documents and next(training_documents, None) is not None:
            pass
    with Stream(folder, "held_out") as held_out:
        tokens_of = tokenizer.encode(held_out_documents)
        for document, tokens in zip(held_out_documents, tokens_of, strict=True):
            check_decoded(tokenizer, document, tokens)
            held_out.add(tokens)
    for name, found in (("train on", training), ("hold out", held_out)):
        if found.count < 2:
            raise ValueError(f"wanted text with two tokens or more to {name}; got too little of it")
    scored = np.fromfile(folder / held_out.name, dtype=held_out.dtype)
    (folder / HELD_OUT_TEXT).write_bytes(tokenizer.decode(scored[1:]))
    write_contents(folder, [training, held_out])


def load_corpus(
    folder: Path, tokenizer: Tokenizer, *, device: torch.device | str = "cpu", mapped: bool
) -> Corpus:
    """What was written to a folder.

    Args:
        folder: of `write_corpus`.
        tokenizer: the same.
        device: where held-out tokens will lie, and those to train on unless they are mapped.
        mapped: whether what is trained on stays in its file, of which the system keeps in memory
            what is used.

    Raises:
        ValueError: files are missing, or other than those that were written.
        OSError: they cannot be read.
    """
    contents = read_contents(folder)
    training, held_out = (contents[name] for name in ("training", "held_out"))
    return Corpus(
        training=stream_of(folder, training, None if mapped else device),
        held_out=stream_of(folder, held_out, device),
        training_ends=ends_of(folder, training, mapped=mapped),
        held_out_ends=ends_of(folder, held_out, mapped=mapped),
        training_text=np.fromfile(folder / TRAINING_TEXT, dtype=np.uint8),
        held_out_text=np.fromfile(folder / HELD_OUT_TEXT, dtype=np.uint8),
        tokenizer=tokenizer,
        digest=training["digest"],
    )


def split(
    documents: Iterable[bytes], *, held_out_bytes: int
) -> tuple[Iterator[bytes], list[bytes]]:
    """Training documents, to be read once, and held-out ones, a list that this reading fills."""
    rest = chain.from_iterable(parts(with_newline(text)) for text in documents if text)
    first = list(islice(rest, FEW))
    if len(first) < FEW:
        training, _held_out = by_position(b"".join(first), held_out_bytes=held_out_bytes)
        before, after = divided(first, len(training))
        return iter(before), after
    held_out_documents: list[bytes] = []

    def training_documents() -> Iterator[bytes]:
        room = held_out_bytes
        for document in chain(first, rest):
            if not is_held_out(document):
                yield document
                continue
            part = beginning(document, room)
            if not part and not held_out_documents:
                # A line longer than all that may be held out.
                part = document[: part_length(document, room)]
            if part:
                held_out_documents.append(part)
                room -= len(part)

    return training_documents(), held_out_documents


def with_newline(document: bytes) -> bytes:
    whole = document.endswith(b"\n") or isinstance(document, Part)
    return document if whole else document + b"\n"


def divided(documents: list[bytes], place: int) -> tuple[list[bytes], list[bytes]]:
    """Documents before and after a place in their text, where one may be cut in two."""
    before: list[bytes] = []
    after: list[bytes] = []
    for document in documents:
        for side, part in ((before, document[: max(place, 0)]), (after, document[max(place, 0) :])):
            if part:
                side.append(part)
        place -= len(document)
    return before, after


def is_held_out(document: bytes) -> bool:
    """Of the bytes alone, so that copies are never on both sides."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "little") % SHARE == 0


def beginning(document: bytes, most: int) -> bytes:
    """As many whole lines as ``most`` bytes hold."""
    if len(document) <= most:
        return document
    return document[: document.rfind(b"\n", 0, most) + 1]


def by_position(text: bytes, *, held_out_bytes: int) -> tuple[bytes, bytes]:
    """The text and its end, at the beginning of a line where there is one, never inside a character
    of UTF-8.
    """
    cut = len(text) - min(len(text) // SHARE, held_out_bytes)
    line = text.find(b"\n", cut) + 1
    if 0 < line < len(text):
        return text[:line], text[line:]
    while cut < len(text) and text[cut] & 0xC0 == 0x80:
        cut += 1
    return text[:cut], text[cut:]
