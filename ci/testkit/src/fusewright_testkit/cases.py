"""What a package's ``bench`` module states: the cases that are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Tensors = list[torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Args:
        op: name of the public function or model.
        sizes: name to number, in the order of the op's arguments.
        dtype: of the operands.
        inputs: from a device to what the op takes; floating tensors get gradients.
        reference: the op in plain torch.
        bytes_moved: by pass, "fwd", "bwd", "fwd+bwd" or "step": each input read once, each output
            written once.
        flops: by pass; empty where bandwidth alone binds.
        sample: other inputs at which the op is checked, where the reference cannot take the timed
            ones for their size.
        precision: "tf32" where fp32 matrices are multiplied so.
        forward_wall: whether the host's time of the forward pass alone counts.
    """

    op: str
    sizes: Mapping[str, int | str]
    dtype: torch.dtype
    inputs: Callable[[str], Tensors]
    reference: Callable
    bytes_moved: Mapping[str, int]
    flops: Mapping[str, float] = field(default_factory=dict)
    sample: Callable[[str], Tensors] | None = None
    precision: str = ""
    forward_wall: bool = False
