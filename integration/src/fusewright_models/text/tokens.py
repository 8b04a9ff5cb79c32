"""Text to tokens and back: bytes, or a tokenizer of the tokenizers library."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..extras import imported

# Special tokens that end a document, by the names that they are given most often.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[SEP]")
# Documents that go through the library together: at most so many, and of so many bytes.
BATCH, BATCH_BYTES = 256, 2**22
# Of two texts that differ, so many characters are shown.
SHOWN = 20


class Tokenizer(Protocol):
    """What a corpus, an evaluation and a generation ask of a tokenizer.

    Attributes:
        vocab_size: its largest token, and one.
        before: tokens that the first one of a document follows, as far as the tokenizer decides it.
        ends: tokens after which a document is at its end.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def before(self) -> Sequence[int]: ...

    @property
    def ends(self) -> Collection[int]: ...

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """The tokens of every document, with what the tokenizer puts around one."""
        ...

    def prompt(self, text: bytes) -> np.ndarray:
        """The tokens of a text, and nothing around them."""
        ...

    def decode(self, tokens: np.ndarray) -> bytes: ...


def check_decoded(tokenizer: Tokenizer, document: bytes, tokens: np.ndarray) -> None:
    """A score in bits per byte is of the text that was read, so that tokens must give it back.

    Raises:
        ValueError: ``tokens`` decode to something else than ``document``, whose bytes that are not
            UTF-8 may have become U+FFFD.
    """
    found = tokenizer.decode(tokens)
    if found == document:
        return
    wanted, given = (text.decode("utf-8", errors="replace") for text in (document, found))
    if wanted == given:
        return
    same = zip(wanted, given, strict=False)
    place = next((n for n, (a, b) in enumerate(same) if a != b), min(len(wanted), len(given)))
    raise ValueError(
        "wanted a tokenizer whose tokens decode to the text that it read; of "
        f"{wanted[place : place + SHOWN]!r}, {place} characters into a document, it gives back "
        f"{given[place : place + SHOWN]!r}"
    )


class ByteTokenizer:
    """A token is a byte. Documents end with a newline, before the next one's first byte."""

    vocab_size = 256
    before: Sequence[int] = (ord("\n"),)
    ends: Collection[int] = ()

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        return map(self.prompt, documents)

    def prompt(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: np.ndarray) -> bytes:
        return tokens.astype(np.uint8).tobytes()


class LibraryTokenizer:
    """A tokenizer of the tokenizers library.

    Its special tokens are put around documents as its own post-processor says, and are no part of
    decoded text. Where it says nothing, the token that ends a document follows each, if the
    vocabulary has one: nothing else would tell where the next one begins. Bytes that are not UTF-8
    are read as U+FFFD. Documents are neither cut nor filled up, whatever the file says.

    Args:
        source: a tokenizer.json, or a name on the Hugging Face hub.

    Raises:
        OSError: there is no such file, or the hub cannot be reached.
        ValueError: the file holds no tokenizer.
        RuntimeError: the extra "text" is not installed.
    """

    def __init__(self, source: str) -> None:
        library = imported("tokenizers", extra="text", purpose="tokenizers")
        path = Path(source)
        if not path.is_file() and (path.exists() or path.suffix == ".json"):
            raise FileNotFoundError(f"wanted a tokenizer's file or name; got {source}")
        self._tokenizer: Any = self._read(library, source, path.is_file())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Numbers need not be dense: the largest decides how many rows an embedding has.
        self._end = self._ending()
        self.vocab_size: int = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if self.vocab_size == 0:
            raise ValueError(f"wanted a tokenizer with a vocabulary; {source} has none")
        first, last = self._around()
        # As of bytes, where nothing is put between documents.
        self.before: Sequence[int] = first or last or self.prompt(b"\n").tolist()
        self.ends: Collection[int] = frozenset(last[:1])

    @staticmethod
    def _read(library: Any, source: str, is_file: bool) -> Any:
        read = library.Tokenizer.from_file if is_file else library.Tokenizer.from_pretrained
        try:
            return read(source)
        except OSError:
            raise
        except Exception as error:
            # The library raises Exception itself where a file cannot be read as a tokenizer.
            raise ValueError(f"wanted a tokenizer in {source}; got: {error}") from error

    def _ending(self) -> list[int]:
        """What stands after a document."""
        if self._tokenizer.num_special_tokens_to_add(is_pair=False):
            return []
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special}
        return [special[name] for name in ENDS if name in special][:1]

    def _around(self) -> tuple[list[int], list[int]]:
        """What stands before a document, and behind it."""
        encoding = self._tokenizer.encode("a")
        special = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        first = [token for token, _ in takewhile(lambda pair: pair[1], special)]
        rest = special[len(first) :]
        last = [token for token, _ in takewhile(lambda pair: pair[1], reversed(rest))]
        return first, last[::-1] + self._end

    @property
    def contents(self) -> str:
        """All that decides its tokens."""
        return self._tokenizer.to_str()

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        for group in _groups(documents):
            for encoding in self._tokenizer.encode_batch_fast(group):
                yield np.array(encoding.ids + self._end, dtype=np.int32)

    def prompt(self, text: bytes) -> np.ndarray:
        decoded = text.decode("utf-8", errors="replace")
        return np.array(
            self._tokenizer.encode(decoded, add_special_tokens=False).ids, dtype=np.int32
        )

    def decode(self, tokens: np.ndarray) -> bytes:
        numbers = tokens.tolist()  # sync: none, an array of numpy is the host's
        return self._tokenizer.decode(numbers, skip_special_tokens=True).encode()


def _groups(documents: Iterable[bytes]) -> Iterator[list[str]]:
    """Texts that go through the library together, which takes many times their memory."""
    group: list[str] = []
    size = 0
    for document in documents:
        group.append(document.decode("utf-8", errors="replace"))
        size += len(document)
        if len(group) == BATCH or size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def make_tokenizer(source: str | None) -> Tokenizer:
    """Bytes for None, otherwise the tokenizer of that file or name."""
    return ByteTokenizer() if source is None else LibraryTokenizer(source)
