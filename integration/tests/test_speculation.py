"""Texts continued by drafts are those that the model writes by itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from fusewright.gsa import KeyCache
from fusewright_models.models.hybrid import HYBRID, Drafting, HybridLM, Reading
from fusewright_models.text import generate, speculate
from fusewright_models.text.sampling import Sampling
from fusewright_models.text.speculation import MOST_PENDING
from torch.utils import _pytree as pytree

from .test_sampling import assert_drawn_from, generator

WORDS, TOKENS = 5, 2500
# Logits of the word after each, in their order.
FOLLOWING = 50.0 * torch.roll(torch.eye(WORDS), 1, dims=1)


class Chain:
    """Draws each token by the one before it, and drafts by a table of its own; a state is all that
    was read.
    """

    def __init__(self, table, drafting) -> None:
        self.table, self.drafting = table, drafting
        self.read, self.drafted = [], []

    def __call__(self, tokens, state=None):
        self.read.append(tokens.shape[1])
        state = tokens if state is None else torch.cat([state, tokens], dim=1)
        return state[:, -tokens.shape[1] :, None], state

    def logits(self, hidden):
        return self.table[hidden[..., 0]]

    def drafts(self, hidden, following, state=None):
        # What drafts is given every token of the text once, with the one after it.
        pairs = torch.stack([hidden[..., 0], following], dim=-1)
        state = pairs if state is None else torch.cat([state, pairs], dim=1)
        self.drafted = state[0].tolist()
        return self.drafting[following[:, -1:]], state


def tables(seed=0):
    drawn = torch.randn(2, WORDS, WORDS, generator=generator(seed))
    return drawn[0], drawn[0] + drawn[1]


def assert_each_drawn_from(tokens, p):
    for drawn, wanted in zip(tokens, p, strict=True):
        assert_drawn_from(drawn, wanted)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_p": 0.9}], ids=str)
def test_drafts_leave_the_distribution_as_it_is(options):
    """Of what follows each token, in a long text."""
    table, drafting = tables()
    model = Chain(table, drafting)
    found = speculate(
        model, torch.zeros(1, 1).long(), tokens=TOKENS, generator=generator(), **options
    )
    text = torch.cat([torch.zeros(1).long(), found.tokens[0]])
    of_model, of_drafts = (Sampling(**options).probabilities(x)[0] for x in (table, drafting))
    after = [text[1:][text[:-1] == word] for word in range(WORDS)]
    assert_each_drawn_from(after, of_model)
    # And the test would see drafts that are taken as they are.
    with pytest.raises(AssertionError):
        assert_each_drawn_from(after, of_drafts)
    assert 0.0 < found.acceptance < 1.0
    # Each call that accepts gives two tokens, the others one.
    assert len(model.read) - 1 + found.accepted in (TOKENS - 1, TOKENS)
    assert max(model.read) == MOST_PENDING + 1
    # What drafts has been given each pair of tokens once.
    words = text.tolist()
    pairs = [list(pair) for pair in itertools.pairwise(words)]
    assert model.drafted[: len(pairs)] == pairs[: len(model.drafted)]
    assert len(model.drafted) >= len(pairs)


def test_the_most_likely_tokens_are_those_without_drafts():
    for seed in range(5):
        model = Chain(*tables(seed))
        prompts = [torch.tensor(row) for row in ([0, 1], [2], [3, 3, 3], [4])]
        options = {"tokens": 12, "temperature": 0.0}
        wanted = generate(model, prompts, **options)
        found = speculate(model, prompts, **options)
        assert all(map(torch.equal, found.tokens, wanted.tokens))
        assert (found.read, found.drawn) == (7, 48)


@pytest.mark.parametrize("right", [True, False])
def test_calls_read_what_is_not_known_yet(right):
    """Every draft accepted, and none."""
    model = Chain(FOLLOWING, FOLLOWING if right else torch.roll(FOLLOWING, 1, dims=1))
    found = speculate(model, torch.tensor([[0]]), tokens=9, temperature=0.0)
    assert found.tokens[0].tolist() == [1, 2, 3, 4, 0, 1, 2, 3, 4]
    if right:
        assert model.read == [1, 2, 2, 2, 2]
        assert (found.drafted, found.accepted, found.acceptance) == (4, 4, 1.0)
    else:
        # The fifth is without a draft, and what it reads is read for good.
        assert model.read == [1, 2, 3, 4, 5, 5, 2, 3, 4]
        assert (found.drafted, found.accepted, found.acceptance) == (7, 0, 0.0)


def test_texts_end_with_the_tokens_that_end_them():
    model = Chain(FOLLOWING, FOLLOWING)
    prompts, options = [torch.tensor([2]), torch.tensor([4, 3])], {"temperature": 0.0}
    found = speculate(model, prompts, tokens=50, ends=[0], **options)
    assert [row.tolist() for row in found.tokens] == [[3, 4, 0], [4, 0]]
    assert len(model.read) == 4
    found = speculate(model, prompts, tokens=50, enough=lambda row: len(row) == 2, **options)
    assert [row.tolist() for row in found.tokens] == [[3, 4], [4, 0]]


def test_logits_that_are_not_finite_are_told():
    table = torch.zeros(WORDS, WORDS)
    table[3, 3] = torch.nan
    model = Chain(table, torch.zeros(WORDS, WORDS))
    with pytest.raises(ValueError, match=r"wanted finite logits over temperature 1.0"):
        speculate(model, torch.tensor([[0]]), tokens=200, generator=generator())


def hybrid():
    """In fp64, of few words, so that some drafts of it are accepted."""
    torch.manual_seed(0)
    model = HybridLM(replace(HYBRID["tiny"], vocab_size=WORDS)).double().eval()
    with torch.no_grad():
        # Logits that are far apart.
        model.head.weight.mul_(20.0)
    return model


def test_hybrid_writes_the_same_by_drafts():
    model = hybrid()
    prompts = [torch.randint(WORDS, (n,), generator=generator(n)) for n in (1, 9)]
    options = {"tokens": 24, "temperature": 0.0}
    wanted = generate(Reading(model), prompts, **options)
    found = speculate(Drafting(model), prompts, **options)
    assert all(map(torch.equal, found.tokens, wanted.tokens))
    assert 0 < found.accepted < found.drafted
    one, other = (
        speculate(Drafting(model), prompts, tokens=8, generator=generator()) for _ in range(2)
    )
    assert all(map(torch.equal, one.tokens, other.tokens))


def test_drafts_are_those_that_are_trained(assert_same_but_for_rounding):
    """In pieces, against the loss of the token after next of the whole."""
    model = hybrid()
    tokens = torch.randint(WORDS, (2, 20), generator=generator())
    h, _ = model.read_unnormed(tokens[:, :18])
    caches, parts = None, []
    for start, end in ((0, 7), (7, 8), (8, 10), (10, 18)):
        drafted, caches = model.draft(h[:, start:end], tokens[:, start + 1 : end + 1], caches)
        parts.append(model.logits(drafted))
    logits = torch.cat(parts, dim=1)
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
    assert_same_but_for_rounding([found], [model.losses(tokens).second])
    one, _ = Drafting(model).drafts(h, tokens[:, 1:19])
    assert_same_but_for_rounding([one], [logits[:, -1:]])


def test_rows_before_the_norm_are_those_that_are_normed():
    model = hybrid()
    tokens = torch.randint(WORDS, (2, 9), generator=generator())
    h, _ = model.read_unnormed(tokens)
    read, _ = model.read(tokens)
    assert torch.equal(model.normed(h), read)
    assert torch.equal(Drafting(model).logits(h), Reading(model).logits(read))


def held(state):
    """All that caches have read."""
    keys = [cache for cache in state.values() if isinstance(cache, KeyCache)]
    assert len(keys) == 1
    return [
        *(x for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor)),
        *(x[:, : each.length] for each in keys for x in (each.keys, each.values, each.index_keys)),
    ]


@pytest.mark.parametrize("length", [9, 127, 128])
def test_a_text_goes_on_from_an_earlier_state_in_another_way(length):
    """Across the room that keys have, too."""
    model = Drafting(hybrid())
    tokens = torch.randint(WORDS, (1, length + 6), generator=generator())
    _, state = model(tokens[:, :length])
    before = [x.clone() for x in held(state)]
    model((tokens[:, length : length + 2] + 1) % WORDS, state)
    assert all(map(torch.equal, before, held(state)))
    found, _ = model(tokens[:, length:], state)
    _, other = model(tokens[:, :length])
    wanted, _ = model(tokens[:, length:], other)
    assert torch.equal(found, wanted)


def test_a_token_after_each_row_is_wanted():
    model = hybrid()
    h, _ = model.read_unnormed(torch.zeros(1, 4).long())
    with pytest.raises(ValueError, match=r"wanted a token after each of \[1, 4\]; got \[1, 3\]"):
        model.draft(h, torch.zeros(1, 3).long())
