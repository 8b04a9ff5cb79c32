"""What a package's ``bench`` module states, the cases that are timed, and what helps to state them
and their providers.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

Tensors = list[torch.Tensor | None]
# An op through torch.compile, each shape compiled for itself.
compiled: Callable[[Callable], Callable] = functools.partial(
    torch.compile, fullgraph=True, dynamic=False
)


DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
        first_call: whether its first call is timed, which that of an op's first case is in any
            case: other kernels serve it.
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
    first_call: bool = False

    @property
    def described(self) -> str:
        """The sizes as result files write them."""
        return described(self.sizes)

    @property
    def dtype_name(self) -> str:
        """The dtype, or how fp32 is multiplied, as result files write it."""
        return self.precision or DTYPES[self.dtype]


def described(sizes: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in sizes.items())


def by_pass(forward: int, backward: int | None = None) -> dict[str, int]:
    """Bytes or operations by pass; the backward pass takes twice the forward pass's where they are
    left out.
    """
    backward = 2 * forward if backward is None else backward
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}


class Absent(dict[str, Any]):
    """The functions of a library that cannot be had here: none, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


def installed(*libraries: tuple[str, str, Callable[[], dict[str, Any]]]) -> dict[str, dict]:
    """The providers of those libraries that are installed, named with their version; the others are
    ``Absent``.

    Args:
        libraries: name, distribution, and what imports it and returns its functions by op.
    """
    found: dict[str, dict] = {}
    for name, distribution, load in libraries:
        try:
            found[f"{name}-{importlib.metadata.version(distribution)}"] = load()
        # A library that does not fit its requirements raises what it likes while it is imported.
        except Exception as error:
            found[name] = Absent(told(error))
    return found


def told(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class Layer:
    """A layer as an op on x and on its parameters, in the order of their names; those whose names
    begin with one of ``leave_out`` stay as they are.
    """

    def __init__(self, make: Callable[..., nn.Module], leave_out: tuple[str, ...] = ()):
        self.make: Callable[..., nn.Module] = make
        self.leave_out: tuple[str, ...] = leave_out

    @functools.cached_property
    def layer(self) -> nn.Module:
        """On the GPU; its own parameters are not read."""
        return self.make(device="cuda" if torch.cuda.is_available() else "cpu")

    def learned(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        named = sorted(layer.named_parameters())
        return {name: x.detach() for name, x in named if not name.startswith(self.leave_out)}

    def parameters(self, device: str) -> list[torch.Tensor]:
        """Fresh ones."""
        return [*self.learned(self.make(device=device)).values()]

    def __call__(self, x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = dict(zip(self.learned(self.layer), parameters, strict=True))
        y = functional_call(self.layer, state, (x,))
        return (y[0] if isinstance(y, tuple) else y,)
