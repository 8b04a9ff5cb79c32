"""The byte model that counts, against counting by hand."""

from __future__ import annotations

import math
import sys
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from fusewright_models.text import ByteModel
from fusewright_models.text.byte_model import SHARE, ByteCounts, fitted_weights

# fp64 sums of fewer than 2^10 terms, in two orders.
ROUNDINGS = 2**10 * sys.float_info.epsilon


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def test_terms_of_a_tiny_text_are_those_counted_by_hand():
    """abacabad: after "ab" always a; after a twice b, once c, once d; eight bytes in all."""
    counts = ByteCounts(as_bytes("abacabad"))
    a, b, c, d, z = (np.array([ord(letter)]) for letter in "abcdz")
    one = Fraction
    for context, byte, expected in (
        ((a, b), a, (one(1), one(1), one(5, 264))),
        ((b, a), c, (one(1, 2), one(1, 4), one(2, 264))),
        ((b, a), d, (one(1, 2), one(1, 4), one(2, 264))),
        ((c, a), b, (one(1), one(2, 4), one(3, 264))),
        # "da" was never followed by anything: order 1 stands in.
        ((d, a), b, (one(2, 4), one(2, 4), one(3, 264))),
        # Nor was z: order 0 stands in for both.
        ((a, z), b, (one(3, 264), one(3, 264), one(3, 264))),
        ((a, b), z, (one(0), one(0), one(1, 264))),
    ):
        (found,) = counts.probabilities(*context, byte)
        assert found.tolist() == [float(term) for term in expected]


@pytest.mark.parametrize("context", ["ab", "da", "zz", "\0a"])
def test_probabilities_of_all_bytes_sum_to_one(context):
    counts = ByteCounts(as_bytes("abacabad"))
    first, second = (np.full(256, ord(letter)) for letter in context)
    terms = counts.probabilities(first, second, np.arange(256))
    # Each is rounded once, and so are their exact sums.
    sums = [math.fsum(column) for column in terms.T]
    assert sums == pytest.approx([1.0] * 3, rel=sys.float_info.epsilon)


def test_score_is_the_mean_over_bytes_of_the_mixture():
    training, scored = "the cat sat on the mat. " * 8, "that hat"
    model = ByteModel(as_bytes(training))
    singles, pairs = Counter(training), Counter(pairwise(training))
    triples = Counter(zip(training, training[1:], training[2:], strict=False))
    after = {a: sum(n for (x, _), n in pairs.items() if x == a) for a in set(training) | set("\0")}
    bits, padded = 0.0, "\0\0" + scored
    for a, b, c in zip(padded, padded[1:], padded[2:], strict=False):
        zero = (singles[c] + 1) / (len(training) + 256)
        one = pairs[b, c] / after[b] if after.get(b) else zero
        seen = sum(n for (x, y, _), n in triples.items() if (x, y) == (a, b))
        two = triples[a, b, c] / seen if seen else one
        bits -= math.log2(np.dot(model.weights, (two, one, zero)))
    assert model.bits_per_byte(as_bytes(scored)) == pytest.approx(bits / len(scored), rel=ROUNDINGS)


def test_weights_sum_to_one_and_no_others_are_more_likely():
    generator = np.random.default_rng(0)
    terms = generator.dirichlet(np.ones(3), size=500)
    weights = fitted_weights(terms)
    assert weights.sum() == pytest.approx(1.0, rel=ROUNDINGS)
    best = np.log(terms @ weights).sum()
    for other in generator.dirichlet(100.0 * weights + 1e-3, size=200):
        assert np.log(terms @ other).sum() <= best


def test_weights_are_fitted_to_the_end_of_the_training_text_alone():
    """A text whose end is noise to what lies before it gets its weight from order 0, the same text
    in one piece from order 2: counts of the fitted part would make them alike.
    """
    generator = np.random.default_rng(0)
    regular = np.tile(as_bytes("abcdefgh"), 400)
    noise = generator.integers(97, 105, size=len(regular) // (SHARE - 1), dtype=np.uint8)
    assert ByteModel(np.concatenate([regular, noise])).weights[2] > 0.5
    assert ByteModel(regular).weights[0] + ByteModel(regular).weights[1] > 0.99


def test_order_2_knows_what_order_1_does_not():
    # After a comes b or c, by what stood before the a.
    text = as_bytes("xabyac" * 200)
    assert ByteModel(text).bits_per_byte(text[:600]) < 0.1


def test_text_without_pattern_needs_the_bits_that_it_has():
    generator = np.random.default_rng(0)
    text = generator.integers(0, 4, size=400_000, dtype=np.uint8)
    assert ByteModel(text).bits_per_byte(text[:100_000]) == pytest.approx(2.0, abs=0.01)


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="a training text of 16 bytes or more; got 15"):
        ByteModel(np.zeros(15, dtype=np.uint8))
    with pytest.raises(ValueError, match="a text of one byte or more; got none"):
        ByteModel(np.zeros(16, dtype=np.uint8)).bits_per_byte(np.zeros(0, dtype=np.uint8))
