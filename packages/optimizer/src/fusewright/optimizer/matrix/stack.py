"""Parameters of one shape that are updated together, and the checks of what is stacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch

from ..common.checks import check_whole
from ..common.placement import is_distributed, local, placed_like
from .shares import Shares

Tensor = torch.Tensor


class Stack:
    """Parameters of one shape, dtype, device, group and placement, with their state.

    Args:
        params, number, buffers: as below.
        like: the state of one of them, which is a DTensor where the others' is to be one.

    Attributes:
        params: in the order of the optimizer's.
        number: of their group.
        buffers: state by name, ``[parameters, ...]``, of DTensors what this process has; of a few
            stacks of a shape one memory.
        memories: the same for each parameter.
        views: the same as the optimizer's state has it.
        by_kernels: whether kernels update it in this step.
        launches: of its kernels, once they were planned.
        shares: of matrices whose rows several processes have.
    """

    def __init__(
        self,
        params: list[Tensor],
        number: int,
        buffers: dict[str, Tensor],
        like: Mapping[str, Tensor],
    ) -> None:
        self.params, self.number = params, number
        self.distributed = is_distributed(params[0])
        self.buffers = buffers
        self.memories = {name: x.unbind() for name, x in buffers.items()}
        self.views = {
            name: [placed_as(x, like[name]) for x in some] for name, some in self.memories.items()
        }
        self.by_kernels = False
        self.launches: Any = None
        self.shares: Shares | None = None

    @property
    def shape(self) -> torch.Size:
        """Of each, whole."""
        return self.params[0].shape

    @property
    def rows(self) -> int:
        """Of each matrix, whole."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def local_params(self) -> list[Tensor]:
        """What this process has of the parameters."""
        return [local(p) for p in self.params] if self.distributed else self.params

    def local_gradients(self) -> list[Tensor]:
        """Likewise of their gradients."""
        pairs = [(p, p.grad) for p in self.params if p.grad is not None]
        if not self.distributed:
            return [g for _, g in pairs]
        return [local(placed_like(g, p)) for p, g in pairs]

    def gradients(self, factor: Tensor | float) -> Tensor:
        """The gradients times the factor, in at least fp32; not to be written to."""
        g = stacked(self.local_gradients())
        g = g.to(working_dtype(self.params[0].dtype))
        return g if isinstance(factor, float) and factor == 1.0 else g * factor

    def values(self) -> Tensor:
        """The parameters in at least fp32; not to be written to."""
        values = stacked([p.detach() for p in self.local_params()])
        return values.to(working_dtype(self.params[0].dtype))

    def keep(self, skips: Tensor | None, **state: Tensor) -> None:
        """Take new state, unless the step is skipped."""
        for name, new in state.items():
            buffer = self.buffers[name]
            buffer.copy_(new if skips is None else torch.where(skips, buffer, new))

    def move(self, skips: Tensor | None, old: Tensor, new: Tensor) -> None:
        """Take new values of the parameters, unless the step is skipped."""
        new = new if skips is None else torch.where(skips, old, new)
        values = new.to(self.params[0].dtype).unbind()
        torch._foreach_copy_([p.detach() for p in self.local_params()], list(values))

    def sum_(self, x: Tensor) -> Iterator[None]:
        """Sums over this process's rows become those over all rows."""
        if self.shares is not None:
            yield from self.shares.sum_(x)

    def applied(
        self, function: Callable[[Tensor], Tensor], x: Tensor
    ) -> Generator[None, None, Tensor]:
        """A function of each whole matrix, of as many rows and columns: what this process has."""
        if self.shares is None:
            return function(x)
        return (yield from self.shares.applied(function, x))


def placed_as(x: Tensor, like: Tensor) -> Any:
    """This process's part of a tensor like that one."""
    if not is_distributed(like):
        return x
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        x,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def factor_of(sign: float, scale: Tensor | None) -> float | Tensor:
    """What gradients are multiplied by."""
    return sign if scale is None else sign / scale.reshape(())


def stacked(tensors: list[Tensor]) -> Tensor:
    """``[tensors, ...]``, contiguous; the memory of a single contiguous tensor is shared."""
    return tensors[0].contiguous().unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def as_matrices(x: Tensor) -> Tensor:
    """``[stack, first axis, all others]``."""
    return x.flatten(2)


def new_buffer(p: Tensor) -> Tensor:
    """Zeros for the state of a parameter, in at least fp32."""
    dtype = working_dtype(p.dtype)
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)


def check_parameter(p: Tensor) -> None:
    check_whole(p, "a matrix is moved by products of all its rows and columns")


def check_state(name: str, value: Any, new: Tensor, place: int) -> None:
    if not torch.is_tensor(value) or value.shape != new.shape:
        got = list(value.shape) if torch.is_tensor(value) else repr(value)
        raise ValueError(
            f"{name} of parameter {place} must be a tensor of shape {list(new.shape)}, got {got}"
        )
    if is_distributed(value) != is_distributed(new):
        raise ValueError(
            f"{name} of parameter {place} must be a {type(new).__name__}, got a "
            f"{type(value).__name__}"
        )


def check_switch(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise ValueError(f"{name} must be True or False, got {x!r}")
