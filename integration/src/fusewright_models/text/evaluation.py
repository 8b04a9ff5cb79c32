"""Bits per byte of a language model over a whole text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LanguageModel(Protocol):
    """What is asked of a model: the mean of -log p(token | those before it) over B and T, nats;
    of a ``group`` of processes that share windows, each for its part of the tokens.
    """

    def loss(self, tokens: Tensor, **group: Any) -> Tensor: ...


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
    model: LanguageModel,
    stream: Tensor,
    *,
    length: int,
    batch_size: int,
    text_bytes: int,
    group: ProcessGroup | None = None,
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
        group: processes that share the tokens of every window: each reads its part, and has the
            stream and the result whole. The first ones go on with the next windows while the last
            ones read theirs.

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
    batches = [] if windows is None else list(windows.split(batch_size))
    if predicted % length:
        batches.append(stream[whole * length :].unsqueeze(0))
    nats = torch.zeros((), dtype=torch.float64, device=stream.device)
    for some in batches:
        part = some if group is None else own_part(some, group)
        count = part.shape[0] * (part.shape[1] - 1)
        shared = {} if group is None else {"group": group}
        loss = model.loss(part.long(), **shared).double()
        if count:
            # A mean over no tokens is no number.
            nats += loss * count
    if group is not None:
        torch.distributed.all_reduce(nats, group=group)
    total = float(nats)  # sync: the result of the evaluation
    return TextEvaluation(-total / predicted, total / math.log(2.0) / text_bytes)


def own_part(windows: Tensor, group: ProcessGroup) -> Tensor:
    """Of windows ``[B, T + 1]`` what this process reads, and the token after it: ``[B, t + 1]``, t
    of T tokens, one more in the first processes where they do not divide.
    """
    each, more = divmod(windows.shape[1] - 1, group.size())
    first = group.rank() * each + min(group.rank(), more)
    return windows[:, first : first + each + (group.rank() < more) + 1]
