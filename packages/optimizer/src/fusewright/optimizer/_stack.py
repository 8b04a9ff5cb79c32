"""Parameters of one shape that are moved together, and what is wanted of them."""

from __future__ import annotations

from typing import Any

import torch

from ._checks import check_number
from ._members import is_distributed

Tensor = torch.Tensor


class Stack:
    """Parameters of one shape, dtype, device and group, with their state.

    Attributes:
        params: in the order of the optimizer's.
        number: of their group.
        buffers: state by name, ``[parameters, ...]``.
        views: the same for each parameter, as the optimizer's state has it.
        by_kernels: whether this step moves it so.
        launches: what does, once there is such.
    """

    def __init__(self, params: list[Tensor], number: int, states: list[dict[str, Tensor]]) -> None:
        self.params, self.number = params, number
        self.buffers = {name: torch.stack([s[name] for s in states]) for name in states[0]}
        self.views = {name: x.unbind() for name, x in self.buffers.items()}
        self.by_kernels = False
        self.launches: Any = None

    @property
    def shape(self) -> torch.Size:
        return self.params[0].shape

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def gradients(self, factor: Tensor | float) -> Tensor:
        """Times the factor, in at least fp32; to be left as they are."""
        g = stacked([p.grad for p in self.params if p.grad is not None])
        g = g.to(working_dtype(self.params[0].dtype))
        return g if isinstance(factor, float) and factor == 1.0 else g * factor

    def values(self) -> Tensor:
        """The parameters in at least fp32; to be left as they are."""
        return stacked([p.detach() for p in self.params]).to(working_dtype(self.params[0].dtype))

    def keep(self, skips: Tensor | None, **changed: Tensor) -> None:
        """Take new state, unless the step is skipped."""
        for name, new in changed.items():
            kept = self.buffers[name]
            kept.copy_(new if skips is None else torch.where(skips, kept, new))

    def move(self, skips: Tensor | None, old: Tensor, new: Tensor) -> None:
        """Take new values of the parameters, unless the step is skipped."""
        new = new if skips is None else torch.where(skips, old, new)
        found = new.to(self.params[0].dtype).unbind()
        torch._foreach_copy_([p.detach() for p in self.params], list(found))


def factor_of(sign: float, scale: Tensor | None) -> float | Tensor:
    """What gradients are multiplied by."""
    return sign if scale is None else sign / scale.reshape(())


def stacked(tensors: list[Tensor]) -> Tensor:
    """``[tensors, ...]``, contiguous; of one tensor its memory, where that is so."""
    return tensors[0].contiguous().unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def as_matrices(x: Tensor) -> Tensor:
    """``[stack, first axis, all others]``."""
    return x.flatten(2)


def per_parameter(x: Tensor, like: Tensor) -> Tensor:
    """``[stack]`` to be broadcast over ``like``'s other axes."""
    return x.view(-1, *[1] * (like.dim() - 1))


def check_parameter(p: Tensor) -> None:
    if p.layout is not torch.strided:
        raise TypeError(f"parameters must be strided tensors, got one of {p.layout}")
    if not p.is_floating_point():
        raise TypeError(f"parameters must be floating, got one of {p.dtype}")
    if is_distributed(p):
        raise TypeError(
            f"parameters must be whole, got a {type(p).__name__}: a matrix is moved by products of "
            "all its rows and columns"
        )


def check_state(name: str, value: Any, start: Tensor, place: int) -> None:
    if not torch.is_tensor(value) or value.shape != start.shape:
        got = list(value.shape) if torch.is_tensor(value) else repr(value)
        raise ValueError(
            f"{name} of parameter {place} must be a tensor of shape {list(start.shape)}, got {got}"
        )


def check_fraction(name: str, x: Any, below: float = 1.0) -> None:
    """A plain number in its range: what is no schedule's may be no tensor."""
    if torch.is_tensor(x):
        raise ValueError(f"{name} must be a number, got a tensor")
    check_number(name, x, below)


def check_switch(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise ValueError(f"{name} must be True or False, got {x!r}")
