"""What a language model makes of texts: log-probabilities and continuations.

A token's probability is that of the model given the tokens before it in its window, `length` of
them at most. What is scored is predicted once: a text of more tokens than a window reads goes
through the model in windows that follow one another, each beginning with the last token of the one
before, the last one as long as the others; so does lm-eval with its own models. Every window is
read from the state before the first token. What a model carries along, TitanMAC's memory from
segment to segment, HybridLM's delta rule, it carries through the whole window, and not from one
window to the next.

Windows of a batch are filled up behind their ends, where no token that is scored sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..models.hybrid import HybridLM, Reading
from ..models.titan_mac import TitanMAC
from ..text import Tokenizer, generate

# Logits of so many tokens and vocabulary entries are in memory at once.
LOGITS = 2**26
# The token that fills batches up.
FILLING = 0
# As long as lm-eval's own models write where a task does not say.
MOST_TOKENS = 256
# What tasks call the number of tokens to write.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# What a request may say of drawing; more would be left out in silence.
DRAWN = {"do_sample", "temperature", "top_p", "until", *LENGTHS}


class Window(NamedTuple):
    """What goes through the model at once.

    Attributes:
        text: its number among those that are scored.
        tokens: ``[n + 1]``: n that are read, and the one after them.
        scored: how many of the last ones count.
    """

    text: int
    tokens: np.ndarray
    scored: int


def windows_of(text: int, tokens: np.ndarray, scored: int, length: int) -> Iterator[Window]:
    """Windows that predict each of the last ``scored`` tokens once, from ``length`` at most.

    ``scored`` is less than the number of tokens.
    """
    first = len(tokens) - scored
    while first < len(tokens):
        # Where all that is left fits, what comes before it fills the window up.
        end = min(first + length, len(tokens))
        yield Window(text, tokens[max(0, end - 1 - length) : end], end - first)
        first = end


@dataclass(frozen=True)
class Scorer:
    """Scores and continues texts.

    Attributes:
        model: in evaluation mode.
        tokenizer: of no more tokens than the model's vocabulary has.
        length: tokens that a window reads, 1 or more.
        batch_size: windows, or prompts, that go through the model together.
        autocast: the dtype that the model computes in; None is that of its parameters.
    """

    model: TitanMAC | HybridLM
    tokenizer: Tokenizer
    length: int
    batch_size: int = 1
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a number is below 1, or the model lacks tokens of the tokenizer.
        """
        for name in ("length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        wanted, got = self.model.config.vocab_size, self.tokenizer.vocab_size
        if got > wanted:
            raise ValueError(f"wanted a tokenizer of {wanted} tokens at most; got one of {got}")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def log_likelihoods(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each context and continuation: the sum of log p(token) over the continuation's, in
        nats, and whether each of these is the most likely one. 0 and true of one without tokens.

        Both are cut as lm-eval does it: white space at the end of a context is the continuation's;
        the text is made into tokens as a whole, and the tokens after as many as the context alone
        has are the continuation's. Where that leaves none of them, each is made into tokens by
        itself. An empty context is what stands before a document.

        Raises:
            ValueError: a log-probability is not finite; a context is empty and the tokenizer has
                nothing that stands before a document.
        """
        encoded = [self.encoded(*pair) for pair in pairs]
        return self._scores([(np.concatenate(parts), len(parts[1])) for parts in encoded])

    def of_texts(self, texts: Iterable[str]) -> list[float]:
        """Of each text: the sum of log p(token) over all its tokens, in nats, the first one after
        what stands before a document.

        Raises:
            ValueError: as `log_likelihoods`.
        """
        return [nats for nats, _ in self.log_likelihoods(("", text) for text in texts)]

    def encoded(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of both; a context has one or more."""
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        if context == "":
            return self._beginning(), self._tokens(continuation)
        before = self._tokens(context)
        whole = self._tokens(context + continuation)
        if len(whole) <= len(before):
            # The context's last token and the continuation's became one.
            after = self._tokens(continuation)
        else:
            before, after = whole[: len(before)], whole[len(before) :]
        return (before if len(before) else self._beginning()), after

    def continuations(
        self,
        contexts: Iterable[str],
        *,
        tokens: int,
        until: Sequence[str] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> list[str]:
        """What the model writes after each context, whose last `length` tokens are read.

        Written tokens are read one by one, the state carried on, however many there are. A text
        ends before the first of ``until``, before a token that ends a document, and with so many
        tokens. Bytes that are no character of UTF-8, such as the half of one, are U+FFFD.

        Args:
            contexts: what is to be continued.
            tokens: at most so many, 1 or more.
            until: texts that end it.
            temperature, top_p: as of `generate`.

        Raises:
            ValueError: as `generate`.
        """
        stops = [text.encode("utf-8", errors="replace") for text in until if text]
        prompts = [torch.from_numpy(self._prompt(context)) for context in contexts]
        model = Reading(self.model) if isinstance(self.model, HybridLM) else self.model
        found = [""] * len(prompts)
        # A batch reads at once what its shortest prompt has.
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            with self._computing():
                drawn = generate(
                    model,
                    [prompts[place].to(self.device) for place in places],
                    tokens=tokens,
                    temperature=temperature,
                    top_p=top_p,
                    vocab_size=self.tokenizer.vocab_size,
                    enough=lambda row: self._text(np.array(row), stops)[1],
                )
            for place, row in zip(places, drawn.tokens, strict=True):
                found[place] = self._text(row.cpu().numpy(), stops)[0]
        return found

    def _text(self, tokens: np.ndarray, stops: list[bytes]) -> tuple[str, bool]:
        """What tokens say up to their end, and whether that has come."""
        ends = np.flatnonzero(np.isin(tokens, list(self.tokenizer.ends)))
        written = self.tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens)
        # Text in UTF-8 is found in bytes just where it is found in characters.
        places = [place for stop in stops if (place := written.find(stop)) >= 0]
        text = written[: min(places, default=None)].decode("utf-8", errors="replace")
        return text, bool(places) or len(ends) > 0

    def _scores(self, asked: list[tuple[np.ndarray, int]]) -> list[tuple[float, bool]]:
        """Of each tokens and number of the last ones."""
        windows = [
            window
            for number, (tokens, scored) in enumerate(asked)
            for window in windows_of(number, tokens, scored, self.length)
        ]
        # Long ones first: what does not fit into memory fails at once.
        windows.sort(key=lambda window: -len(window.tokens))
        nats, greedy = [0.0] * len(asked), [True] * len(asked)
        for start in range(0, len(windows), self.batch_size):
            batch = windows[start : start + self.batch_size]
            for window, (sum_, likely) in zip(batch, self._of_batch(batch), strict=True):
                nats[window.text] += sum_
                greedy[window.text] &= likely
        return list(zip(nats, greedy, strict=True))

    @torch.no_grad()
    def _of_batch(self, windows: list[Window]) -> list[tuple[float, bool]]:
        lengths = [len(window.tokens) - 1 for window in windows]
        tokens = np.full((len(windows), max(lengths)), FILLING, dtype=np.int64)
        counted = np.zeros(tokens.shape, dtype=bool)
        for row, window in enumerate(windows):
            tokens[row, : lengths[row]] = window.tokens[:-1]
            counted[row, lengths[row] - window.scored : lengths[row]] = True
        targets = np.concatenate([window.tokens[-window.scored :] for window in windows])
        with self._computing():
            hidden = _hidden(self.model, torch.from_numpy(tokens).to(self.device))
            rows = hidden[torch.from_numpy(counted).to(self.device)]
            given = torch.from_numpy(targets.astype(np.int64)).to(self.device)
            at_once = max(1, LOGITS // self.model.config.vocab_size)
            parts = [
                self._of_rows(*part)
                for part in zip(rows.split(at_once), given.split(at_once), strict=True)
            ]
        nats, likely = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
        if not nats.isfinite().all():
            raise ValueError("wanted finite log-probabilities; got others: has the model diverged?")
        counts = [window.scored for window in windows]
        return [
            (float(sum_.sum()), bool(most.all()))
            for sum_, most in zip(nats.split(counts), likely.split(counts), strict=True)
        ]

    def _of_rows(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """log p of each target ``[n]`` after ``hidden [n, d]``, in fp64, and whether it is the one
        that `generate` would take.
        """
        logits = self.model.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        most = logits[:, : self.tokenizer.vocab_size].argmax(-1)
        nats = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return nats.double(), most == targets

    def _prompt(self, context: str) -> np.ndarray:
        tokens = self._tokens(context)
        return (tokens if len(tokens) else self._beginning())[-self.length :].astype(np.int64)

    def _tokens(self, text: str) -> np.ndarray:
        # Python's strings may hold halves of pairs of surrogates, which UTF-8 has no bytes for.
        return self.tokenizer.prompt(text.encode("utf-8", errors="replace"))

    def _beginning(self) -> np.ndarray:
        if not self.tokenizer.before:
            raise ValueError(
                "wanted a context, or a tokenizer with a token of a newline or around documents; "
                "got neither"
            )
        return np.array(self.tokenizer.before)

    def _computing(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


def generation_options(asked: dict[str, Any]) -> dict[str, Any]:
    """Options of `Scorer.continuations` from what a task says.

    Raises:
        ValueError: it says what is not served, such as top_k of texts that are drawn.
    """
    tokens = [asked[name] for name in LENGTHS if asked.get(name) is not None]
    until = asked.get("until") or []
    temperature = float(asked.get("temperature") or 0.0)
    drawn = asked.get("do_sample", temperature > 0.0)
    if drawn and (unknown := asked.keys() - DRAWN):
        raise ValueError(
            f"wanted {', '.join(sorted(DRAWN))} of texts that are drawn; got "
            f"{', '.join(sorted(unknown))}"
        )
    return {
        "tokens": int(tokens[0]) if tokens else MOST_TOKENS,
        "temperature": (temperature or 1.0) if drawn else 0.0,
        "top_p": float(asked.get("top_p") or 1.0) if drawn else 1.0,
        "until": [until] if isinstance(until, str) else list(until),
    }


def _hidden(model: TitanMAC | HybridLM, tokens: Tensor) -> Tensor:
    return model(tokens) if isinstance(model, HybridLM) else model(tokens)[0]
