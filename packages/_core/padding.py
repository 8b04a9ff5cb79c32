"""Weights that a module stores wider than its model has them, so that no row of a matrix is
unaligned.

The stored weights beyond the model's width are zero, get gradients of exactly zero and stay zero
under training. A module of padded weights has ``padding()``, which lists views of them, and
``clear_padding()``, which sets them to zero; it calls that where it draws new weights, and
``clear_after_loading`` makes torch call it after a state dict is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from .precision import round_up

# Rows of this many numbers start at multiples of 64 bytes in bf16.
MULTIPLE = 32


class Padded(Protocol):
    """A module of padded weights."""

    def clear_padding(self) -> None: ...


def padded_width(width: int) -> int:
    """The width in which a hidden layer of ``width`` units is stored."""
    return round_up(width, MULTIPLE)


@torch.no_grad()
def set_to_zero(weights: Iterable[torch.Tensor]) -> None:
    for weight in weights:
        weight.zero_()


def clear_after_loading(module: torch.nn.Module) -> None:
    """Clear a module's padding whenever a state dict is loaded into it: weights of another width
    that is stored as wide load without an error.
    """
    module.register_load_state_dict_post_hook(clear_padding_of)


def clear_padding_of(module: Padded, incompatible_keys: object) -> None:
    """The hook; a function of this file, so that a module that has it can be pickled."""
    module.clear_padding()
