"""What AdamW keeps of each parameter: how it is allocated, loaded, and passed to a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..common.checks import check_buffer
from ..common.placement import is_dense, local, mesh_of, number_on
from ..common.tables import check_eager

Tensor = torch.Tensor
BUFFERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "remainder")


class Rules(NamedTuple):
    """What holds of all parameters of an optimizer.

    Attributes:
        groups: how many there are.
        decoupled: whether weight decay is applied to the parameter, not added to the gradient.
        rounding: of bf16 parameters: "nearest", "stochastic" or "remainder".
        seed: of stochastic rounding.
        max_grad_norm: None where gradients are not clipped.
    """

    groups: int
    decoupled: bool
    rounding: str
    seed: int
    max_grad_norm: float | None


class BatchKey(NamedTuple):
    """Parameters with equal keys share a launch."""

    parameter: torch.dtype
    gradient: torch.dtype
    state: torch.dtype
    amsgrad: bool
    remainder: bool
    # Which of the meshes, 0 for none.
    mesh: int


class Member(NamedTuple):
    """A parameter and its state, as flat memory.

    Attributes:
        place: of the parameter among all of the optimizer.
        p: its local memory.
        buffers: exp_avg, exp_avg_sq, max_exp_avg_sq and remainder, None where there is none.
        step: how many steps it has taken, 0-d fp32.
        group: index of its parameter group.
        sign: -1 where the objective is maximized.
        key: of its launch.
        mesh: (mesh, sharded axes) of a DTensor, None of any other.
        gradient: dtype of its gradient.
    """

    place: int
    p: Tensor
    buffers: tuple[Tensor | None, ...]
    step: Tensor
    group: int
    sign: float
    key: BatchKey
    mesh: Any

    @property
    def gradient(self) -> torch.dtype:
        return self.key.gradient


class StateFormat(NamedTuple):
    """In which dtypes an optimizer keeps its state.

    Attributes:
        state_dtype: of exp_avg and exp_avg_sq; None: by the parameter.
        rounding: "remainder" keeps the bits that bf16 parameters lack.
    """

    state_dtype: torch.dtype | None
    rounding: str

    def dtype_of(self, name: str, p: Tensor) -> torch.dtype:
        if name == "step":
            return torch.float32
        if name == "remainder":
            return torch.int16
        if self.state_dtype is None or p.is_complex():
            # Squares of small gradients are zero in fp16.
            return torch.float32 if p.dtype == torch.float16 else p.dtype
        return self.state_dtype

    def new(self, name: str, p: Tensor) -> Tensor:
        """Before the first step."""
        dtype = self.dtype_of(name, p)
        if name == "step":
            return torch.zeros((), dtype=dtype, device=local(p).device)
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)

    def converted(self, name: str, value: Any, p: Tensor) -> Any:
        """A loaded piece of state in its dtype and in the order of the parameter's memory."""
        if name == "step":
            if not isinstance(value, Tensor):
                value = torch.full((), float(value), device=p.device)
            return value.detach().to(local(p).device, torch.float32, copy=True).reshape(())
        if name not in BUFFERS or not isinstance(value, Tensor):
            return value
        return torch.empty_like(p, dtype=self.dtype_of(name, p)).copy_(value)

    def fits(self, name: str, x: Tensor, p: Tensor) -> bool:
        """Whether a step takes this piece of state as it is."""
        if (x.dtype, x.device) != (self.dtype_of(name, p), p.device):
            return False
        if name == "step":
            return not x.shape
        memory = local(p)
        return not is_dense(memory) or local(x).stride() == memory.stride()

    def member(
        self,
        p: Tensor,
        g: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        place: int,
        number: int,
        mesh: int,
    ) -> Member:
        """A parameter and its state as a step takes them; allocates state that is missing."""
        memory = local(p.detach())
        remainder = self.rounding == "remainder" and p.dtype == torch.bfloat16
        wanted = ["exp_avg", "exp_avg_sq"]
        wanted += ["max_exp_avg_sq"] * group["amsgrad"] + ["remainder"] * remainder
        for name in ("step", *wanted):
            if name not in state:
                check_eager(p.device, f"{name} of parameter {place} was to be made")
                state[name] = self.new(name, p)
            else:
                check_buffer(name, state[name], p, place)
                # Users may have replaced it, or the parameter's memory.
                if not self.fits(name, state[name], p):
                    state[name] = self.converted(name, state[name], p)
        state_dtype = local(state["exp_avg"]).dtype
        key = BatchKey(memory.dtype, local(g).dtype, state_dtype, group["amsgrad"], remainder, mesh)
        buffers = tuple(local(state[name]) if name in wanted else None for name in BUFFERS)
        sign = -1.0 if group["maximize"] else 1.0
        return Member(place, memory, buffers, state["step"], number, sign, key, mesh_of(p))


def group_numbers(groups: list[dict], device: torch.device) -> list[float | Tensor]:
    """lr, both betas, eps and weight decay of each group: numbers, or tensors on this device."""
    return [
        number_on(device, x)
        for group in groups
        for x in (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    ]
