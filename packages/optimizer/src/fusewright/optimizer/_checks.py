"""What is wanted of the optimizers' arguments; nothing is touched before it is looked at."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from ._members import NUMBER_DTYPES, is_distributed

Tensor = torch.Tensor
ROUNDINGS = ("nearest", "stochastic", "remainder")
STATE_DTYPES = (torch.float32, torch.bfloat16)


def check_options(
    max_grad_norm: float | None,
    skip_nonfinite: bool | None,
    state_dtype: torch.dtype | None,
    rounding: str,
    seed: int,
) -> None:
    if max_grad_norm is not None:
        number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
        if not number or not 0.0 < float(max_grad_norm) < math.inf:
            wanted = "max_grad_norm must be a finite number above 0"
            raise ValueError(f"{wanted}, got {max_grad_norm!r}")
        if skip_nonfinite is False:
            raise ValueError(
                "skip_nonfinite must be True or left out where max_grad_norm is given, got False: "
                "no factor scales a norm that is not finite"
            )
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype must be float32 or bfloat16, got {state_dtype}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise ValueError(f"seed must be a whole number from 0 to 2^31 - 1, got {seed!r}")


def check_parameters(group: dict[str, Any]) -> None:
    """A parameter group with all its options."""
    for p in group["params"]:
        if p.layout is not torch.strided:
            raise TypeError(f"parameters must be strided tensors, got one of {p.layout}")
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"parameters must be floating or complex, got one of {p.dtype}")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    check_number("lr", group["lr"])
    check_number("eps", group["eps"])
    check_number("weight_decay", group["weight_decay"])
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        check_number(name, beta, below=1.0)


def check_number(name: str, x: Any, below: float = math.inf) -> None:
    """A number in its range, or a tensor of one element, whose value nobody looks at."""
    if isinstance(x, Tensor):
        if x.numel() != 1 or x.dtype not in NUMBER_DTYPES:
            raise ValueError(
                f"{name} must be a number or a tensor of one in fp32 or fp64, got {list(x.shape)} "
                f"of {x.dtype}"
            )
        return
    if isinstance(x, bool) or not isinstance(x, Real) or not 0.0 <= float(x) < below:
        wanted = "at least 0" if below == math.inf else f"from 0 to below {below:g}"
        raise ValueError(f"{name} must be {wanted}, got {x!r}")


def check_gradient(p: Tensor, g: Tensor) -> None:
    if g.layout is not torch.strided:
        raise TypeError(f"gradients must be strided tensors, got one of {g.layout}")
    if g.is_complex() != p.is_complex():
        raise TypeError(f"a parameter of {p.dtype} has a gradient of {g.dtype}")
    if is_distributed(g) != is_distributed(p):
        raise TypeError(f"a {type(p).__name__} has a gradient that is a {type(g).__name__}")
    if g.shape != p.shape or g.device != p.device:
        raise ValueError(
            f"a parameter of shape {list(p.shape)} on {p.device} has a gradient of "
            f"{list(g.shape)} on {g.device}"
        )


def check_state_dict(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Options of a state dict, and shapes of its tensors against those of the parameters."""
    saved = state_dict["param_groups"]
    for old, group in zip(saved, groups, strict=True):
        check_parameters({**old, "params": group["params"]})
        for number, p in zip(old["params"], group["params"], strict=True):
            state = state_dict["state"].get(number, {})
            if "exp_avg" in state and "step" not in state:
                came = ", ".join(map(str, state))
                raise ValueError(f"the state of parameter {number} must have a step, got {came}")
            for name, value in state.items():
                if isinstance(value, Tensor):
                    check_buffer(name, value, p, number)


def check_buffer(name: str, value: Tensor, p: Tensor, number: int) -> None:
    """A piece of the state of a parameter."""
    if name == "step":
        if value.numel() != 1:
            raise ValueError(f"step of parameter {number} must be one number, got {value.numel()}")
    elif value.shape != p.shape:
        raise ValueError(
            f"{name} of parameter {number} must have shape {list(p.shape)}, got {list(value.shape)}"
        )
    elif is_distributed(value) != is_distributed(p):
        raise ValueError(
            f"{name} of parameter {number} must be distributed as that {type(p).__name__} is, got "
            f"a {type(value).__name__}"
        )


def check_clipped(gradients: list[Tensor]) -> None:
    for g in gradients:
        if g.layout is not torch.strided:
            raise TypeError(f"gradients must be strided tensors, got one of {g.layout}")
        if not (g.is_floating_point() or g.is_complex()):
            raise TypeError(f"gradients must be floating or complex, got one of {g.dtype}")
