"""Weights that a module stores wider than its model has them, so that no row of a matrix is
unaligned.

The stored weights beyond the model's width are zero, get gradients of exactly zero and stay zero
under training. A module of padded weights says in ``padded`` how each of them is stored, and calls
``keep_padding_out``: its state dicts then hold them in the model's width.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from .precision import round_up

Tensor = torch.Tensor

# Rows of this many numbers start at multiples of 64 bytes in bf16.
MULTIPLE = 32


class Padded(NamedTuple):
    """How a weight is padded: one axis of it is ``blocks`` blocks of ``stored`` rows, the first
    ``width`` rows of each block the model's.
    """

    axis: int
    blocks: int
    width: int
    stored: int

    def used(self, weight: Tensor) -> Tensor:
        """The weight in the model's width, contiguous: a copy."""
        rows = self.in_blocks(weight).narrow(self.axis + 1, 0, self.width)
        return rows.flatten(self.axis, self.axis + 1).contiguous()

    def beyond(self, weight: Tensor) -> Tensor:
        """A view of the stored rows that are not the model's."""
        rows = self.stored - self.width
        return self.in_blocks(weight).narrow(self.axis + 1, self.width, rows)

    def stored_from(self, weight: Tensor) -> Tensor:
        """The weight in the width in which it is stored, from that in the model's."""
        after = 2 * (weight.ndim - self.axis - 1)
        rows = self.in_blocks(weight)
        rows = F.pad(rows, (*(0,) * after, 0, self.stored - self.width))
        return rows.flatten(self.axis, self.axis + 1)

    def in_blocks(self, weight: Tensor) -> Tensor:
        return weight.unflatten(self.axis, (self.blocks, -1))

    def shape(self, of: Tensor, width: int) -> torch.Size:
        """Of a weight such as ``of``, of blocks of that width."""
        shape = list(of.shape)
        shape[self.axis] = self.blocks * width
        return torch.Size(shape)


class HasPadding(Protocol):
    """A module of padded weights, which ``padded`` describes by their names."""

    padded: dict[str, Padded]


def padded_width(width: int) -> int:
    """The width in which a hidden layer of ``width`` units is stored."""
    return round_up(width, MULTIPLE)


def padding_of(module: HasPadding) -> list[Tensor]:
    """Views of the stored weights that are not part of the model."""
    return [how.beyond(attrgetter(name)(module)) for name, how in module.padded.items()]


@torch.no_grad()
def clear_padding_of(module: HasPadding) -> None:
    for weights in padding_of(module):
        weights.zero_()


def keep_padding_out(module: torch.nn.Module) -> None:
    """Have the module save its weights in the model's width, and load such: of another width they
    are a size mismatch, as in torch. Weights that were saved with their padding load too, if that
    is zero.

    DTensors are saved with their padding, since a state dict of them is taken without
    communication; they are loaded in either width, each process looking at the whole weight.
    ``set_model_state_dict`` with broadcast_from_rank0 copies whole weights into shards by itself:
    it takes those with padding alone, as ``get_model_state_dict`` of shards has them. Other
    tensors that wrap tensors, as quantized weights are, are saved and loaded as they are.
    """
    module.register_state_dict_post_hook(save_without_padding)
    module.register_load_state_dict_pre_hook(load_with_padding)


# The hooks are functions of this file, so that a module that has them can be pickled.


def save_without_padding(
    module: HasPadding, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    for name, how in module.padded.items():
        weight = state_dict.get(prefix + name)
        if how.stored > how.width and isinstance(weight, Tensor) and not wraps_tensors(weight):
            state_dict[prefix + name] = how.used(weight)


@torch.no_grad()
def load_with_padding(
    module: HasPadding,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    for name, how in module.padded.items():
        weight = state_dict.get(prefix + name)
        if how.stored == how.width or not isinstance(weight, Tensor):
            continue
        own = attrgetter(name)(module).detach()
        shape = how.shape(own, how.width)
        if weight.shape == shape:
            state_dict[prefix + name] = padded_like(weight, how)
        elif weight.shape != own.shape or has_padding(weight, how):
            error_msgs.append(
                f"size mismatch for {prefix}{name}: copying a param with shape {weight.shape} from "
                f"checkpoint, the shape in current model is {shape}."
            )
            # Torch would tell of the stored shape, too.
            state_dict[prefix + name] = own


def padded_like(weight: Tensor, how: Padded) -> Tensor:
    """The weight as it is stored, a DTensor with its placements."""
    if not is_distributed(weight):
        return how.stored_from(weight)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(weight, DTensor)
    whole = how.stored_from(weight.full_tensor())
    # Every process has the whole, of which it takes its part.
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


def has_padding(weight: Tensor, how: Padded) -> bool:
    """Whether a weight of the stored shape has numbers where the model has none."""
    whole = weight.full_tensor() if is_distributed(weight) else weight  # type: ignore[attr-defined]
    if whole.is_meta or wraps_tensors(whole):
        return False
    # A DTensor may hold less than it says.
    return whole.shape != weight.shape or bool(how.beyond(whole).any())


def wraps_tensors(x: Tensor) -> bool:
    return hasattr(x, "__tensor_flatten__")


def is_distributed(x: Tensor) -> bool:
    return hasattr(x, "placements") and hasattr(x, "device_mesh")
