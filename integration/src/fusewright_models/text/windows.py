"""Random windows of a token stream, drawn from a seed and a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TextBatch:
    """B windows of consecutive tokens.

    Attributes:
        windows: ``[B, T + 1]``, int64: T tokens that are read and, one later, T that are predicted.
    """

    windows: Tensor

    @property
    def tokens(self) -> int:
        """B T, the tokens that the model reads."""
        return self.windows.shape[0] * (self.windows.shape[1] - 1)

    def part(self, first: int, last: int) -> Self:
        """The windows from number ``first`` to before ``last``, a view of these."""
        return replace(self, windows=self.windows[first:last])


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
        self.generator.manual_seed(mixed(self.seed, self.batches))
        self.batches += 1
        starts = torch.randint(
            len(self.stream) - len(self.offsets) + 1,
            (batch, 1),
            generator=self.generator,
            device=self.stream.device,
        )
        windows = self.stream[starts + self.offsets].long()
        if self.device.type != self.stream.device.type:
            # From memory that stays where it is the device copies while the host goes on.
            windows = windows.pin_memory().to(self.device, non_blocking=True)
        return TextBatch(windows)

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


def mixed(seed: int, number: int) -> int:
    """A seed for the ``number``-th draw: neighbouring numbers and seeds share nothing."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
