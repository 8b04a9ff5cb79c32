"""Texts continued by drafts: a small part of a model drafts the token after the next one, and the
model reads both at once.

    x_1 ~ p(. | prompt)
    d   ~ q(. | prompt, x_1)                      the draft
    read x_1 and d, for p(. | prompt, x_1) and p(. | prompt, x_1, d)
    with probability min(1, p(d) / q(d)):   x_2 = d,  x_3 ~ p(. | prompt, x_1, d)
    else:                                   x_2 ~ max(p - q, 0) over its sum

so that a call of the model gives two tokens where the draft is accepted, and one where it is not.

Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding, arXiv
2211.17192.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..devices import wait_for
from .generation import Enough, Generated, StreamingModel, Texts, checked_rows
from .sampling import Sampling

# So many tokens are read again with a draft; where more drafts were refused in a row, without one.
MOST_PENDING = 4


class DraftingModel(StreamingModel, Protocol):
    """What is asked of a model beside that: a call leaves the state that it is given as it is, so
    that the text can go on from there in another way.
    """

    def drafts(self, hidden: Tensor, following: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Logits ``[B, 1, V]`` of the token after next of the last of hidden rows ``[B, T, C]``,
        given the token after each ``[B, T]``; and the state of what drafts, which is another one.
        """
        ...


@torch.no_grad()
def speculate(
    model: DraftingModel,
    prompts: Tensor | Sequence[Tensor],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    ends: Collection[int] = (),
    enough: Enough | None = None,
) -> Generated:
    """Draw continuations as `generate` does, by fewer calls of the model.

    They have the same distribution, and at a temperature of 0 are the same tokens, but where a
    rounding decides which: two tokens read at once are rounded otherwise than one by one.

    Prompts are continued one after the other. A state has one position for all rows, and rows
    accept different drafts: a batch would go on as fast as the slowest of its rows, with B rows and
    a share a accepted by two tokens in a call with probability a^B. So this is for few prompts, and
    `generate` for many. The host waits for the device once in each call, to know which tokens the
    next one reads. Where a draft is refused, the next call begins at the state before it and reads
    again what was taken since.

    Args:
        model: in evaluation mode.
        prompts, tokens, temperature, top_p, vocab_size, generator, ends, enough: as of `generate`.

    Returns:
        As `generate`, and how many drafts there were and were accepted.

    Raises:
        ValueError: as `generate`.
    """
    rows = checked_rows(prompts, tokens)
    sampling = Sampling(temperature, top_p, vocab_size, generator)
    found: list[Tensor] = []
    drafted, accepted, reading, writing = 0, 0, 0.0, 0.0
    for row in rows:
        begun = time.perf_counter()
        speculation = _Speculation(model, row.unsqueeze(0), sampling)
        wait_for(row.device)
        read_at = time.perf_counter()
        found.append(speculation.until(Texts([row], tokens, ends, enough)))
        reading, writing = reading + read_at - begun, writing + time.perf_counter() - read_at
        drafted, accepted = drafted + speculation.drafted, accepted + speculation.accepted
    return Generated(found, sum(map(len, rows)), reading, writing, drafted, accepted)


class _Speculation:
    """Draws what follows one prompt ``[1, P]``.

    Attributes:
        state: of the model, before the ``pending`` tokens ``[1, n]`` that have been drawn, n >= 1.
        likely: what the next draft is drawn from, ``[1, V]``.
        columns, sound: of all tokens so far, ``[1, 1]`` and ``[1]``.
    """

    def __init__(self, model: DraftingModel, prompt: Tensor, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self.columns: list[Tensor] = []
        self.sound: list[Tensor] = []
        self.drafted = self.accepted = 0
        self.drafting: Any = None
        hidden, self.state = model(prompt)
        self.pending = self._drawn(hidden[:, -1:])
        self._draft(hidden, torch.cat([prompt[:, 1:], self.pending], dim=1))

    def until(self, texts: Texts) -> Tensor:
        """The text."""
        while not (len(self.columns) >= texts.steps or (texts.looks and texts.look(self.columns))):
            if self.pending.shape[1] > MOST_PENDING:
                hidden, self.state = self.model(self.pending, self.state)
                self.pending = self._drawn(hidden[:, -1:])
                self._draft(hidden[:, -1:], self.pending)
            else:
                self._verify()
        # The last one may be one too many.
        columns, sound = self.columns[: texts.steps], self.sound[: texts.steps]
        (text,) = texts.of(columns, sound, self.sampling.temperature)
        return text

    def _verify(self) -> None:
        """Read what is pending and a draft, for the next two tokens, or one."""
        draft = self.sampling.draw(self.likely)
        hidden, after = self.model(torch.cat([self.pending, draft], dim=1), self.state)
        p, sound = self.sampling.probabilities(self.model.logits(hidden[:, -2:]))
        accepted, other = self.sampling.verified(p[:, 0], self.likely, draft)
        following = self.sampling.draw(p[:, 1])
        self.drafted += 1
        if accepted:  # sync: the host says what is read next
            self.accepted += 1
            self._take(draft, following, sound=sound)
            self.state, self.pending = after, following
            self._draft(hidden[:, -2:], torch.cat([draft, following], dim=1))
        else:
            self._take(other, sound=sound[:, :1])
            self.pending = torch.cat([self.pending, other], dim=1)
            self._draft(hidden[:, -2:-1], other)

    def _drawn(self, hidden: Tensor) -> Tensor:
        """The token after a hidden row ``[1, 1, C]``."""
        p, sound = self.sampling.probabilities(self.model.logits(hidden))
        token = self.sampling.draw(p[:, 0])
        self._take(token, sound=sound)
        return token

    def _take(self, *tokens: Tensor, sound: Tensor) -> None:
        self.columns.extend(tokens)
        self.sound.extend(sound.unbind(1))

    def _draft(self, hidden: Tensor, following: Tensor) -> None:
        """What the draft is drawn from that comes after all tokens so far, the last of which are
        ``following``.
        """
        logits, self.drafting = self.model.drafts(hidden, following, self.drafting)
        self.likely, _ = self.sampling.probabilities(logits[:, -1])
