"""Documents split into what is trained on and what is held out, as tokens on one device.

A document is held out where a digest of its bytes says so, one in 32: of two equal ones both
are or neither is, whatever else the data set holds and in whatever order. What is held out beyond
``held_out_bytes`` is dropped, and never trained on. A data set of few documents is split by
position instead: its end is held out, from the beginning of a line.

Documents end with a newline, and lie one after the other.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from .tokens import Tokenizer, check_decoded

# One document, or one byte, in so many is held out.
SHARE = 32
# Fewer documents than this are split by position.
FEW = 256
# What is held out and about so many bytes of the training text are decoded again, and compared.
COMPARED_BYTES = 2**20
# Of the training text, so many bytes are kept as text: enough for a model that counts bytes.
KEPT_BYTES = 2**24


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens to score, of different documents or of different parts of one.

    Attributes:
        training: ``[N]`` uint8 or int32, on the device that trains.
        held_out: ``[M]``, likewise.
        training_text: the first bytes of the training documents, uint8 on the host.
        held_out_text: the bytes that ``held_out`` decodes to, its first token's left out: that one
            is never predicted.
        tokenizer: what made the tokens.
        digest: of all training tokens, in hexadecimal.
    """

    training: Tensor
    held_out: Tensor
    training_text: np.ndarray
    held_out_text: np.ndarray
    tokenizer: Tokenizer
    digest: str


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
    """
    training_documents, held_out_documents = split(documents, held_out_bytes=held_out_bytes)
    text, kept = [], 0

    def noted(documents: Iterable[bytes], waiting: deque[bytes]) -> Iterator[bytes]:
        nonlocal kept
        for document in documents:
            waiting.append(document)
            if kept < KEPT_BYTES:
                text.append(document[: KEPT_BYTES - kept])
                kept += len(text[-1])
            yield document

    waiting: deque[bytes] = deque()
    parts, count, compared = [], 0, 0
    for tokens in tokenizer.encode(noted(training_documents, waiting)):
        document = waiting.popleft()
        if compared < COMPARED_BYTES:
            check_decoded(tokenizer, document, tokens)
            compared += len(document)
        parts.append(tokens)
        count += len(tokens)
        if count >= most_tokens:
            break
    # Where little is trained on, none of the documents so far may be one to hold out.
    while not held_out_documents and next(training_documents, None) is not None:
        pass
    held_out = list(tokenizer.encode(held_out_documents))
    for document, tokens in zip(held_out_documents, held_out, strict=True):
        check_decoded(tokenizer, document, tokens)
    for name, found in (("train on", parts), ("hold out", held_out)):
        if sum(map(len, found)) < 2:
            raise ValueError(f"wanted text with two tokens or more to {name}; got too little of it")
    training = np.concatenate(parts)[:most_tokens]
    scored = np.concatenate(held_out)
    return Corpus(
        training=torch.from_numpy(training).to(device),
        held_out=torch.from_numpy(scored).to(device),
        training_text=np.frombuffer(b"".join(text), dtype=np.uint8),
        held_out_text=np.frombuffer(tokenizer.decode(scored[1:]), dtype=np.uint8),
        tokenizer=tokenizer,
        digest=hashlib.blake2b(training.data, digest_size=8).hexdigest(),
    )


def split(
    documents: Iterable[bytes], *, held_out_bytes: int
) -> tuple[Iterator[bytes], list[bytes]]:
    """Training documents, to be read once, and held-out ones, a list that this reading fills."""
    rest = (with_newline(document) for document in documents if document)
    first = list(islice(rest, FEW))
    if len(first) < FEW:
        training, held_out = by_position(b"".join(first), held_out_bytes=held_out_bytes)
        return iter([training]), [held_out]
    held_out_documents: list[bytes] = []

    def training_documents() -> Iterator[bytes]:
        room = held_out_bytes
        for document in chain(first, rest):
            if not is_held_out(document):
                yield document
            elif part := beginning(document, room):
                held_out_documents.append(part)
                room -= len(part)

    return training_documents(), held_out_documents


def with_newline(document: bytes) -> bytes:
    return document if document.endswith(b"\n") else document + b"\n"


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
