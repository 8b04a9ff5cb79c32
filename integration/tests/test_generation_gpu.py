"""What only a GPU can show of texts that are continued."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from fusewright_models.models.hybrid import HYBRID, Drafting, HybridLM, Reading
from fusewright_models.models.titan_mac import TITAN_MAC, TitanMAC
from fusewright_models.text import generate, speculate
from fusewright_testkit import no_synchronisation

pytestmark = pytest.mark.gpu
# The shortest prompt is read in one call; so many follow before the last token.
TOKENS, LENGTHS = 20, (50, 44, 61)
CALLS = TOKENS + max(LENGTHS) - min(LENGTHS)


def made(name):
    """As `generate` knows it."""
    torch.manual_seed(0)
    if name == "hybrid":
        model = HybridLM(replace(HYBRID["mini"], layers=4, vocab_size=256)).cuda().eval()
        return Reading(model)
    return TitanMAC(replace(TITAN_MAC["l4"], layers=2, vocab_size=256)).cuda().eval()


class Watched:
    """A model after whose third call nothing waits for the device, what is drawn included, until
    the last one.
    """

    def __init__(self, model) -> None:
        self.model, self.calls, self.watch = model, 0, ExitStack()

    def __call__(self, tokens, state=None):
        self.calls += 1
        if self.calls == CALLS:
            self.watch.close()
        found = self.model(tokens, state)
        if self.calls == 3:
            torch.cuda.synchronize()
            self.watch.enter_context(no_synchronisation())
        return found

    def logits(self, hidden):
        return self.model.logits(hidden)


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (n,), generator=generator).cuda() for n in lengths]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("name", ["titan-mac", "hybrid"])
def test_steps_wait_for_nothing(name, options):
    model = Watched(made(name))
    with model.watch, torch.autocast("cuda", torch.bfloat16):
        found = generate(model, prompts_of(*LENGTHS), tokens=TOKENS, **options)
    assert model.calls == CALLS
    assert [len(row) for row in found.tokens] == 3 * [TOKENS]


@pytest.mark.parametrize("name", ["titan-mac", "hybrid"])
def test_same_seed_same_text(name):
    model = made(name)

    def drawn():
        generator = torch.Generator("cuda").manual_seed(3)
        return generate(model, prompts_of(30, 33), tokens=12, generator=generator).tokens

    assert all(map(torch.equal, drawn(), drawn()))


def read(reading, parts):
    """Hidden rows of parts that follow one another, and after which there was a graph."""
    state, hidden, captured = None, [], []
    for part in parts:
        rows, state = reading(part, state)
        hidden.append(rows)
        captured.append(state.step is not None)
    return torch.cat(hidden, 1), captured


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_replayed_steps_are_the_eager_ones(rows, autocast):
    """With the same bits, past the memory that keys have at first, and after several at once."""
    model = made("hybrid").model
    torch.manual_seed(2)
    parts = torch.randint(256, (rows, 190)).cuda().split([40, *[1] * 110, 3, *[1] * 37], 1)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        wanted, none = read(Reading(model, captures=False), parts)
        found, captured = read(Reading(model), parts)
    assert torch.equal(found, wanted)
    # Each of three parts begins with an eager step: before memory grows, after that, after three.
    assert (sum(none), sum(captured)) == (0, 110 + 37 - 3)


def test_captures_that_fail_are_told_and_all_is_read(monkeypatch):
    model = made("hybrid").model
    parts = prompts_of(9)[0].unsqueeze(0).split([4, 1, 1, 1, 1, 1], 1)
    wanted, _ = read(Reading(model, captures=False), parts)
    unwatched = model.read

    def waiting(tokens, caches=None):
        torch.cuda.current_stream().synchronize()
        return unwatched(tokens, caches)

    monkeypatch.setattr(model, "read", waiting)
    with pytest.warns(UserWarning, match="steps of one token are eager: "):
        found, captured = read(Reading(model), parts)
    assert torch.equal(found, wanted)
    assert not any(captured)
    # A generator that has seen a broken capture refuses to draw.
    torch.rand(1, device="cuda")


def test_hybrid_writes_the_same_by_drafts():
    """In fp64 by the reference on the GPU, of few words, so that some drafts are accepted."""
    torch.manual_seed(0)
    config = replace(HYBRID["tiny"], vocab_size=5)
    model = HybridLM(config, backend="reference").double().cuda().eval()
    with torch.no_grad():
        # Logits that are far apart.
        model.head.weight.mul_(20.0)
    prompts = [each % 5 for each in prompts_of(1, 9)]
    options = {"tokens": 24, "temperature": 0.0}
    wanted = generate(Reading(model), prompts, **options)
    found = speculate(Drafting(model), prompts, **options)
    assert all(map(torch.equal, found.tokens, wanted.tokens))
    assert 0 < found.accepted < found.drafted
