"""How the kernels reach the rows of a head: strides, copies, tensor descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ._launch import Kind, Launch, contiguous_strides

# The offsets inside a tile are 32-bit numbers.
MAX_ROW_STRIDE = 2**23
# Rows that a descriptor spans start at multiples of so many bytes.
DESCRIPTOR_BYTES = 16

Shape = tuple[int, ...]


def needs_copy(kind: Kind | None) -> bool:
    """Whether the kernels can read [B, rows, heads, D] of this kind only from a contiguous copy."""
    if kind is None:
        return False
    _, (_, row_stride, _, last_stride) = kind
    return last_stride != 1 or row_stride > MAX_ROW_STRIDE


def present(kind: Kind | None) -> Kind:
    """The kind of an operand that is always there."""
    assert kind is not None
    return kind


def to_copy(kinds: Sequence[Kind | None]) -> tuple[bool, ...]:
    """Which operands are copied first; empty where none is."""
    copies = tuple(needs_copy(kind) for kind in kinds)
    return copies if any(copies) else ()


def copied(operands: Sequence[torch.Tensor], copies: tuple[bool, ...]) -> tuple:
    return tuple(x.contiguous() if copy else x for x, copy in zip(operands, copies, strict=True))


def head_strides(shape: Shape, kind: Kind) -> tuple[int, int, int]:
    """Strides of tasks, rows and heads of an operand, or of its copy."""
    strides = contiguous_strides(shape) if needs_copy(kind) else kind[1]
    batch, row, head, _ = strides
    return batch, row, head


def describable(shape: Shape, kind: Kind) -> bool:
    """Whether one descriptor spans an operand: all tasks' rows follow one another at one stride."""
    batches, rows, _, width = shape
    batch, row, head = head_strides(shape, kind)
    return (
        width & (width - 1) == 0
        and width * kind[0].itemsize >= DESCRIPTOR_BYTES * 2
        and row * kind[0].itemsize % DESCRIPTOR_BYTES == 0
        and row > 0
        and head > 0
        and (batch == rows * row or batches == 1)
        and batches * rows < 2**31
    )


def aligned(*operands: torch.Tensor) -> bool:
    """Whether all start where a descriptor may."""
    bits = 0
    for x in operands:
        bits |= x.data_ptr()
    return bits % DESCRIPTOR_BYTES == 0


class TileLaunch(NamedTuple):
    """A launch that reads its first operands by pointers or, where ``blocks`` says in tiles of how
    many rows, by descriptors.
    """

    launch: Launch
    blocks: tuple[int, ...] = ()

    def __call__(
        self,
        operands: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor | None],
        scale: float,
    ) -> None:
        if self.blocks:
            described = map(descriptor, operands, self.blocks)
            self.launch.dispatch((*described, *others), (scale,))
        else:
            self.launch((*operands, *others), (scale,))


def descriptor(x: torch.Tensor, block_rows: int) -> TensorDescriptor:
    """All rows of ``x``, its heads side by side, in tiles of so many rows of one head."""
    batches, rows, heads, width = x.shape
    _, row, head, _ = x.stride()
    columns = (heads - 1) * head + width
    return TensorDescriptor(x, [batches * rows, columns], [row, 1], [block_rows, width])


def precision_of(dtype: torch.dtype) -> str:
    """How fp32 tiles are multiplied: as torch multiplies fp32 matrices on a card."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


def grid_of(programs: int) -> tuple[int]:
    """A grid of so many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs >= 2**31:
        raise ValueError(f"the kernels serve up to 2**31 - 1 tiles of rows, got {programs}")
    return (programs,)
