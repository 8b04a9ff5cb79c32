"""Text drawn token by token, the state carried on."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from fusewright_models.models.hybrid import HYBRID, HybridLM, Reading
from fusewright_models.models.titan_mac import TITAN_MAC, TitanMAC
from fusewright_models.text import Generated, generate, speculate
from fusewright_models.text.generation import batches_of


def texts_of(found: Generated) -> list[list[int]]:
    return [row.tolist() for row in found.tokens]


class Countdown:
    """Says the token that follows its own in a circle of five; its state is what it has read."""

    def __init__(self) -> None:
        self.read = []

    def __call__(self, tokens, state=None):
        state = tokens if state is None else torch.cat([state, tokens], dim=1)
        self.read.append(tokens.shape[1])
        return torch.nn.functional.one_hot((tokens - 1) % 5, 5).float(), state

    def logits(self, hidden):
        return 50.0 * hidden


def test_most_likely_tokens_follow_one_another():
    model = Countdown()
    found = generate(model, torch.tensor([[0, 1, 2], [4, 4, 4]]), tokens=6, temperature=0.0)
    assert texts_of(found) == [[1, 0, 4, 3, 2, 1], [3, 2, 1, 0, 4, 3]]
    # The prompt at once, and never again.
    assert model.read == [3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("tokens", [1, 4])
def test_as_many_tokens_come_as_were_asked_for(tokens):
    found = generate(Countdown(), torch.tensor([[3]]), tokens=tokens)
    assert [row.shape for row in found.tokens] == [(tokens,)]
    assert (found.read, found.drawn, found.drafted) == (1, tokens, 0)
    assert min(found.reading_seconds, found.drawing_seconds) > 0.0


def test_rates_of_what_took_no_time_are_no_numbers():
    found = Generated([torch.tensor([3])])
    rates = found.reading_rate, found.drawing_rate, found.acceptance
    assert all(map(math.isnan, rates))
    assert found._replace(read=6, reading_seconds=2.0).reading_rate == 3.0


@pytest.mark.parametrize(
    ("lengths", "tokens", "batches", "steps"),
    [
        ([3, 3, 3], 4, [[0, 1, 2]], 4),
        ([5, 3, 4], 2, [[1, 2, 0]], 4),
        ([2, 9, 3], 4, [[0, 2], [1]], 9),
        ([2, 6, 10], 4, [[0, 1, 2]], 12),
        ([1, 7, 13], 5, [[0], [1], [2]], 15),
    ],
    ids=str,
)
def test_batches_take_the_fewest_steps(lengths, tokens, batches, steps):
    assert list(batches_of(lengths, tokens)) == batches

    def taken(cuts):
        ends = [0, *cuts, len(lengths)]
        inner = (sorted(lengths)[a:b] for a, b in itertools.pairwise(ends))
        return sum(tokens + part[-1] - part[0] for part in inner)

    places = range(1, len(lengths))
    choices = itertools.chain.from_iterable(
        itertools.combinations(places, count) for count in range(len(lengths))
    )
    assert min(map(taken, choices)) == steps
    model = Countdown()
    generate(model, [torch.zeros(n, dtype=torch.int64) for n in lengths], tokens=tokens)
    # A step is a call, but for the last one of a batch.
    assert len(model.read) == steps


def test_prompts_of_different_lengths_are_continued_as_each_alone():
    prompts = [torch.tensor(row) for row in ([0, 1, 2], [4], [1, 1, 1, 1, 3], [2, 0])]
    model = Countdown()
    found = generate(model, prompts, tokens=5, temperature=0.0)
    assert texts_of(found) == [[1, 0, 4, 3, 2], [3, 2, 1, 0, 4], [2, 1, 0, 4, 3], [4, 3, 2, 1, 0]]
    assert model.read == [1] * 9
    assert found.read == 4


def test_texts_end_with_the_tokens_that_end_them():
    model = Countdown()
    prompts = [torch.tensor([2]), torch.tensor([3, 3]), torch.tensor([1])]
    options = {"tokens": 60, "temperature": 0.0}
    found = generate(model, prompts, ends=[4, 9], **options)
    assert texts_of(found) == [[1, 0, 4], [2, 1, 0, 4], [0, 4]]
    # The host looks after 16 of them.
    assert len(model.read) == 16
    asked = []

    def enough(row):
        asked.append(list(row))
        return row[-1] == 0 or len(row) == 3

    model = Countdown()
    found = generate(model, prompts, enough=enough, **options)
    assert texts_of(found) == [[1, 0], [2, 1, 0], [0]]
    assert len(model.read) == 4
    # Each row after each of its tokens, and none after its end.
    assert sorted(asked) == [[0], [1], [1, 0], [2], [2, 1], [2, 1, 0]]
    found = generate(Countdown(), prompts, enough=lambda row: False, ends=[0], **options)
    assert texts_of(found) == [[1, 0], [2, 1, 0], [0]]


class Fixed:
    """The same logits whatever was read."""

    def __init__(self, logits) -> None:
        self.values = torch.tensor(logits)

    def __call__(self, tokens, state=None):
        return torch.zeros(*tokens.shape, 1), None

    def logits(self, hidden):
        return self.values.expand(len(hidden), -1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_tempered_softmax(temperature):
    logits = [0.0, 1.0, -1.0, 0.5]
    prompt = torch.zeros(20_000, 1, dtype=torch.int64)
    drawn = generate(
        Fixed(logits),
        prompt,
        tokens=1,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )
    p = (torch.tensor(logits) / temperature).softmax(-1)
    shares = torch.cat(drawn.tokens).bincount(minlength=4) / len(prompt)
    assert ((shares - p).abs() <= 5.0 * (p * (1.0 - p) / len(prompt)).sqrt()).all()


def test_tokens_are_drawn_without_waiting(host_reads):
    prompts = [torch.zeros(n, dtype=torch.int64) for n in (1, 2, 5)]
    with host_reads:
        for options in ({}, {"top_p": 0.5}, {"temperature": 0.0}):
            generate(Fixed([0.0, 1.0, 2.0, -9.0]), prompts, tokens=9, **options)
    # Whether all logits were finite, once each time.
    assert host_reads.count == 3


def test_same_seed_same_text_and_another_seed_another():
    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.zeros(1, 1).long()
        found = generate(Fixed([0.0] * 9), prompt, tokens=20, generator=generator)
        return found.tokens[0]

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_tokens_that_the_tokenizer_lacks_are_never_drawn():
    prompt = torch.zeros(500, 1, dtype=torch.int64)
    found = generate(Fixed([0.0, 0.0, 99.0]), prompt, tokens=1, vocab_size=2)
    assert torch.cat(found.tokens).max() == 1
    found = generate(Fixed([0.0, 0.0, 0.5]), prompt, tokens=1, top_p=0.4)
    assert torch.cat(found.tokens).tolist() == [2] * 500


def made(kind):
    """A small model in fp64, as `generate` knows it."""
    if kind == "hybrid":
        return Reading(HybridLM(HYBRID["tiny"]).double().eval())
    shape = replace(
        TITAN_MAC["tiny"], variant=kind, dim=16, heads=2, segment=8, memory_chunk=4, layers=2
    )
    return TitanMAC(shape).double().eval()


@pytest.mark.parametrize("kind", ["mac", "mag", "mal", "lmm", "hybrid"])
def test_models_continue_as_if_they_read_everything_again(kind):
    """States against the whole text at every step, of prompts of different lengths, one of them in
    a batch of its own; segments of 8 end within them.
    """
    model = made(kind)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (n,), generator=generator) for n in (9, 4, 25)]
    found = generate(model, prompts, tokens=8, temperature=0.0)
    for prompt, row in zip(prompts, found.tokens, strict=True):
        text = prompt.unsqueeze(0)
        for _ in range(8):
            hidden, _ = model(text)
            text = torch.cat([text, model.logits(hidden[:, -1]).argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(row, text[0, len(prompt) :])


def test_logits_that_are_not_finite_are_told_where_they_are_drawn_from():
    class Ending(Countdown):
        """Says nothing after the token 0."""

        def logits(self, hidden):
            return hidden.where(hidden[..., 4:] == 0, torch.nan)

    prompts, options = [torch.tensor([3]), torch.tensor([2, 4])], {"temperature": 0.0}
    assert texts_of(generate(Ending(), prompts, tokens=3, **options)) == [[2, 1, 0], [3, 2, 1]]
    # The first row has been at its end for two steps.
    found = generate(Ending(), prompts, tokens=9, enough=lambda row: row[-1] == 1, **options)
    assert texts_of(found) == [[2, 1], [3, 2, 1]]
    with pytest.raises(ValueError, match=r"wanted finite logits over temperature 0.0; got others"):
        generate(Ending(), prompts, tokens=4, **options)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 0), {}, r"prompts \[B, P\] with P >= 1; got \[1, 0\]"),
        ((4,), {}, r"prompts \[B, P\] with P >= 1; got \[4\]"),
        ([(2,), (0,)], {}, r"prompts \[P\] with P >= 1; got \[0\]"),
        ([(2,), (1, 2)], {}, r"prompts \[P\] with P >= 1; got \[1, 2\]"),
        ((1, 1), {"tokens": 0}, "tokens must be at least 1; got 0"),
        ((1, 1), {"temperature": -1.0}, "temperature must be 0 or positive, and finite; got -1"),
        ((1, 1), {"temperature": float("nan")}, "and finite; got nan"),
        ((1, 1), {"top_p": 0.0}, "top_p must be above 0 and at most 1; got 0.0"),
        ((1, 1), {"top_p": float("nan")}, "at most 1; got nan"),
        ((1, 1), {"vocab_size": 0}, "vocab_size must be at least 1; got 0"),
        ((1, 1), {"vocab_size": -1}, "vocab_size must be at least 1; got -1"),
    ],
)
def test_impossible_wishes_are_refused(shape, options, message):
    several = isinstance(shape, list)
    rows = [torch.zeros(each, dtype=torch.int64) for each in (shape if several else [shape])]
    for continuing in (generate, speculate):
        with pytest.raises(ValueError, match=message):
            continuing(Countdown(), rows if several else rows[0], **({"tokens": 1} | options))


def test_no_prompts_have_no_continuations():
    assert generate(Countdown(), torch.zeros(0, 3, dtype=torch.int64), tokens=2).tokens == []
