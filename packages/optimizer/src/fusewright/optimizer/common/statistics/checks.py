"""Checks of what the learned optimizers take, and what their kernels cannot serve."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_whole
from ..placement import is_dense, is_distributed
from ..weights_file import check_shapes
from .layout import MOST, too_long

Tensor = torch.Tensor


def check_learnable(p: Tensor) -> None:
    # A call takes longer than the test, which ``learned_update`` makes of each parameter.
    if p.layout is not torch.strided or not p.is_floating_point() or hasattr(p, "device_mesh"):
        check_whole(p, "the statistics are of whole tensors")


def tensor_obstacle(p: Tensor) -> str | None:
    """Why the kernels cannot serve a parameter."""
    if not is_dense(p):
        return "a parameter has gaps in its memory"
    if too_long(p):
        return "a row of a parameter has over 2^30 elements"
    if p.numel() > MOST:
        return "a parameter has over 65504^2 elements"
    return None


def check_state(state: dict[str, Any], shapes: dict[str, Tensor], number: int) -> None:
    """A parameter's state must be empty, or have all of these names and shapes."""
    if state:
        of = f"of parameter {number}"
        check_pieces(state, shapes, f"the state {of} must have", f" {of}")


def check_pieces(
    found: dict[str, Any], wanted: dict[str, Tensor], must_have: str, of: str = ""
) -> None:
    """Pieces of a state dict must be there, by name, and have their shapes."""
    for name in wanted:
        if name not in found:
            raise ValueError(f"{must_have} {name}, got {sorted(found)}")
    check_shapes(found, {name: x.shape for name, x in wanted.items()}, of)
    for name, x in wanted.items():
        if is_distributed(found[name]) and not is_distributed(x):
            got = type(found[name]).__name__
            raise ValueError(f"{name}{of} must be a {type(x).__name__}, got a {got}")
