"""Text drawn token by token, the state carried on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fusewright_models.models.titan_mac import TITAN_MAC, TitanMAC
from fusewright_models.text import generate


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
    assert found.tolist() == [[1, 0, 4, 3, 2, 1], [3, 2, 1, 0, 4, 3]]
    # The prompt at once, and never again.
    assert model.read == [3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("tokens", [1, 4])
def test_as_many_tokens_come_as_were_asked_for(tokens):
    found = generate(Countdown(), torch.tensor([[3]]), tokens=tokens)
    assert found.shape == (1, tokens)


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
    shares = drawn.flatten().bincount(minlength=4) / len(prompt)
    assert ((shares - p).abs() <= 5.0 * (p * (1.0 - p) / len(prompt)).sqrt()).all()


def test_same_seed_same_text_and_another_seed_another():
    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(Fixed([0.0] * 9), torch.zeros(1, 1).long(), tokens=20, generator=generator)

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_tokens_that_the_tokenizer_lacks_are_never_drawn():
    prompt = torch.zeros(500, 1, dtype=torch.int64)
    assert generate(Fixed([0.0, 0.0, 99.0]), prompt, tokens=1, vocab_size=2).max() == 1


@pytest.mark.parametrize("variant", ["mac", "mag", "mal", "lmm"])
def test_titan_mac_continues_as_if_it_read_everything_again(variant):
    """The streaming memory against the whole text at every step, in fp64; 21 tokens of segments of
    8 end in the middle of one.
    """
    shape = replace(
        TITAN_MAC["tiny"], variant=variant, dim=16, heads=2, segment=8, memory_chunk=4, layers=2
    )
    model = TitanMAC(shape).double().eval()
    prompt = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    found = generate(model, prompt, tokens=12, temperature=0.0)
    text = prompt
    for _ in range(12):
        hidden, _ = model(text)
        text = torch.cat([text, model.logits(hidden[:, -1]).argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, text[:, 9:])


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 0), {}, r"prompts \[B, P\] with P >= 1; got \[1, 0\]"),
        ((4,), {}, r"prompts \[B, P\] with P >= 1; got \[4\]"),
        ((1, 1), {"tokens": 0}, "tokens must be at least 1; got 0"),
        ((1, 1), {"temperature": -1.0}, "temperature must be 0 or positive, and finite; got -1"),
        ((1, 1), {"temperature": float("nan")}, "and finite; got nan"),
    ],
)
def test_impossible_wishes_are_refused(shape, options, message):
    prompt = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        generate(Countdown(), prompt, **({"tokens": 1} | options))
