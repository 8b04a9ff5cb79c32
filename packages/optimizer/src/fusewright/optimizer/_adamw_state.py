"""What AdamW keeps of each parameter: made, taken from a state dict, and shown to a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._checks import check_buffer
from ._members import Kind, Member, local, mesh_of, serves
from ._tables import check_eager

Tensor = torch.Tensor
BUFFERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "remainder")


class Kept(NamedTuple):
    """In which dtypes an optimizer keeps its state.

    Attributes:
        state_dtype: of exp_avg and exp_avg_sq; None: by the parameter.
        rounding: "remainder" keeps what bf16 parameters lack.
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

    def fresh(self, name: str, p: Tensor) -> Tensor:
        """Before the first step."""
        dtype = self.dtype_of(name, p)
        if name == "step":
            return torch.zeros((), dtype=dtype, device=local(p).device)
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)

    def own(self, name: str, value: Any, p: Tensor) -> Any:
        """A loaded piece of state in its dtype and in the parameter's order."""
        if name == "step":
            if not isinstance(value, Tensor):
                value = torch.full((), float(value), device=p.device)
            return value.detach().to(local(p).device, torch.float32, copy=True).reshape(())
        if name not in BUFFERS or not isinstance(value, Tensor):
            return value
        return torch.empty_like(p, dtype=self.dtype_of(name, p)).copy_(value)

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
        """A parameter and its state as a step takes them; what is missing of the state is made."""
        mine = local(p.detach())
        remainder = self.rounding == "remainder" and p.dtype == torch.bfloat16
        wanted = ["exp_avg", "exp_avg_sq"]
        wanted += ["max_exp_avg_sq"] * group["amsgrad"] + ["remainder"] * remainder
        for name in ("step", *wanted):
            if name not in state:
                check_eager(p.device, f"{name} of parameter {place} was to be made")
                state[name] = self.fresh(name, p)
            else:
                check_buffer(name, state[name], p, place)
                # Others may have put it there, or given the parameter other memory since.
                if not serves(state[name], p, name, self.dtype_of(name, p)):
                    state[name] = self.own(name, state[name], p)
        state_dtype = local(state["exp_avg"]).dtype
        kind = Kind(mine.dtype, local(g).dtype, state_dtype, group["amsgrad"], remainder, mesh)
        buffers = tuple(local(state[name]) if name in wanted else None for name in BUFFERS)
        sign = -1.0 if group["maximize"] else 1.0
        return Member(place, mine, buffers, state["step"], number, sign, kind, mesh_of(p))


def keep_rate_on_device(group: dict[str, Any]) -> None:
    """Where a group is capturable: lr as a tensor that schedulers write to."""
    lr, params = group["lr"], group["params"]
    if group["capturable"] and params and not isinstance(lr, Tensor):
        group["lr"] = torch.tensor(lr, dtype=torch.float32, device=local(params[0]).device)


def clear_results(results: tuple[Tensor, Tensor, Tensor]) -> None:
    """After a step without gradients: no norm, nothing skipped."""
    norm, skipped, _ = results
    norm.fill_(torch.nan)
    skipped.zero_()


def new_results(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """grad_norm, skipped and skipped_steps before any step."""
    return (
        torch.full((), float("nan"), dtype=torch.float32, device=device),
        torch.zeros((), dtype=torch.bool, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
    )
