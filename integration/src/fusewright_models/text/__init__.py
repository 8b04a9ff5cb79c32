"""Text as tokens on the device that trains, and how well a model knows it."""

from __future__ import annotations

from .byte_model import ByteModel
from .cache import cached_corpus, default_cache
from .corpus import Corpus, read_corpus
from .documents import data_digest, documents, hub_commit, local_place
from .evaluation import TextEvaluation, evaluate_text
from .generation import Generated, generate
from .packed_windows import PackedWindows
from .speculation import speculate
from .tokens import ByteTokenizer, LibraryTokenizer, Tokenizer, make_tokenizer
from .windows import DocumentWindows, TextBatch, Windows

__all__ = [
    "ByteModel",
    "ByteTokenizer",
    "Corpus",
    "DocumentWindows",
    "Generated",
    "LibraryTokenizer",
    "PackedWindows",
    "TextBatch",
    "TextEvaluation",
    "Tokenizer",
    "Windows",
    "cached_corpus",
    "data_digest",
    "default_cache",
    "documents",
    "evaluate_text",
    "generate",
    "hub_commit",
    "local_place",
    "make_tokenizer",
    "read_corpus",
    "speculate",
]
