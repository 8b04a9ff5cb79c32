"""Bits per byte of a language model over a whole text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class LanguageModel(Protocol):
    """What is asked of a model: the mean of -log p(token | those before it) over B and T, nats."""

    def loss(self, tokens: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TextEvaluation:
    """The score of a text.

    Attributes:
        log_likelihood: mean over tokens of log p(token), nats.
        bits_per_byte: minus the sum of log2 p(token), over the bytes that the tokens stand for.
    """

    log_likelihood: float
    bits_per_byte: float


@torch.no_grad()
def evaluate_text(
    model: LanguageModel, stream: Tensor, *, length: int, batch_size: int, text_bytes: int
) -> TextEvaluation:
    """Score a stream of tokens in order, window after window, the last one shorter.

    Every token but the first is predicted once, from those before it in its window: T of them at
    most, one at least. The same for every model and every batch size.

    Args:
        model: in evaluation mode, on the stream's device.
        stream: ``[N]`` tokens of any integer dtype, N >= 2.
        length: T, tokens that a window reads.
        batch_size: windows that go through the model together.
        text_bytes: bytes that tokens 2 to N stand for.

    Raises:
        ValueError: N < 2, or no bytes.
    """
    predicted = len(stream) - 1
    if predicted < 1 or text_bytes < 1:
        raise ValueError(
            f"wanted two tokens or more, of one byte or more; got {len(stream)} of {text_bytes}"
        )
    whole = predicted // length
    # A view: window w is tokens w T to w T + T, its last token the next one's first.
    windows = stream[: whole * length + 1].unfold(0, length + 1, length) if whole else None
    groups = [] if windows is None else list(windows.split(batch_size))
    if predicted % length:
        groups.append(stream[whole * length :].unsqueeze(0))
    nats = torch.zeros((), dtype=torch.float64, device=stream.device)
    for group in groups:
        count = group.shape[0] * (group.shape[1] - 1)
        nats += model.loss(group.long()).double() * count
    total = float(nats)  # sync: the result of the evaluation
    return TextEvaluation(-total / predicted, total / math.log(2.0) / text_bytes)
