"""One call of sparse attention as its kernels see it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import Launch, Layout, contiguous_strides
from ..common.launches import (
    Config,
    Shape,
    block_width,
    config_for,
    grid_of,
    row_strides,
)


class GatherConfig(NamedTuple):
    """Serves heads up to ``max_width`` of numbers up to ``max_bytes``, ``rows`` gathered rows at a
    time. A line for Hopper serves compute capability 9.0 alone.
    """

    max_width: int
    max_bytes: int
    rows: int
    num_warps: int
    num_stages: int
    hopper: bool = False


# All that a thread can have. A kernel whose launch does not say how many it may take is given fewer
# by ptxas, and spills some of them, so that more programs run at a time.
ALL_REGISTERS = 255
# So many heads are stacked in a tile at most.
STACK = 8


def stacked(heads: int, stack: int = STACK) -> int:
    """How many of this many heads are stacked in a tile: a power of 2 that divides them."""
    return math.gcd(heads, stack)


class UnionConfig(NamedTuple):
    """Serves heads up to ``max_width`` of numbers up to ``max_bytes`` by tiles of ``rows``, which
    are queries with up to ``stack`` heads each, or keys; and of ``columns``, which are listed keys,
    or listed queries with their heads. ``transposed``: of dk and dv the products, so that tensor
    cores, which take 64 rows on Hopper, serve tiles of fewer keys. A line for Hopper serves compute
    capability 9.0 alone.
    """

    max_width: int
    max_bytes: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    stack: int = STACK
    hopper: bool = False
    transposed: bool = False

    def stacked(self, heads: int) -> int:
        """How many of this many heads are stacked."""
        return stacked(heads, self.stack)


class SparseConstants(NamedTuple):
    """What a kernel is compiled for, read as ``CONFIG``: HEADS neighbouring heads are one program's
    (BLOCK_G: the rows that they take by queries), and BLOCK rows are gathered, or listed names
    read, at a time. A tile has TILE queries or keys, whose bits take WORDS words. TRANSPOSED: rows
    of products are listed names, columns the tile's.
    """

    D: int
    BLOCK_D: int
    UPCAST: bool
    PRECISION: str
    NUM_STAGES: int
    HEADS: int
    BLOCK: int
    BLOCK_G: int = 0
    TILE: int = 0
    WORDS: int = 0
    ADDS: bool = False
    AGAIN: bool = False
    TRANSPOSED: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class SparseProblem:
    """q [B, T, H, D] against k and v [B, Tkv, Hkv, D] with selections [B, R, T, K], R = 1 or H.

    ``rows`` neighbouring heads, a group, have a selection and a head of keys in common; ``shared``
    groups have one head of keys. Calls of one kind have one object, under which their plans are
    kept.
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

    @property
    def shape(self) -> Shape:
        return (self.batches, self.queries, self.heads, self.width)

    def config(self, table: tuple[Config, ...]) -> Config:
        """The line of a table that serves this problem."""
        return config_for(table, self.width, self.dtype.itemsize, self.device)

    def launch(
        self,
        kernel: Any,
        config: GatherConfig | UnionConfig,
        programs: int,
        integers: tuple[int, ...],
        max_registers: int | None = None,
        **constants: Any,
    ) -> Launch:
        """A kernel of attention, with these integers after the strides of q, k and v, of up to
        ``max_registers`` a thread; without, as many as ptxas thinks best.
        """
        options = dict(num_warps=config.num_warps)
        if max_registers is not None:
            options["maxnreg"] = max_registers
        columns = (self.width, block_width(self.width))
        common = (*columns, interpreted(), self.precision, config.num_stages)
        return Launch(
            kernel,
            grid_of(programs),
            self.device,
            (*self.strides, *integers),
            options,
            CONFIG=SparseConstants(*common, **constants),
        )


@functools.lru_cache(maxsize=4096)
def sparse_problem(
    shapes: tuple[Shape, Shape, Shape],
    operands: tuple[Layout, Layout, Layout, Layout, Layout | None],
    precision: str,
    device: torch.device,
) -> SparseProblem:
    """The problem of q, k and indices of these shapes; ``operands``: layouts of q, k, v, indices
    and count.
    """
    shape, key_shape, selection_shape = shapes
    batches, queries, heads, width = shape
    q, k, v, indices, count = operands
    copy_q, q_strides = row_strides(shape, q)
    copy_k, k_strides = row_strides(key_shape, k)
    copy_v, v_strides = row_strides(key_shape, v)
    copy_indices = indices[1][-1] != 1
    copies = (copy_q, copy_k, copy_v, copy_indices, False)
    indices_strides = (contiguous_strides(selection_shape) if copy_indices else indices[1])[:-1]
    count_strides = (0, 0, 0) if count is None else count[1]
    selections = selection_shape[1]
    if selections == 1:
        # All heads go by the one selection.
        indices_strides, count_strides = (
            (batch, 0, row) for batch, _, row in (indices_strides, count_strides)
        )
    return SparseProblem(
        *(batches, queries, key_shape[1], heads, key_shape[2], width),
        *(selections, selection_shape[-1], q[0], device),
        copies=copies if any(copies) else (),
        strides=(*q_strides, *k_strides, *v_strides),
        selection_strides=(*indices_strides, *count_strides),
        precision=precision,
    )
