"""Texts continued token by token, the model's state carried from one to the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..devices import wait_for
from .sampling import Sampling
from .tokens import Tokenizer

# The host looks for tokens that end a text once in so many.
PATIENCE = 16

Enough = Callable[[Sequence[int]], bool]


class StreamingModel(Protocol):
    """What is asked of a model: hidden rows and a state that stands for everything read so far."""

    def __call__(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Generated(NamedTuple):
    """What follows prompts, and what it took.

    Attributes:
        tokens: of each prompt, in the order of the prompts, int64 ``[n]``, 1 <= n.
        read: tokens of prompts that were read at once.
        reading_seconds: how long that took.
        drawing_seconds: how long all else did.
        drafted: tokens that were drafted, by `speculate`.
        accepted: how many of them were taken.
    """

    tokens: list[Tensor]
    read: int = 0
    reading_seconds: float = 0.0
    drawing_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def drawn(self) -> int:
        """Tokens that follow prompts."""
        return sum(map(len, self.tokens))

    @property
    def reading_rate(self) -> float:
        """Tokens a second; NaN where none were read at once."""
        return _ratio(self.read, self.reading_seconds)

    @property
    def drawing_rate(self) -> float:
        """Tokens a second, of all prompts together; NaN where it took no time."""
        return _ratio(self.drawn, self.drawing_seconds)

    @property
    def acceptance(self) -> float:
        """Which share of the drafts was taken; NaN of none."""
        return _ratio(self.accepted, self.drafted)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


@torch.no_grad()
def generate(
    model: StreamingModel,
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
    """Draw a continuation of every prompt: what it would have alone, but for rounding and for the
    random numbers that it gets.

    All rows of a batch stand at the same position, since a state has one: prompts are read at once
    as far as the shortest goes, and the longer ones then token by token, while those that are at
    their end are continued. Prompts of 10 to 60 tokens so take 50 steps more than prompts of 60.
    Where the next longer one is longer by more than ``tokens``, a batch of its own takes fewer
    steps, and is made. A row that has come to its end is computed on until its batch has.

    Nothing in a step waits for the device, without ``enough``.

    Args:
        model: in evaluation mode.
        prompts: ``[B, P]``, or one of ``[P]`` for each row, int64, P >= 1, on the model's device.
        tokens: at most so many follow, 1 or more.
        temperature, top_p, vocab_size, generator: as of `Sampling`.
        ends: tokens that end a text, whose last one they are. The host looks for them once in 16
            tokens.
        enough: is asked of each row after each of its tokens, of all of them so far, whether no
            more are wanted. The host waits for every token then.

    Returns:
        What follows each prompt, the prompt not among it, and how long it took.

    Raises:
        ValueError: an empty prompt, no tokens, a number that `Sampling` refuses, or logits that are
            not finite over the temperature.
    """
    rows = checked_rows(prompts, tokens)
    sampling = Sampling(temperature, top_p, vocab_size, generator)
    found: dict[int, Tensor] = {}
    read, reading, writing = 0, 0.0, 0.0
    for places in batches_of([len(row) for row in rows], tokens):
        together = [rows[place] for place in places]
        texts = Texts(together, tokens, ends, enough)
        begun = time.perf_counter()
        drawing = _Drawing(model, together, sampling)
        wait_for(rows[0].device)
        read_at = time.perf_counter()
        found |= zip(places, drawing.until(texts), strict=True)
        read, reading = read + drawing.first * len(places), reading + read_at - begun
        writing += time.perf_counter() - read_at
    return Generated([found[place] for place in range(len(rows))], read, reading, writing)


def checked_rows(prompts: Tensor | Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The prompts one by one.

    Raises:
        ValueError: one is empty, or no tokens are to follow.
    """
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] == 0:
            raise ValueError(f"wanted prompts [B, P] with P >= 1; got {list(prompts.shape)}")
        prompts = prompts.unbind()
    wrong = [list(row.shape) for row in prompts if row.ndim != 1 or len(row) == 0]
    if wrong:
        raise ValueError(f"wanted prompts [P] with P >= 1; got {wrong[0]}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1; got {tokens}")
    return list(prompts)


def batches_of(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places of the prompts that are continued together: the fewest steps.

    A batch takes ``tokens`` steps, and one for each that its longest prompt is longer than its
    shortest. So cutting it between two prompts saves as many steps as their lengths differ by, and
    costs ``tokens``.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[place] - lengths[batch[-1]] > tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


class Texts:
    """What follows the prompts of a batch, as far as the host has looked at it.

    Args:
        prompts: all read at once as far as the shortest goes.
        tokens: so many follow each at most.
        ends, enough: as of `generate`.
    """

    def __init__(
        self, prompts: Sequence[Tensor], tokens: int, ends: Collection[int], enough: Enough | None
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self.first, self.tokens, self.ends, self.enough = min(lengths), tokens, set(ends), enough
        # Of each row the step that draws its first token.
        self.begins = [length - self.first for length in lengths]
        self.steps = max(self.begins) + tokens
        self.counts = [tokens] * len(lengths)
        self.held: list[list[int]] = [[] for _ in lengths]
        self.over = [False] * len(lengths)
        self.looked = 0
        self.looks = bool(self.ends) or enough is not None

    def due(self, step: int) -> bool:
        """Whether the host is to look after so many steps."""
        return self.looks and (self.enough is not None or step % PATIENCE == 0)

    def look(self, columns: Sequence[Tensor]) -> bool:
        """Look at the columns ``[B, 1]`` of all steps so far; whether each text is at its end."""
        if fresh := columns[self.looked :]:
            told = torch.cat([*fresh], dim=1).tolist()  # sync: the host says where a text ends
            for row, drawn in enumerate(told):
                for step, token in enumerate(drawn, self.looked):
                    if step >= self.begins[row] and not self.over[row]:
                        self._take(row, token)
            self.looked = len(columns)
        return all(self.over)

    def _take(self, row: int, token: int) -> None:
        held = self.held[row]
        held.append(token)
        ended = token in self.ends or (self.enough is not None and self.enough(held))
        if ended or len(held) == self.tokens:
            self.over[row], self.counts[row] = True, len(held)

    def of(
        self, columns: Sequence[Tensor], sound: Sequence[Tensor], temperature: float
    ) -> list[Tensor]:
        """Each text.

        Args:
            columns: ``[B, 1]``, of all steps.
            sound: ``[B]``, whether logits over the temperature are finite.
            temperature: for the words of the error.

        Raises:
            ValueError: one of its tokens was drawn from logits that are not finite.
        """
        if self.looks:
            self.look(columns)
        ranges = [
            (row, begin, begin + count)
            for row, (begin, count) in enumerate(zip(self.begins, self.counts, strict=True))
        ]
        drawn, good = torch.cat([*columns], dim=1), torch.stack([*sound], dim=1)
        if not torch.cat([good[row, begin:end] for row, begin, end in ranges]).all():  # sync: once
            raise ValueError(f"wanted finite logits over temperature {temperature}; got others")
        return [drawn[row, begin:end].clone() for row, begin, end in ranges]


class _Drawing:
    """Draws what follows prompts that are read together, which begins with all that they have at
    once.
    """

    def __init__(self, model: StreamingModel, rows: list[Tensor], sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        lengths = [len(row) for row in rows]
        self.first, self.longest = min(lengths), max(lengths)
        self.known = pad_sequence(rows, batch_first=True)
        self.lengths = torch.tensor(lengths).to(self.known.device).unsqueeze(1)
        self.hidden, self.state = model(self.known[:, : self.first])

    def until(self, texts: Texts) -> list[Tensor]:
        """All texts."""
        columns: list[Tensor] = []
        sound: list[Tensor] = []
        while True:
            p, good = self.sampling.probabilities(self.model.logits(self.hidden[:, -1]))
            token, place = self.sampling.draw(p), self.first + len(columns)
            if place < self.longest:
                token = torch.where(place < self.lengths, self.known[:, place, None], token)
            columns.append(token)
            sound.append(good)
            step = len(columns)
            if step == texts.steps or (texts.due(step) and texts.look(columns)):
                return texts.of(columns, sound, self.sampling.temperature)
            self.hidden, self.state = self.model(token, self.state)


def continued(
    generating: Callable[..., Generated],
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    *,
    device: torch.device,
    seed: int,
    **options: Any,
) -> tuple[list[bytes], Generated]:
    """The texts that a model puts after each of the prompts' tokens ``[P]``, without the prompts'
    own, up to where a document ends.

    Args:
        generating: `generate` or `speculate`.
        model: as that wants it.
        tokenizer: of the prompts.
        prompts: on the host.
        device: of the model.
        seed: of all draws.
        options: of ``generating``.
    """
    given = [torch.from_numpy(each.astype(np.int64)).to(device) for each in prompts]
    found = generating(
        model,
        given,
        vocab_size=tokenizer.vocab_size,
        ends=tokenizer.ends,
        generator=torch.Generator(device).manual_seed(seed),
        **options,
    )
    return [tokenizer.decode(row.cpu().numpy()) for row in found.tokens], found
