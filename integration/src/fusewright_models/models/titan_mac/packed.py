"""Rows that hold several documents, or padding, as the layers of a TitanMAC read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._core.documents import Layout, beginnings, layout_of
from ..documents import Documents


class Packed(NamedTuple):
    """Rows of L places, in which each document begins with a unit of its own: a segment, or a chunk
    of the memory.

    Attributes:
        layout: where tokens stand.
        unit: its places.
    """

    layout: Layout
    unit: int

    @classmethod
    def of(cls, documents: Documents, tokens: Tensor, unit: int, room: int | None) -> Packed:
        """For the documents of ``tokens [B, T]``; ``room`` places, None for as many as any take."""
        rows, length = tokens.shape
        blocks = None if room is None else room // unit
        return cls(layout_of(rows, length, unit, **documents.options, blocks=blocks), unit)

    def positions(self) -> Tensor:
        """``[B, L]``, of each place in its document."""
        begins = self.layout.begins
        within = torch.arange(begins.shape[1], device=begins.device) - beginnings(begins)
        first = (self.unit * within).unsqueeze(-1)
        return (first + torch.arange(self.unit, device=begins.device)).flatten(1)

    @property
    def for_attention(self) -> dict[str, Any]:
        """As an attention over all places takes them."""
        return {"cu_seqlens": self.layout.bounds}

    @property
    def for_memory(self) -> dict[str, Any]:
        """As a memory that reads all places takes them."""
        return {"resets": self.layout.begins, "mask": self.layout.filled}
