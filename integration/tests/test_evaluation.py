"""Scores of texts are the model's own log-probabilities, however texts are cut and batched."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fusewright_models import HYBRID, TITAN_MAC, HybridLM, TitanMAC
from fusewright_models.evaluation import Scorer, scoring
from fusewright_models.evaluation.scoring import windows_of
from fusewright_models.text import ByteTokenizer

SEGMENT, LENGTH = 8, 12
TEXTS = [
    "",
    "a",
    "\n",
    "\N{SNOWMAN} and \N{LATIN SMALL LETTER E WITH ACUTE}",
    "twelve bytes",
    "thirteen byte",
    "more than two windows of them",
]
# Empty, as long as a window with what follows, longer, and longer by both; choices of one context.
PAIRS = [
    ("", "x"),
    ("\n", "\n"),
    ("ends in white  \n", "space"),
    ("x", ""),
    ("as long as", " it"),
    ("a context of more than a window", " and its end"),
    ("a", " continuation of more than a window"),
    ("a context of more than a window", " and a continuation of more than one"),
    ("\N{SNOWMAN}", "\N{SNOWMAN}\N{SNOWMAN}"),
    ("one of", " these"),
    ("one of", " two"),
]


def make(name: str, seed: int = 0):
    """In fp64: what differs by rounding then differs by little."""
    torch.manual_seed(seed)
    if name == "hybrid":
        model = HybridLM(HYBRID["tiny"])
    else:
        shape = replace(TITAN_MAC["tiny"], dim=32, segment=SEGMENT, memory_chunk=4, variant=name)
        model = TitanMAC(shape)
    # Farther from equal probabilities than at the start of a training.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model.double().eval()


@pytest.fixture(scope="module", params=["mac", "lmm", "hybrid"])
def model(request):
    return make(request.param)


def scorer_of(model, **changes) -> Scorer:
    return Scorer(**{"model": model, "tokenizer": ByteTokenizer(), "length": LENGTH} | changes)


@torch.no_grad()
def log_probabilities(model, text: bytes) -> torch.Tensor:
    """log p of what follows each byte of a text ``[n, 256]``, from the state of no token."""
    tokens = torch.tensor([list(text)])
    hidden = model(tokens) if isinstance(model, HybridLM) else model(tokens)[0]
    return model.logits(hidden[0]).log_softmax(-1)


def nats(model, text: bytes, first: int, *, length: int = LENGTH) -> torch.Tensor:
    """Of bytes ``first`` and later: of pieces of `length` bytes, each from as many before its last
    one.
    """
    total = torch.zeros((), dtype=torch.float64)
    while first < len(text):
        end = min(first + length, len(text))
        piece = text[max(0, end - 1 - length) : end]
        found = log_probabilities(model, piece[:-1])
        total += sum(found[place - end, text[place]] for place in range(first, end))
        first = end
    return total


def doubles(numbers: list[float]) -> tuple[torch.Tensor, ...]:
    return torch.tensor(numbers, dtype=torch.float64).unbind()


def expected(model, context: str, continuation: str) -> torch.Tensor:
    # White space at the end is scored with what follows it.
    before = context.rstrip().encode() or b"\n"
    whole = context + continuation if context.strip() else "\n" + context + continuation
    return nats(model, whole.encode(), len(before))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_are_the_models_log_probabilities(model, batch_size, assert_same_but_for_rounding):
    scorer = scorer_of(model, batch_size=batch_size)
    found = [score for score, _ in scorer.log_likelihoods(PAIRS)] + scorer.of_texts(TEXTS)
    wanted = [expected(model, *pair) for pair in PAIRS + [("", text) for text in TEXTS]]
    assert_same_but_for_rounding(doubles(found), wanted)
    assert found[PAIRS.index(("x", ""))] == 0.0


@pytest.mark.parametrize(
    ("tokens", "scored", "length", "wanted"),
    [
        (5, 4, 4, [(0, 5, 4)]),
        (6, 5, 4, [(0, 5, 4), (1, 6, 1)]),
        (9, 8, 4, [(0, 5, 4), (4, 9, 4)]),
        (9, 2, 4, [(4, 9, 2)]),
        (4, 3, 1, [(0, 2, 1), (1, 3, 1), (2, 4, 1)]),
        (4, 2, 100, [(0, 4, 2)]),
        (4, 0, 3, []),
    ],
)
def test_windows_predict_every_token_once_from_as_many_as_there_are(tokens, scored, length, wanted):
    found = windows_of(7, np.arange(tokens), scored, length)
    assert [(w.text, w.tokens.tolist(), w.scored) for w in found] == [
        (7, list(range(first, end)), count) for first, end, count in wanted
    ]


@pytest.mark.parametrize("name", ["mac", "lmm"])
def test_the_memory_goes_from_segment_to_segment_and_not_from_window_to_window(
    name, assert_same_but_for_rounding
):
    model = make(name)
    # Of the segments before its own a byte of "mac" knows by the memory, and by nothing else.
    text = "first windowsecond piece"
    other = text[:11].upper() + text[11:]
    pairs = [(each[:12], each[12:]) for each in (text, other)]
    # A second window begins with the last byte of the first one, and knows no more of it.
    one, same = scorer_of(model).log_likelihoods(pairs)
    assert one == same
    whole, differs = scorer_of(model, length=24).log_likelihoods(pairs)
    assert whole[0] != differs[0]
    # Within a window the scores are those of segments whose state is carried on.
    state, parts = None, []
    with torch.no_grad():
        for piece in torch.tensor([list(("\n" + text).encode())])[:, :-1].split(SEGMENT, dim=1):
            hidden, state = model(piece, state)
            parts.append(model.logits(hidden[0]).log_softmax(-1))
    streamed = torch.cat(parts).gather(1, torch.tensor([list(text.encode())]).mT).sum()
    (found,) = scorer_of(model, length=24).of_texts([text])
    assert_same_but_for_rounding(doubles([found]), [streamed])


def test_what_fills_up_a_batch_changes_no_bit(model, monkeypatch):
    scorer, found = scorer_of(model, batch_size=len(PAIRS)), []
    for filling in (0, 255):
        monkeypatch.setattr(scoring, "FILLING", filling)
        found.append(scorer.log_likelihoods(PAIRS))
    assert found[0] == found[1]


def test_logits_in_parts_are_those_at_once(model, monkeypatch, assert_same_but_for_rounding):
    scorer = scorer_of(model, batch_size=4)
    at_once = scorer.of_texts(TEXTS)
    monkeypatch.setattr(scoring, "LOGITS", 3 * 256)
    in_parts = scorer.of_texts(TEXTS)
    assert_same_but_for_rounding(doubles(in_parts), doubles(at_once))


def written(model, prompt: bytes, count: int) -> bytes:
    """The most likely bytes after the end of a prompt, each from all before it."""
    text = prompt[-LENGTH:]
    for _ in range(count):
        text += bytes([int(log_probabilities(model, text)[-1].argmax())])
    return text[len(prompt[-LENGTH:]) :]


CONTEXTS = ["of a window.", "", "a context of more than a window", "of as  many."]


def test_continuations_are_the_most_likely_bytes(model):
    wanted = [
        written(model, context.encode() or b"\n", 6).decode(errors="replace")
        for context in CONTEXTS
    ]
    for batch_size in (1, 4):
        scorer = scorer_of(model, batch_size=batch_size)
        assert scorer.continuations(CONTEXTS, tokens=6) == wanted
    # With what follows within a window: a longer one would be scored without its beginning.
    following = written(model, b"within", 6)
    pairs = [("within", "x"), ("within", following.decode(errors="replace"))]
    # Of text that is no UTF-8 there is no string whose bytes it is.
    if pairs[1][1].encode() == following:
        assert [most for _, most in scorer_of(model).log_likelihoods(pairs)] == [False, True]


class Spelling:
    """A model that spells a text, whatever it reads, and counts what it is asked for."""

    def __init__(self, text: bytes) -> None:
        self.text, self.calls = text, 0
        self.config = SimpleNamespace(vocab_size=256)

    def parameters(self):
        return iter([torch.zeros(())])

    def __call__(self, tokens, state=None):
        place = 0 if state is None else state
        self.calls += 1
        following = torch.full(tokens.shape, self.text[place % len(self.text)])
        return torch.nn.functional.one_hot(following, 256).double(), place + 1

    def logits(self, hidden):
        return 50.0 * hidden


@pytest.mark.parametrize(
    ("until", "tokens", "wanted", "calls"),
    [
        ([], 6, "tax\N{LATIN SMALL LETTER E WITH ACUTE}.", 6),
        ([], 4, "tax\ufffd", 4),
        (["."], 20, "tax\N{LATIN SMALL LETTER E WITH ACUTE}", 6),
        (["\N{LATIN SMALL LETTER E WITH ACUTE}", "zz"], 20, "tax", 5),
        (["a", "x"], 20, "t", 2),
        (["", "t"], 20, "", 1),
    ],
)
def test_text_ends_where_it_is_asked_to_and_halves_of_characters_are_told(
    until, tokens, wanted, calls
):
    model = Spelling("tax\N{LATIN SMALL LETTER E WITH ACUTE}.".encode())
    found = scorer_of(model).continuations(["x"], tokens=tokens, until=until)
    assert (found, model.calls) == ([wanted], calls)


def test_halves_of_surrogates_are_read_as_documents_have_them(model):
    scorer = scorer_of(model)
    assert scorer.of_texts(["\ud83d!"]) == scorer.of_texts(["?!"])


def test_likely_is_what_generate_would_write():
    model = Spelling(b"ab")
    scorer = scorer_of(model)
    found = scorer.log_likelihoods([("x", "a"), ("x", "aa"), ("x", "b"), ("x", "")])
    # A window is read at once here, and every byte of it spells the first.
    assert [most for _, most in found] == [True, True, False, True]


def test_losses_that_are_not_finite_are_told():
    model = make("mac")
    with torch.no_grad():
        model.embedding.weight.mul_(float("nan"))
    with pytest.raises(ValueError, match="wanted finite log-probabilities"):
        scorer_of(model).of_texts(["text"])


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, {}),
        ({"until": "\n", "top_p": 0.9}, {"until": ["\n"]}),
        (
            {"until": ["a", "b"], "max_new_tokens": 7, "do_sample": False, "temperature": 0.7},
            {"tokens": 7, "until": ["a", "b"]},
        ),
        (
            {"max_gen_toks": 3, "do_sample": True},
            {"tokens": 3, "temperature": 1.0},
        ),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
    ],
)
def test_what_tasks_say_of_writing_is_served(asked, wanted):
    others = {"tokens": 256, "temperature": 0.0, "top_p": 1.0, "until": []}
    assert scoring.generation_options(asked) == others | wanted


def test_what_is_not_served_of_drawn_texts_is_refused():
    with pytest.raises(ValueError, match=r"of texts that are drawn; got top_k"):
        scoring.generation_options({"do_sample": True, "top_k": 5})
