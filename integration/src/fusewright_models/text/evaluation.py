"""Bits per byte of a language model over a whole text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..training.processes import ALONE, Processes
from ..training.source import Compute, directly
from .windows import NOTHING, TextBatch, windows_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LanguageModel(Protocol):
    """What is asked of a model: the mean of -log p(token | those before it) over B and T, nats; of
    ``targets [B, T]``, where those are given; of a ``group`` of processes that share windows, each
    for its part of the tokens.
    """

    def loss(self, tokens: Tensor, **options: Any) -> Tensor: ...


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
    ends: np.ndarray | None = None,
    group: ProcessGroup | None = None,
    processes: Processes = ALONE,
    compute: Compute = directly,
) -> TextEvaluation:
    """Score a stream of tokens in order, window after window, the last one shorter.

    Every token but the first is predicted once, from those before it in its window: T of them at
    most, one at least. The same for every model and every batch size. With ``ends`` that is done
    with each document by itself, whose score depends on no other: its first token is not predicted.

    Args:
        model: in evaluation mode, on the stream's device.
        stream: ``[N]`` tokens of any integer dtype, N >= 2.
        length: T, tokens that a window reads.
        batch_size: windows that go through the model together.
        text_bytes: bytes that the predicted tokens stand for.
        ends: ``[D]`` int64 on the host: where documents end, in order, the last one at N.
        group: processes that share the tokens of every window: each reads its part, and has the
            stream and the result whole. The first ones go on with the next windows while the last
            ones read theirs.
        processes: of which each reads its share of the windows, where they do not share tokens.
        compute: computes what each batch of windows adds.

    Raises:
        ValueError: no token is predicted, or no bytes.
    """
    predicted = max(len(stream) - (1 if ends is None else len(ends)), 0)
    if predicted < 1 or text_bytes < 1:
        raise ValueError(
            "wanted tokens to predict, one or more, of one byte or more; "
            f"got {predicted} of {text_bytes}"
        )
    if ends is None:
        batches = [*batches_of(stream, length, batch_size)]
    else:
        batches = [*document_batches(stream, ends, length, batch_size)]
    nats = torch.zeros((), dtype=torch.float64, device=stream.device)
    ours = partial(nats_of, model, group=group)
    rounds = -(-len(batches) // processes.count)
    for number in range(processes.rank, rounds * processes.count, processes.count):
        # A process without a batch in the last round reads the last one again: FSDP wants as many
        # calls of the model from each.
        added = compute(ours, batches[min(number, len(batches) - 1)])
        if number < len(batches):
            nats += added
    if group is not None:
        torch.distributed.all_reduce(nats, group=group)
    total = float(processes.add_(nats))  # sync: the result of the evaluation
    return TextEvaluation(-total / predicted, total / math.log(2.0) / text_bytes)


def nats_of(model: LanguageModel, batch: TextBatch, *, group: ProcessGroup | None = None) -> Tensor:
    """Minus the sum of log p(token) over the tokens that a batch predicts, those of this process's
    part where a ``group`` shares them, 0-d in fp64.
    """
    windows, targets = batch.windows.long(), batch.targets
    shared: dict[str, Any] = {}
    if group is not None:
        windows, targets = own_part(windows, group, 1), own_part(targets, group)
        shared = {"group": group}
    if batch.predicted is None:
        loss = model.loss(windows, **shared).double()
        return loss * targets.numel() if targets.numel() else torch.zeros_like(loss)
    count = (targets != NOTHING).sum()
    loss = model.loss(windows, targets=targets, **shared).double()
    # A mean over no tokens is no number.
    return torch.where(count > 0, loss * count, 0.0)


def batches_of(stream: Tensor, length: int, batch_size: int) -> Iterator[TextBatch]:
    """Windows ``[.., T + 1]`` in order, the last one shorter."""
    whole = (len(stream) - 1) // length
    if whole:
        # A view: window w is tokens w T to w T + T, its last token the next one's first.
        windows = stream[: whole * length + 1].unfold(0, length + 1, length)
        yield from map(TextBatch, windows.split(batch_size))
    if (len(stream) - 1) % length:
        yield TextBatch(stream[whole * length :].unsqueeze(0))


def document_batches(
    stream: Tensor, ends: np.ndarray, length: int, batch_size: int
) -> Iterator[TextBatch]:
    """Windows of one document each, those of as many predictions beside one another; rows are as
    long as the first one of a batch.
    """
    begins, counts = windows_of(ends, length, least=1)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    starts = np.repeat(begins, counts) + within * length
    predicted = np.minimum(np.repeat(ends, counts) - 1 - starts, length)
    order = np.argsort(-predicted, kind="stable")
    for first in range(0, len(order), batch_size):
        some = order[first : first + batch_size]
        offsets = np.arange(predicted[some[0]] + 1)
        # Behind the end of the stream its last token.
        places = np.minimum(starts[some, None] + offsets, len(stream) - 1)
        read = stream[torch.from_numpy(places).to(stream.device)].long()
        yield TextBatch(read, predicted=torch.from_numpy(predicted[some]).to(stream.device))


def own_part(rows: Tensor, group: ProcessGroup, more: int = 0) -> Tensor:
    """Of tokens ``[B, T + more]`` the T of which processes share, what this one reads, and as many
    more behind it: ``[B, t + more]``, t one more in the first processes where T does not divide.
    """
    each, left = divmod(rows.shape[1] - more, group.size())
    first = group.rank() * each + min(group.rank(), left)
    return rows[:, first : first + each + (group.rank() < left) + more]
