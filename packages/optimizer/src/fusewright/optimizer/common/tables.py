"""Many tensors for one launch: their addresses and lengths on the device.

A kernel gets a table of addresses, one line for each role (parameter, gradient, ...), and finds the
tensor and the elements of a program in two more: of each block its tensor, of each tensor its first
block. Addresses and numbers are uploaded again where they have changed; tables that follow from
lengths are uploaded once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
# Accesses of several elements need addresses at multiples of this many bytes.
ALIGNED_BYTES = 16
# Called by map, in half of a comprehension's time: each step calls it for all parameters.
ADDRESS = Tensor.data_ptr
DTYPE = operator.attrgetter("dtype")


def upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for it.

    A captured copy would read the host's memory in each replay, and torch does not say when a graph
    is gone, so that the memory could be freed: in a capture they are arguments of kernels, which
    the graph holds itself.
    """
    if not is_captured(device):
        return source_of(numbers, dtype, device).to(device, non_blocking=True)
    table = torch.zeros(len(numbers), dtype=dtype, device=device)
    if numbers:
        # A hundred numbers a launch.
        torch._foreach_add_(table.unbind(), list(numbers))
    return table


def source_of(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host where a copy to the device need not be waited for."""
    source = torch.as_tensor(numbers, dtype=dtype, device="cpu")
    return source.pin_memory() if device.type == "cuda" else source


class Uploaded:
    """Numbers of the host on a device, brought up to date without waiting for it.

    What a captured step uploads, its replays write again: into memory of the capture's own, so
    that eager steps and replays may follow one another in any order. A capture whose numbers are
    up to date reads the eager table.

    Args:
        exclusive: an eager table that a capture reads is the capture's from then on, and eager
            steps write new numbers to another one: for addresses, which another step exchanges.

    Attributes:
        table: the numbers, in one axis.
    """

    def __init__(
        self, count: int, dtype: torch.dtype, device: torch.device, *, exclusive: bool = False
    ) -> None:
        self.eager = self.table = torch.empty(count, dtype=dtype, device=device)
        self.exclusive = exclusive
        # The eager table's numbers.
        self.host: list[float] = []
        # Whether the eager table is a capture's.
        self.left = False
        # Eager tables that are left to captures: replays go on reading them.
        self.kept: list[Tensor] = []

    def hold(self, numbers: list) -> bool:
        """Put these numbers into the table; returns whether they may differ from those before."""
        captured = is_captured(self.eager.device)
        if captured and numbers != self.host:
            self.table = upload(numbers, self.eager.dtype, self.eager.device)
            return True
        switched = self.table is not self.eager
        if numbers == self.host:
            self.left |= captured and self.exclusive
            self.table = self.eager
            return switched
        if self.left:
            self.kept.append(self.eager)
            self.eager, self.left = torch.empty_like(self.eager), False
        self.table, self.host = self.eager, numbers
        source = source_of(numbers, self.table.dtype, self.table.device)
        self.table.copy_(source, non_blocking=True)
        return True


def is_captured(device: torch.device) -> bool:
    """Whether what is launched on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_eager(device: torch.device, what: str) -> None:
    """Raise where the device captures: a replay would initialize again what is made once."""
    if is_captured(device):
        raise RuntimeError(
            f"{what} in the capture of a CUDA graph, each replay of which would do so again: "
            "take a step of the same parameters before"
        )


class Blocks:
    """How programs of ``size`` elements each share tensors of these lengths.

    Attributes:
        count: of all tensors together.
        tables: lengths ``[tensors]`` and the first block of each tensor ``[tensors]``, int64, and
            the tensor of each block ``[count]``, int32, as kernels take them.
    """

    def __init__(self, lengths: Sequence[int], size: int, device: torch.device) -> None:
        firsts = [0]
        for length in lengths:
            firsts.append(firsts[-1] - (-length // size))
        self.count = firsts.pop()
        starts = upload(firsts, torch.int64, device)
        # The last tensor that starts there or before: those without a block start there too.
        blocks = torch.arange(self.count, device=device)
        owner = torch.searchsorted(starts, blocks, right=True, out_int32=True).sub_(1)
        self.tables = upload(lengths, torch.int64, device), starts, owner


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(ADDRESS, tensors))


def layouts_of(gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a plan depends on of gradients: dtypes, strides where not all are contiguous, and
    whether any is a lazy negation.
    """
    strides = all(map(Tensor.is_contiguous, gradients)) or list(map(Tensor.stride, gradients))
    return list(map(DTYPE, gradients)), strides, any(map(Tensor.is_neg, gradients))


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def aligned(addresses: Sequence[int]) -> bool:
    """Whether wide accesses may read at all addresses."""
    return not functools.reduce(operator.or_, addresses, 0) % ALIGNED_BYTES
