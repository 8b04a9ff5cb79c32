"""Batches in memory that stays: a graph reads the one of its shape there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Each graph holds as many nodes as its step has launches: of more shapes the others stay eager.
MOST_SHAPES = 128


class HeldBatches:
    """The last batch of each shape, for up to `MOST_SHAPES` of them."""

    def __init__(self) -> None:
        self.batches: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.batches)

    def hold(self, batch: Any) -> tuple[Hashable, Any] | None:
        """The batch where those of its shape stay, and the shape; None where it is of one shape too
        many.

        Raises:
            ValueError: it is no dataclass of tensors.
        """
        shape = shape_of(batch)
        if shape is None:
            raise ValueError(f"a {type(batch).__name__} is no dataclass of tensors")
        tensors = tensors_of(batch)
        if shape in self.batches:
            torch._foreach_copy_(tensors_of(self.batches[shape]), tensors)
        elif len(self) < MOST_SHAPES:
            self.batches[shape] = with_tensors(batch, [x.clone() for x in tensors])
        else:
            return None
        return shape, self.batches[shape]


def parts_of(batch: Any) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def tensors_of(batch: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(parts_of(batch)) if isinstance(x, Tensor)]


def with_tensors(batch: Any, tensors: list[Tensor]) -> Any:
    """The batch with others in the place of its tensors."""
    given = iter(tensors)
    return replace(batch, **pytree.tree_map_only(Tensor, lambda _: next(given), parts_of(batch)))


def shape_of(batch: Any) -> Hashable | None:
    """Equal of batches that one graph serves; None of what is no dataclass."""
    if not is_dataclass(batch):
        return None
    leaves, _ = pytree.tree_flatten_with_path(parts_of(batch))
    return tuple((path, (x.shape, x.dtype) if isinstance(x, Tensor) else x) for path, x in leaves)
