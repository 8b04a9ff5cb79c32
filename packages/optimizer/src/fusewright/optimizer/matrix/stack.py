"""Parameters of one shape that are updated together, and the checks of what is stacked."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import check_whole

Tensor = torch.Tensor


class Stack:
    """Parameters of one shape, dtype, device and group, with their state.

    Attributes:
        params: in the order of the optimizer's.
        number: of their group.
        buffers: state by name, ``[parameters, ...]``; of a few stacks of a shape one memory.
        views: the same for each parameter, as the optimizer's state has it.
        by_kernels: whether kernels update it in this step.
        launches: of its kernels, once they were planned.
    """

    def __init__(self, params: list[Tensor], number: int, buffers: dict[str, Tensor]) -> None:
        self.params, self.number = params, number
        self.buffers = buffers
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
        """The gradients times the factor, in at least fp32; not to be written to."""
        g = stacked([p.grad for p in self.params if p.grad is not None])
        g = g.to(working_dtype(self.params[0].dtype))
        return g if isinstance(factor, float) and factor == 1.0 else g * factor

    def values(self) -> Tensor:
        """The parameters in at least fp32; not to be written to."""
        return stacked([p.detach() for p in self.params]).to(working_dtype(self.params[0].dtype))

    def keep(self, skips: Tensor | None, **state: Tensor) -> None:
        """Take new state, unless the step is skipped."""
        for name, new in state.items():
            buffer = self.buffers[name]
            buffer.copy_(new if skips is None else torch.where(skips, buffer, new))

    def move(self, skips: Tensor | None, old: Tensor, new: Tensor) -> None:
        """Take new values of the parameters, unless the step is skipped."""
        new = new if skips is None else torch.where(skips, old, new)
        values = new.to(self.params[0].dtype).unbind()
        torch._foreach_copy_([p.detach() for p in self.params], list(values))


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
    return torch.zeros(p.shape, dtype=working_dtype(p.dtype), device=p.device)


def check_parameter(p: Tensor) -> None:
    check_whole(p, "a matrix is moved by products of all its rows and columns")


def check_state(name: str, value: Any, new: Tensor, place: int) -> None:
    if not torch.is_tensor(value) or value.shape != new.shape:
        got = list(value.shape) if torch.is_tensor(value) else repr(value)
        raise ValueError(
            f"{name} of parameter {place} must be a tensor of shape {list(new.shape)}, got {got}"
        )


def check_switch(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise ValueError(f"{name} must be True or False, got {x!r}")
