"""Windows of several documents each, which predict and see nothing of one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import FEWEST, NOTHING, DocumentWindows, TextBatch, documents_in, windows_of


class PackedWindows(DocumentWindows):
    """`DocumentWindows` of which a row holds several, as many as find room in its T tokens.

    Which stand beside one another is drawn once, from the seed: the longest ones first, each into
    the row where it leaves the least. Rows, and so windows, have the same probability; what is left
    of a row is padding.

    Args:
        stream, ends, options: as of `DocumentWindows`.
        most: windows in a row, N.
        unit: tokens of which each takes whole ones, as the model reads it.

    Raises:
        ValueError: as `DocumentWindows`.
    """

    def __init__(
        self, stream: Tensor, ends: np.ndarray, *, most: int, unit: int = 1, **options: Any
    ) -> None:
        super().__init__(stream, ends, **options)
        if self.digest:
            # The same windows in other rows are other batches.
            self.digest += f"-{most}-{unit}"
        length = len(self.offsets) - 1
        begins, counts = windows_of(ends, length, least=FEWEST)
        within = np.arange(self.total) - np.repeat(counts.cumsum() - counts, counts)
        starts = np.repeat(begins, counts) + within * length
        predicted = np.minimum(np.repeat(ends, counts) - 1 - starts, length)
        rows = rows_of(predicted, length, most=most, unit=unit, seed=self.seed)
        self.rows = len(rows)
        # Of each row where its windows begin, and how many predictions they have; 0 of none.
        none = rows < 0
        place = self.stream.device
        self.starts = torch.from_numpy(np.where(none, 0, starts[rows])).to(place)
        self.counts = torch.from_numpy(np.where(none, 0, predicted[rows])).to(place)

    def sample(self, batch: int) -> TextBatch:
        number = self._drawn(self.rows, batch)
        starts, bounds = self.starts[number], F.pad(self.counts[number].cumsum(1), (1, 0))
        ends = bounds[:, 1:].contiguous()
        place = self.offsets.expand(batch, -1).contiguous()
        document = torch.searchsorted(ends, place, right=True).clamp(max=starts.shape[1] - 1)
        source = starts.gather(1, document) + place - bounds.gather(1, document)
        inside = place < ends[:, -1:]
        read = self.stream[torch.where(inside, source, 0)].long()
        later = self.stream[torch.where(inside, source + 1, 0)].long()
        following = torch.where(inside, later, NOTHING)[:, :-1]
        placed = (self._placed(x) for x in (read, ends[:, -1], bounds, following))
        windows, predicted, bounds, following = placed
        return TextBatch(
            windows,
            predicted=predicted,
            mean=predicted.double().mean(),
            bounds=bounds,
            following=following,
            mean_documents=documents_in(bounds).mean(),
        )


def rows_of(counts: np.ndarray, length: int, *, most: int, unit: int, seed: int) -> np.ndarray:
    """Windows of so many predictions, ``[W]``, in rows of ``length``: their numbers, ``[R, most]``,
    -1 for none. One that takes all whole units of a row is alone in it.
    """
    room = length // unit
    sizes = -(-counts // unit)
    order = np.random.default_rng(seed).permutation(len(counts))
    order = order[np.argsort(-sizes[order], kind="stable")]
    rows: list[list[int]] = []
    # Rows by the units that they have left, and as bits which of these there are.
    left: list[list[int]] = [[] for _ in range(room + 1)]
    some = 0
    # sync: of numpy, once a run; Python's integers hold as many bits as a row has units.
    for window, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        rest = room - size
        if fitting := some >> size:
            # The least that is enough.
            found = size + (fitting & -fitting).bit_length() - 1
            row = left[found].pop()
            if not left[found]:
                some &= ~(1 << found)
            rows[row].append(window)
            rest = found - size
        else:
            row = len(rows)
            rows.append([window])
        if rest > 0 and len(rows[row]) < most:
            left[rest].append(row)
            some |= 1 << rest
    return np.array([row + [-1] * (most - len(row)) for row in rows], dtype=np.int64)
