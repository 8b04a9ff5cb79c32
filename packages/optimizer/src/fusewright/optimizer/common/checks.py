"""Checks of what several optimizers take: options, parameters, gradients, state dicts."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from .._core.checks import check_option, check_strided, checked_count
from .placement import NUMBER_DTYPES, is_distributed

Tensor = torch.Tensor
ROUNDINGS = ("nearest", "stochastic", "remainder")
STATE_DTYPES = (torch.float32, torch.bfloat16)


def checked_clipping(
    max_grad_norm: float | None, skip_nonfinite: bool | None
) -> tuple[float | None, bool]:
    """The norm as a float, and whether steps without a finite norm are skipped: where that is left
    out, by whether there is a norm.
    """
    if max_grad_norm is None:
        return None, bool(skip_nonfinite)
    if not is_number(max_grad_norm) or not 0.0 < float(max_grad_norm) < math.inf:
        raise ValueError(f"max_grad_norm must be a finite number above 0, got {max_grad_norm!r}")
    if skip_nonfinite is False:
        raise ValueError(
            "skip_nonfinite must be True or left out where max_grad_norm is given, got False: "
            "no factor scales a norm that is not finite"
        )
    return float(max_grad_norm), True


def check_storage(state_dtype: torch.dtype | None, rounding: str, seed: int) -> None:
    """How AdamW stores state and parameters."""
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype must be float32 or bfloat16, got {state_dtype}")
    check_option("rounding", rounding, ROUNDINGS)
    check_int32("seed", seed)


def check_int32(name: str, x: int, lowest: int = 0) -> None:
    """A whole number that fits into 32 bits."""
    if checked_count(name, x, lowest) >= 2**31:
        raise ValueError(f"{name} must be a whole number from {lowest} to 2^31 - 1, got {x!r}")


def check_number(name: str, x: Any, below: float = math.inf) -> None:
    """A number in its range, or a tensor of one element, whose value is not read."""
    if isinstance(x, Tensor):
        if x.numel() != 1 or x.dtype not in NUMBER_DTYPES:
            raise ValueError(
                f"{name} must be a number or a tensor of one in fp32 or fp64, got {list(x.shape)} "
                f"of {x.dtype}"
            )
    elif not is_number(x) or not 0.0 <= float(x) < below:
        wanted = "at least 0" if below == math.inf else f"from 0 to below {below:g}"
        raise ValueError(f"{name} must be {wanted}, got {x!r}")


def check_plain_number(name: str, x: Any, below: float = math.inf) -> None:
    """A number in its range, of an option that no schedule may write to as a tensor."""
    if isinstance(x, Tensor):
        raise ValueError(f"{name} must be a number, got a tensor")
    check_number(name, x, below)


def is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def check_betas(name: str, betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{name} must be two numbers, got {betas!r}")


def check_rate(group: dict[str, Any]) -> None:
    """The options that the groups of all optimizers have."""
    check_number("lr", group["lr"])
    check_number("weight_decay", group["weight_decay"])


def check_adamw_group(group: dict[str, Any]) -> None:
    """A parameter group of AdamW with all its options."""
    for p in group["params"]:
        check_elements("a parameter", p, complex_too=True)
    check_betas("betas", group["betas"])
    check_rate(group)
    check_number("eps", group["eps"])
    for number, beta in enumerate(group["betas"]):
        check_number(f"betas[{number}]", beta, below=1.0)


def check_elements(name: str, x: Tensor, *, complex_too: bool = False) -> None:
    """A strided tensor of floating elements, or of complex ones where they may be."""
    check_strided(name, x)
    if not (x.is_floating_point() or (complex_too and x.is_complex())):
        wanted = "floating or complex" if complex_too else "floating"
        raise TypeError(f"{name} must be {wanted}, got {x.dtype}")


def check_whole(p: Tensor, reason: str) -> None:
    """A floating parameter of one process."""
    check_elements("a parameter", p)
    if is_distributed(p):
        raise TypeError(f"a parameter must be whole, got a {type(p).__name__}: {reason}")


def check_gradient(p: Tensor, g: Tensor) -> None:
    # Called for each parameter in each step of some optimizers.
    if g.layout is not torch.strided:
        check_strided("a gradient", g)
    if g.is_complex() != p.is_complex():
        raise TypeError(f"a parameter of {p.dtype} has a gradient of {g.dtype}")
    if is_distributed(g) != is_distributed(p):
        raise TypeError(f"a {type(p).__name__} has a gradient that is a {type(g).__name__}")
    if g.shape != p.shape or g.device != p.device:
        raise ValueError(
            f"a parameter of shape {list(p.shape)} on {p.device} has a gradient of "
            f"{list(g.shape)} on {g.device}"
        )


def check_adamw_state(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Options of a state dict, and shapes of its tensors against those of the parameters."""
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        check_adamw_group({**saved, "params": group["params"]})
        for number, p in zip(saved["params"], group["params"], strict=True):
            state = state_dict["state"].get(number, {})
            if "exp_avg" in state and "step" not in state:
                names = ", ".join(map(str, state))
                raise ValueError(f"the state of parameter {number} must have a step, got {names}")
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
