"""Tokens by their bytes, against the vector of ones that is never made."""

from __future__ import annotations

import pytest
import torch
from fusewright_models.models.hybrid.byte_embedding import (
    BYTES,
    POSITIONS,
    ROWS,
    ByteEmbedding,
    beginning,
)
from fusewright_testkit import Yardstick
from torch.func import functional_call

TOKENS = [b"a", b"the", "\u00fc".encode(), bytes(range(200, 240)), b"\x00", b"x" * 32]
DIM = 5


def one_hot(token_bytes):
    z = torch.zeros(len(token_bytes), ROWS)
    for token, written in enumerate(token_bytes):
        for place, byte in enumerate(beginning(written)):
            z[token, place * BYTES + byte] = len(beginning(written)) ** -0.5
    return z


def test_embedding_is_that_of_the_standardised_ones():
    made = ByteEmbedding(TOKENS, DIM, backend="reference")
    tokens = torch.tensor([[0, 1, 2], [5, 4, 3]])
    z = one_hot(TOKENS).double()

    def reference(weight, scale):
        standard = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True, correction=0)
        e = standard.to(weight.dtype) @ weight
        e = e * (e.square().mean(-1, keepdim=True) + made.norm.eps).rsqrt() * scale
        return e[tokens]

    def op(weight, scale):
        return functional_call(made, {"weight": weight, "norm.weight": scale}, (tokens,))

    # Of a size at which the norm's eps counts and is not all.
    Yardstick(reference, [torch.randn(ROWS, DIM) * 1e-3, torch.randn(DIM)]).check(op)


def test_tokens_of_any_shape_and_no_tokens():
    made = ByteEmbedding(TOKENS, DIM)
    assert made(torch.tensor(3)).shape == (DIM,)
    assert made(torch.zeros(2, 0, 4, dtype=torch.int64)).shape == (2, 0, 4, DIM)
    assert [name for name, _ in made.state_dict().items()] == ["weight", "norm.weight"]


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (b"x" * 40, 32),
        (b"x" * 31 + "\u00fc".encode(), 31),
        (b"x" * 30 + "\u20ac".encode() + b"x", 30),
        (b"x" * 30 + "\u00fc".encode() + b"x", 32),
        (b"\x80" * 50, 32),
        (b"\xff", 1),
    ],
)
def test_long_tokens_are_cut_between_characters(written, kept):
    assert beginning(written) == written[:kept]
    assert kept <= POSITIONS


def test_token_without_bytes_is_refused():
    with pytest.raises(ValueError, match="wanted bytes of every token; token 1 has none"):
        ByteEmbedding([b"a", b""], DIM)
