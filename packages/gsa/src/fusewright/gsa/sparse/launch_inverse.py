"""The inverse of a selection: for each key the queries that have selected it, in their order.

Plain torch: sorting is stable, so that the order of a key's queries, and with it every sum over
them, is the same at every call. Lists are cut into segments of a fixed length. The shapes bound
how many segments there are; segments beyond the last one do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Inverse(NamedTuple):
    """The segments of all lists of R selections, N of them at most for each.

    ``queries``: ``[R, T * K]`` int32, the lists one after the other. ``key``: ``[R, N]`` int32,
    each segment's key, Tkv for a segment that is none. ``first`` and ``last``: ``[R, N]`` int32,
    where in ``queries`` it lies. ``part``: ``[R, N]`` int32, which of the sums of its key's several
    segments it is, -1 where the key has only this one. ``parts``: ``[R, Tkv + 1]`` int32, where the
    sums of each key start; ``most_parts``: how many there can be.
    """

    queries: Tensor
    key: Tensor
    first: Tensor
    last: Tensor
    part: Tensor
    parts: Tensor
    most_parts: int


def inverse_of(indices: Tensor, count: Tensor | None, keys: int, length: int) -> Inverse:
    """The inverse of selections ``[R, T, K]`` of ``keys`` keys, in segments of ``length``."""
    selections, queries, slots = indices.shape
    device = indices.device
    valid = (indices >= 0) & (indices < keys)
    if count is not None:
        valid &= torch.arange(slots, device=device) < count.unsqueeze(-1)
    flat = torch.where(valid, indices, keys).to(torch.int32).flatten(1)
    ordered, order = flat.sort(dim=-1, stable=True)
    all_keys = torch.arange(keys + 1, device=device, dtype=torch.int32)
    starts = torch.searchsorted(ordered, all_keys.expand(selections, -1).contiguous())

    # Every key has a segment, even an empty one, which writes its gradients.
    lengths = starts.diff(dim=-1)
    segments = ((lengths + length - 1) // length).clamp(min=1)
    begins = ends_of(segments)
    total = queries * slots
    number = torch.arange(keys + total // length, device=device)
    number = number.expand(selections, -1).contiguous()
    key = torch.searchsorted(begins, number, right=True) - 1
    within = key.clamp(max=keys - 1)
    first = starts.gather(1, within) + (number - begins.gather(1, within)) * length
    last = torch.minimum(first + length, starts.gather(1, within + 1))
    several = segments.gather(1, within) > 1
    parts = ends_of(torch.where(segments > 1, segments, 0))
    part = parts.gather(1, within) + number - begins.gather(1, within)
    return Inverse(
        queries=(order // slots).to(torch.int32),
        key=key.to(torch.int32),
        first=first.to(torch.int32),
        last=last.to(torch.int32),
        part=torch.where(several, part, -1).to(torch.int32),
        parts=parts.to(torch.int32),
        most_parts=2 * total // length,
    )


def ends_of(lengths: Tensor) -> Tensor:
    """Where pieces of these lengths start, one after the other, and where the last one ends."""
    return torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))
