"""A byte model that counts: order 2, interpolated with orders 1 and 0.

    p(c | a b) = l_2 n(abc) / n(ab) + l_1 n(bc) / n(b) + l_0 (n(c) + 1) / (n + 256)

n counts what the training text holds; n(ab) and n(b) count where another byte follows. Where a pair
ab was never seen, its term takes the next lower order's value, and so does b's. The weights sum to
one and maximise the likelihood of the end of the training text under counts of what lies before it
(Jelinek and Mercer's deleted interpolation, by expectation maximisation); counts are then taken of
all of it.
"""

from __future__ import annotations

import numpy as np

# The end of the training text that the weights are fitted to: one byte in so many, at most so many.
SHARE, MOST = 16, 2**18
ITERATIONS = 64
# Texts are scored in pieces of this many bytes.
PIECE = 2**20


class ByteCounts:
    """How often each byte follows each one and each pair, of a text ``[n]`` uint8."""

    def __init__(self, text: np.ndarray) -> None:
        pairs = (text[:-1].astype(np.int32) << 8) | text[1:]
        seen, counts = np.unique((pairs[:-1] << 8) | text[2:], return_counts=True)
        # Memory of zeros, of which a short text touches little.
        self.triples = np.zeros(2**24, dtype=np.int32)
        self.triples[seen] = counts
        self.pairs = np.bincount(pairs, minlength=2**16)
        self.bytes = np.bincount(text, minlength=2**8)
        self.after_pair = np.bincount(pairs[:-1], minlength=2**16)
        self.after_byte = self.pairs.reshape(2**8, 2**8).sum(axis=1)

    def probabilities(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """``[n, 3]``: the terms of orders 2, 1 and 0 for bytes c after a and b, each ``[n]``."""
        pair, byte = (a << 8) | b, b
        zero = (self.bytes[c] + 1) / (self.bytes.sum() + 256)
        one = _ratio(self.pairs[(b << 8) | c], self.after_byte[byte], zero)
        two = _ratio(self.triples[(pair << 8) | c], self.after_pair[pair], one)
        return np.stack([two, one, zero], axis=1)


class ByteModel:
    """Fits counts and weights to a training text.

    Args:
        text: ``[n]`` uint8, n >= 16.

    Attributes:
        weights: l_2, l_1 and l_0.

    Raises:
        ValueError: the text is shorter than 16 bytes.
    """

    def __init__(self, text: np.ndarray) -> None:
        if len(text) < SHARE:
            raise ValueError(f"wanted a training text of {SHARE} bytes or more; got {len(text)}")
        end = min(max(len(text) // SHARE, 1), MOST)
        before = ByteCounts(text[:-end])
        self.weights = fitted_weights(before.probabilities(*_triples(text, len(text) - end)))
        self.counts = ByteCounts(text)

    def bits_per_byte(self, text: np.ndarray) -> float:
        """Minus the mean of log2 p over the bytes of a text ``[n]`` uint8, n >= 1.

        Two bytes of zero stand before the first one.
        """
        if len(text) == 0:
            raise ValueError("wanted a text of one byte or more; got none")
        a, b, c = _triples(np.concatenate([np.zeros(2, dtype=np.uint8), text]), 2)
        bits = 0.0
        for start in range(0, len(c), PIECE):
            piece = slice(start, start + PIECE)
            terms = self.counts.probabilities(a[piece], b[piece], c[piece])
            bits -= float(np.log2(terms @ self.weights).sum())
        return bits / len(text)


def fitted_weights(terms: np.ndarray) -> np.ndarray:
    """The mixture weights ``[k]`` under which ``terms [n, k]`` are most likely."""
    weights = np.full(terms.shape[1], 1.0 / terms.shape[1])
    for _ in range(ITERATIONS):
        shares = terms * weights
        weights = (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)
    return weights


def _triples(text: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every byte from ``start >= 2`` on, last, and the two before it, int64."""
    wide = text[start - 2 :].astype(np.int64)
    return wide[:-2], wide[1:-1], wide[2:]


def _ratio(count: np.ndarray, total: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    return np.where(total > 0, count / np.maximum(total, 1), otherwise)
