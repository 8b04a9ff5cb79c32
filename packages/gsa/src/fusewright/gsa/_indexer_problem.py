"""One call of the indexer as its kernels see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._backends import card_of, interpreted
from ._configs import TileConfig, line_of
from ._launch import Kind, contiguous_strides

Shape = tuple[int, ...]
# The offsets inside a tile are 32-bit numbers.
MAX_ROW_STRIDE = 2**23


class Indexer(NamedTuple):
    """q [B, Tq, H, d] against k [B, Tkv, d] with w [B, Tq, H], the first row at ``offset``: sizes,
    which of q, k, w and bias are copied first, and the integers and constants that every kernel
    takes.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    width: int
    causal: bool
    offset: int
    dtype: torch.dtype
    device: torch.device
    copies: tuple[bool, ...]
    strides: tuple[int, ...]
    constants: dict[str, Any]

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.queries, self.keys, self.heads, self.offset)

    def line(self, table: tuple[TileConfig, ...]) -> TileConfig:
        """The line of a table that serves this problem."""
        capability = card_of(self.device).capability
        return line_of(table, self.width, self.dtype.itemsize, capability)

    @property
    def score_count(self) -> int:
        return self.batches * self.queries * self.keys


def indexer_of(
    shape: Shape,
    keys: int,
    operands: Sequence[Kind | None],
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
) -> Indexer:
    """The problem of queries of this shape; ``operands``: kinds of q, k, w and bias."""
    batches, queries, heads, width = shape
    q, k, w, bias = (present(kind) for kind in operands)
    copies: list[bool] = []
    strides: list[int] = []
    for each, kind in ((shape, q), ((batches, keys, width), k)):
        # Of what is multiplied the last axis is contiguous, and its stride is not handed over.
        copies.append(kind[1][-1] != 1 or kind[1][1] > MAX_ROW_STRIDE)
        strides += (contiguous_strides(each) if copies[-1] else kind[1])[:-1]
    copies += [False, bias[1] != (1,)]
    strides += w[1]
    return Indexer(
        # From there on a row sees every key: sums of positions stay below 2**31.
        *(batches, queries, keys, heads, width, causal, min(offset, keys)),
        # What the tiles are multiplied in is that of q and k.
        dtype=q[0],
        device=device,
        copies=tuple(copies) if any(copies) else (),
        strides=tuple(strides),
        constants=dict(D=width, CAUSAL=causal, UPCAST=interpreted(), PRECISION=precision),
    )


def present(kind: Kind | None) -> Kind:
    """The kind of an operand that is always there."""
    assert kind is not None
    return kind


def precision_of(dtype: torch.dtype) -> str:
    """How fp32 tiles are multiplied: as torch multiplies fp32 matrices on a card."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def grid_of(programs: int) -> tuple[int]:
    """A grid of so many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs >= 2**31:
        raise ValueError(f"the kernels serve up to 2**31 - 1 tiles, got {programs}")
    return (programs,)
