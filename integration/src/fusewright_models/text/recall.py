"""Key-value recall: what a sequence said once, asked for after more tokens than attention reaches.

    k_1 v_1  k_2 v_2 ... k_P v_P   n n ... n   k_s(1) k_s(2) ... k_s(P)

Keys are drawn without repetition, values v and noise n independently; the last part asks for all
pairs in an order s of its own, and at each key its value is to be predicted. Keys and values are
new in every row, so nothing but the row itself can tell them. The answers are not shown: those that
are left over would tell the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .windows import mixed

# As target: nothing is to be predicted there.
IGNORED = -100


@dataclass(frozen=True)
class RecallBatch:
    """B rows of the task.

    Attributes:
        windows: ``[B, T + 1]``, int64; the last token is never read.
        targets: ``[B, T]``: the value of every key that is asked for, -100 elsewhere.
    """

    windows: Tensor
    targets: Tensor

    @property
    def tokens(self) -> int:
        """B T, the tokens that the model reads."""
        return self.targets.numel()


@dataclass(eq=False, kw_only=True)
class KeyValueRecall:
    """Endless batches of the task; the n-th depends on seed and n alone.

    Tokens 0 to K - 1 are keys, the next V are values, and N more are noise.

    Args:
        pairs: P.
        gap: tokens of noise between the pairs and the questions.
        keys: K >= P.
        values: V; an answer that knows nothing is right once in V times.
        noise: N.
        device: where the rows are made.
        seed: of all draws.

    Raises:
        ValueError: a number is too small.
    """

    pairs: int
    gap: int
    keys: int = 64
    values: int = 16
    noise: int = 32
    device: torch.device | str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        enough = self.pairs >= 1 and self.keys >= self.pairs and self.values >= 2
        if not enough or self.gap < 0 or self.noise < 1:
            raise ValueError(
                "wanted a pair or more, keys as many as pairs or more, two values or more, a noise "
                f"or more and no negative gap; got {self.pairs} pairs, {self.keys} keys, "
                f"{self.values} values, {self.noise} noises, gap {self.gap}"
            )
        self.vocab_size = self.keys + self.values + self.noise
        self.chance = 1.0 / self.values
        self.batches = 0
        self.generator = torch.Generator(self.device)

    def sample(self, batch: int) -> RecallBatch:
        self.generator.manual_seed(mixed(self.seed, self.batches))
        self.batches += 1
        options: dict[str, Any] = {"generator": self.generator, "device": self.generator.device}
        keys = torch.rand(batch, self.keys, **options).argsort(1)[:, : self.pairs]
        values = self.keys + torch.randint(self.values, (batch, self.pairs), **options)
        noise = torch.randint(self.noise, (batch, self.gap), **options)
        order = torch.rand(batch, self.pairs, **options).argsort(1)
        asked, answers = keys.gather(1, order), values.gather(1, order)
        noise = self.keys + self.values + noise
        said = torch.stack([keys, values], dim=2).flatten(1)
        windows = torch.cat([said, noise, asked, answers[:, -1:]], dim=1)
        ignored = torch.full_like(windows[:, : -1 - self.pairs], IGNORED)
        return RecallBatch(windows, torch.cat([ignored, answers], dim=1))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.batches = state["batches"]


@torch.no_grad()
def recall_accuracy(model: Any, source: KeyValueRecall, *, batches: int, batch_size: int) -> float:
    """The share of values that the model thinks most likely, over the first batches of a seed."""
    source.batches = 0
    right = torch.zeros((), device=source.generator.device)
    for _ in range(batches):
        batch = source.sample(batch_size)
        hidden, _state = model(batch.windows[:, :-1])
        guesses = model.logits(hidden[:, -source.pairs :]).argmax(-1)
        right += (guesses == batch.targets[:, -source.pairs :]).float().mean()
    return float(right) / batches  # sync: the result of the evaluation
