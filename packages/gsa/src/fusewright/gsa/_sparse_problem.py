"""One call of sparse attention as its kernels see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._backends import card_of
from ._configs import GatherConfig, UnionConfig, line_of
from ._indexer_problem import MAX_ROW_STRIDE, Shape, present
from ._launch import Kind, contiguous_strides


class Sparse(NamedTuple):
    """q [B, T, H, D] against k and v [B, Tkv, Hkv, D] with selections [B, R, T, K], R = 1 or H.

    ``rows`` neighbouring heads, a group, have a selection and a head of keys in common; ``shared``
    groups have one head of keys.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    selections: int
    slots: int
    dtype: torch.dtype
    device: torch.device
    copies: tuple[bool, ...]
    strides: tuple[int, ...]
    selection_strides: tuple[int, ...]
    has_count: bool
    precision: str

    @property
    def groups(self) -> int:
        return self.key_heads if self.selections == 1 else self.heads

    @property
    def rows(self) -> int:
        return self.heads // self.groups

    @property
    def sizes(self) -> tuple[int, ...]:
        shared = self.groups // self.key_heads
        return (self.queries, self.keys, self.heads, self.groups, shared)

    @property
    def empty(self) -> bool:
        return not self.batches * self.queries

    @property
    def score_rows(self) -> int:
        return self.batches * self.heads * self.queries

    def config(self, table: tuple[GatherConfig, ...]) -> GatherConfig:
        capability = card_of(self.device).capability
        return line_of(table, self.width, self.dtype.itemsize, capability)

    def union_config(self, table: tuple[UnionConfig, ...]) -> UnionConfig:
        capability = card_of(self.device).capability
        return line_of(table, self.width, self.dtype.itemsize, capability)

    def shape(self) -> Shape:
        return (self.batches, self.queries, self.heads, self.width)


def sparse_of(
    shapes: tuple[Shape, Shape, Shape],
    operands: Sequence[Kind | None],
    precision: str,
    device: torch.device,
) -> Sparse:
    """The problem of q, k and indices of these shapes; ``operands``: kinds of q, k, v, indices and
    count.
    """
    shape, key_shape, selection_shape = shapes
    batches, queries, heads, width = shape
    *wide, indices, count = operands
    copies: list[bool] = []
    strides: list[int] = []
    for each, kind in zip((shape, key_shape, key_shape), wide, strict=True):
        assert kind is not None
        copies.append(kind[1][-1] != 1 or kind[1][1] > MAX_ROW_STRIDE)
        strides += (contiguous_strides(each) if copies[-1] else kind[1])[:-1]
    assert indices is not None
    copies.append(indices[1][-1] != 1)
    found = (contiguous_strides(selection_shape) if copies[-1] else indices[1])[:-1]
    copies.append(False)
    of_count = (0, 0, 0) if count is None else count[1]
    selections = selection_shape[1]
    # All heads go by the one selection.
    along = [0 if selections == 1 and axis == 1 else 1 for axis in range(3)]
    selection_strides = [
        stride * keep
        for given in (found, of_count)
        for stride, keep in zip(given, along, strict=True)
    ]
    return Sparse(
        *(batches, queries, key_shape[1], heads, key_shape[2], width),
        *(selections, selection_shape[-1]),
        dtype=present(wide[0])[0],
        device=device,
        copies=tuple(copies) if any(copies) else (),
        strides=tuple(strides),
        selection_strides=tuple(selection_strides),
        has_count=count is not None,
        precision=precision,
    )
