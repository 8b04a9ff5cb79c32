"""One call as its kernels see it, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ._backends import Card, card_of, interpreted
from ._configs import SingleTileConfig, TileConfig, is_single_tile, power_of_2
from ._launch import Kind, Launch
from ._operands import (
    DESCRIPTOR_BYTES,
    MAX_ROW_STRIDE,
    Shape,
    describable,
    head_strides,
    present,
    to_copy,
)


class Band(NamedTuple):
    """Which keys the rows of one sequence see: all of a prefix, and a window of the others; a query
    is the last of ``every`` rows.
    """

    window: int
    prefix: int
    every: int = 1


class Problem(NamedTuple):
    """A call as its kernels and their tables see it: sizes, whether a row sees every key (no band),
    what it runs on, which operands are copied first, whether tensor descriptors span them, and the
    integers and constants that every kernel takes first.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    width: int
    band: Band | None
    dtype: torch.dtype
    device: torch.device
    card: Card
    copies: tuple[bool, ...]
    described: bool
    integers: tuple[int, ...]
    constants: dict[str, Any]

    @property
    def all_heads(self) -> int:
        """The heads of all tasks."""
        return self.batches * self.heads

    @property
    def single_tile(self) -> bool:
        """Whether all keys of a head are one tile."""
        few = is_single_tile(self.keys, self.width, self.dtype.itemsize, self.card)
        return few and self.band is None


def problem_of(
    shape: Shape,
    keys: int,
    operands: Sequence[Kind | None],
    in_line: bool,
    precision: str,
    device: torch.device,
    band: Band | None,
) -> Problem:
    """The problem of queries of this shape.

    Args:
        operands: kinds of what has their shape, of k, v and key_lengths.
        in_line: whether descriptors may start where these do.
        precision: of products of fp32 tiles.
        band: what the queries see; None where they see every key.
    """
    *given_kinds, lengths = operands
    read = [present(kind) for kind in given_kinds]
    batches, queries, heads, width = shape
    if heads * width > MAX_ROW_STRIDE:
        raise ValueError(f"the kernels serve up to 2**23 numbers a token, got {heads * width}")
    key_shape = (batches, keys, heads, width)
    shapes = [shape] * (len(read) - 2) + [key_shape] * 2
    given = list(zip(shapes, read, strict=True))
    strides = [stride for one in given for stride in head_strides(*one)]
    constants = dict(D=width, UPCAST=interpreted(), PRECISION=precision)
    sizes = [queries, keys, heads]
    if band is None:
        constants["HAS_LENGTHS"] = lengths is not None
    else:
        # No row sees further back than to the first key.
        sizes += [min(band.window, keys), band.prefix, band.every]
    return Problem(
        batches,
        queries,
        keys,
        heads,
        width,
        band,
        read[-1][0],
        device,
        card_of(device),
        to_copy(read),
        in_line and all(describable(*one) for one in given),
        (*strides, *sizes),
        constants,
    )


def aligned(*operands: torch.Tensor) -> bool:
    """Whether all start where a descriptor may."""
    bits = 0
    for x in operands:
        bits |= x.data_ptr()
    return bits % DESCRIPTOR_BYTES == 0


def precision_of(dtype: torch.dtype) -> str:
    """How fp32 tiles are multiplied: as torch multiplies fp32 matrices on a card."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


class TileLaunch:
    """So many programs of a kernel that multiplies tiles, as large as a line of the tables says;
    they read the operands by pointers or, where the line says so, by descriptors.

    ``integers`` and ``constants``: what this kernel takes besides the problem's.
    """

    def __init__(
        self,
        kernel: Any,
        problem: Problem,
        config: TileConfig | SingleTileConfig,
        programs: int,
        integers: tuple[int, ...],
        **constants: Any,
    ) -> None:
        block_keys = power_of_2(problem.keys)
        # The rows of a tile of an operand like q, and of one like k.
        self.described: tuple[int, int] | None = None
        if isinstance(config, TileConfig):
            block_keys = config.keys
            constants["DESCRIPTORS"] = config.descriptors
            self.described = (config.queries, block_keys) if config.descriptors else None
        self.launch = Launch(
            kernel,
            grid_of(programs),
            problem.device,
            (*problem.integers, *integers),
            dict(num_warps=config.num_warps),
            **problem.constants,
            **constants,
            BLOCK_Q=config.queries,
            BLOCK_K=block_keys,
            BLOCK_D=power_of_2(problem.width),
            NUM_STAGES=config.num_stages,
        )

    def __call__(
        self,
        operands: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor | None],
        scale: float,
    ) -> None:
        if self.described is None:
            self.launch((*operands, *others), (scale,))
            return
        block_queries, block_keys = self.described
        *wide, k, v = operands
        described = [descriptor(x, block_queries) for x in wide]
        described += [descriptor(k, block_keys), descriptor(v, block_keys)]
        self.launch.dispatch((*described, *others), (scale,))


def descriptor(x: torch.Tensor, block_rows: int) -> TensorDescriptor:
    """All rows of ``x``, its heads side by side, in tiles of so many rows of one head."""
    batches, rows, heads, width = x.shape
    _, row, head, _ = x.stride()
    columns = (heads - 1) * head + width
    return TensorDescriptor(x, [batches * rows, columns], [row, 1], [block_rows, width])


def grid_of(programs: int) -> tuple[int]:
    """A grid of so many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs >= 2**31:
        raise ValueError(f"the kernels serve up to 2**31 - 1 tiles of rows, got {programs}")
    return (programs,)
