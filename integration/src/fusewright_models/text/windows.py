"""Random windows of a token stream, drawn from a seed and a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

# Stands for no target.
NOTHING = -100
# Targets of a document's last window: the token after next is among them.
FEWEST = 2


@dataclass(frozen=True)
class TextBatch:
    """B windows of consecutive tokens.

    Attributes:
        windows: ``[B, T + 1]``, int64: T tokens that are read and, one later, T that are predicted.
        predicted: ``[B]``, int64: how many are, the first ones of a row; what stands behind them is
            another document. None where all are.
        mean: of ``predicted`` over all rows that were drawn together, those of other processes too,
            0-d in fp64; likewise.
        bounds: ``[B, N + 1]``, int64: where the documents of each row begin and end among its first
            T tokens; what stands behind the last one is padding. None where a row is of one.
        following: ``[B, T]``, int64: what is to be predicted of each token; likewise.
        mean_documents: as ``mean``, of how many documents a row has; likewise.
    """

    windows: Tensor
    predicted: Tensor | None = field(default=None, kw_only=True)
    mean: Tensor | None = field(default=None, kw_only=True)
    bounds: Tensor | None = field(default=None, kw_only=True)
    following: Tensor | None = field(default=None, kw_only=True)
    mean_documents: Tensor | None = field(default=None, kw_only=True)

    @property
    def tokens(self) -> int:
        """B T, the tokens that the model reads."""
        return self.windows.shape[0] * (self.windows.shape[1] - 1)

    @property
    def padding(self) -> Tensor | None:
        """How many tokens are read and nothing is predicted of them; None of none."""
        if self.predicted is None:
            return None
        return self.tokens - self.predicted.sum()

    @property
    def targets(self) -> Tensor:
        """``[B, T]``, what is to be predicted of each token; -100 stands for nothing."""
        if self.following is not None:
            return self.following
        targets = self.windows[:, 1:]
        if self.predicted is None:
            return targets
        place = torch.arange(targets.shape[1], device=targets.device)
        return torch.where(place < self.predicted.unsqueeze(1), targets, NOTHING)

    def share(self, mean: Tensor, ahead: int = 1) -> Tensor:
        """A mean over these rows' targets as the part that it has of the mean over all rows that
        were drawn together: the mean of parts with as many rows is the latter.

        Args:
            mean: over the targets, 0-d.
            ahead: which token after each is the target: 1 the next one, of which each row has
                ``predicted``; 2 the one after that, of which each of its documents has one less.
        """
        if self.predicted is None or self.mean is None:
            return mean
        own, whole, less = self.predicted.double().mean(), self.mean, ahead - 1
        if self.bounds is None or self.mean_documents is None:
            own, whole = own - less, whole - less
        else:
            own = own - less * documents_in(self.bounds).mean()
            whole = whole - less * self.mean_documents
        return mean * (own / whole).to(mean.dtype)

    def part(self, first: int, last: int) -> Self:
        """The windows from number ``first`` to before ``last``, a view of these."""

        def of(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[first:last]

        return replace(
            self,
            windows=self.windows[first:last],
            predicted=of(self.predicted),
            bounds=of(self.bounds),
            following=of(self.following),
        )


def documents_in(bounds: Tensor) -> Tensor:
    """Of ``[B, N + 1]`` how many documents with tokens each row has, ``[B]`` in fp64."""
    return (bounds[:, 1:] > bounds[:, :-1]).sum(1).double()


class Windows:
    """Endless batches of windows, each beginning anywhere in the stream with the same probability.

    The n-th batch depends on seed and n alone (and on the kind of device, whose generator draws
    it), so that a resumed run has only n to restore.

    Args:
        stream: ``[N]`` tokens of any integer dtype.
        length: T.
        seed: of all draws.
        digest: of the stream, if it is to be checked that a resumed run has the same one.
        device: of the batches; None is the stream's. Of a stream on the host, which may be mapped
            from a file, a batch is drawn there and copied.

    Raises:
        ValueError: the stream is shorter than T + 1.
    """

    def __init__(
        self,
        stream: Tensor,
        *,
        length: int,
        seed: int = 0,
        digest: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        if length < 1:
            raise ValueError(f"windows are one token long or more; got {length}")
        if len(stream) <= length:
            raise ValueError(
                f"windows of {length} + 1 tokens want a stream as long; got {len(stream)} tokens"
            )
        self.stream = stream
        self.device = stream.device if device is None else torch.device(device)
        self.seed = seed
        self.digest = digest
        self.batches = 0
        self.generator = torch.Generator(stream.device)
        self.offsets = torch.arange(length + 1, device=stream.device)

    def sample(self, batch: int) -> TextBatch:
        starts = self._drawn(len(self.stream) - len(self.offsets) + 1, batch)
        return TextBatch(self._placed(self.stream[starts.unsqueeze(1) + self.offsets].long()))

    def _drawn(self, most: int, batch: int) -> Tensor:
        """Numbers below ``most`` for the next batch, ``[B]``."""
        self.generator.manual_seed(mixed(self.seed, self.batches))
        self.batches += 1
        options: dict[str, Any] = {"generator": self.generator, "device": self.stream.device}
        return torch.randint(most, (batch,), **options)

    def _placed(self, drawn: Tensor) -> Tensor:
        """On the device of the batches."""
        if self.device.type == self.stream.device.type:
            return drawn
        # From memory that stays where it is the device copies while the host goes on.
        return drawn.pin_memory().to(self.device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "digest": self.digest, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: it was taken over other data, or from another seed.
        """
        if state["digest"] != self.digest:
            raise ValueError(
                f"wanted the data that the run was begun with, of digest {state['digest']}; "
                f"got other data, of digest {self.digest}"
            )
        # States of before have none.
        if state.get("seed", self.seed) != self.seed:
            raise ValueError(f"wanted windows of seed {state['seed']}; got those of {self.seed}")
        self.batches = state["batches"]


class DocumentWindows(Windows):
    """`Windows` of one document each: one begins at its beginning, others T tokens apart, and
    nothing is predicted beyond its end; each of them has the same probability.

    A last one of which fewer than two tokens would be predicted is left out. What stands behind a
    document is read, since rows are of one length, and nothing before it depends on that.

    Args:
        stream: as of `Windows`.
        ends: ``[D]`` int64 on the host: where documents end, in order, the last one at N.
        options: as of `Windows`; a digest becomes one of the ends, too.

    Raises:
        ValueError: as `Windows`; no document has three tokens.
    """

    def __init__(self, stream: Tensor, ends: np.ndarray, **options: Any) -> None:
        super().__init__(stream, **options)
        if self.digest:
            # The same tokens in other documents are other windows.
            ended = np.ascontiguousarray(ends, dtype=np.int64).data
            self.digest += hashlib.blake2b(ended, digest_size=8).hexdigest()
        starts, counts = windows_of(ends, len(self.offsets) - 1, least=FEWEST)
        place = self.stream.device
        # Of each document where it begins, and how many windows those before it have.
        self.bounds = torch.from_numpy(np.append(starts, len(stream))).to(place)
        self.before = torch.from_numpy(np.append(0, counts.cumsum())).to(place)
        self.total = int(counts.sum())
        if not self.total:
            raise ValueError(f"wanted a document of {FEWEST + 1} tokens or more; got none")

    def sample(self, batch: int) -> TextBatch:
        length = len(self.offsets) - 1
        number = self._drawn(self.total, batch)
        document = torch.searchsorted(self.before, number, right=True) - 1
        starts = self.bounds[document] + (number - self.before[document]) * length
        predicted = (self.bounds[document + 1] - 1 - starts).clamp(max=length)
        # Behind the end of the stream its last token.
        places = (starts.unsqueeze(1) + self.offsets).clamp(max=len(self.stream) - 1)
        windows, predicted = (self._placed(x) for x in (self.stream[places].long(), predicted))
        return TextBatch(windows, predicted=predicted, mean=predicted.double().mean())


def windows_of(ends: np.ndarray, length: int, *, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Of documents that end there where each begins, and how many windows it has, ``[D]`` each: of
    ``length`` predictions, the last one of ``least`` at least.
    """
    starts = np.append(0, ends[:-1])
    # An empty one has none, as one of a token.
    predictions = np.maximum(ends - starts - 1, 0)
    return starts, predictions // length + (predictions % length >= least)


def mixed(seed: int, number: int) -> int:
    """A seed for the ``number``-th draw: neighbouring numbers and seeds share nothing."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
