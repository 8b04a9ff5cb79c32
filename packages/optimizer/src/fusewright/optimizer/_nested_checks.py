"""What is wanted of DeepNestedOptimizer's arguments and of what it loads; nothing is touched before
it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from ._backends import Backend, check_backend
from ._checks import check_options
from ._members import is_distributed
from .adamw import AdamW

Tensor = torch.Tensor


class Options(NamedTuple):
    """What holds of all groups; DeepNestedOptimizer says what each means."""

    meta_lr: float
    max_grad_norm: float | None
    mode: str
    meta: str
    meta_update_freq: int
    controller_hidden_dim: int
    controller_num_layers: int
    controller_update_freq: int
    features: Any
    update: str
    frequencies: tuple[int, ...]
    preprocessing: bool
    momentum_hidden_dim: int
    momentum_num_layers: int
    state_dtype: torch.dtype | None
    rounding: Any
    seed: int
    backend: Backend


CHOICES = {
    "mode": ("simple", "explicit"),
    "meta": ("hypergradient", "proxy"),
    "features": ("log", "raw"),
    "update": ("adamw", "continuum"),
}
# Of a parameter in AdamW's launches.
STEP_NUMBERS = 8
COUNTS = (
    "meta_update_freq",
    "controller_hidden_dim",
    "controller_num_layers",
    "controller_update_freq",
    "momentum_hidden_dim",
    "momentum_num_layers",
)


def check_nested(options: Options) -> None:
    check_backend(options.backend)
    check_options(options.max_grad_norm, None, options.state_dtype, options.rounding, options.seed)
    for name, choices in CHOICES.items():
        found = getattr(options, name)
        if found not in choices:
            wanted = " or ".join(f'"{choice}"' for choice in choices)
            raise ValueError(f"{name} must be {wanted}, got {found!r}")
    for name in COUNTS:
        check_count(name, getattr(options, name))
    lr = options.meta_lr
    if isinstance(lr, bool) or not isinstance(lr, Real) or not 0.0 <= float(lr) < float("inf"):
        raise ValueError(f"meta_lr must be at least 0, got {lr!r}")
    if not options.frequencies:
        raise ValueError("frequencies must be of one level at least, got none")
    for f in options.frequencies:
        check_count("frequencies", f)
    if options.momentum_hidden_dim < 2:
        raise ValueError("momentum_hidden_dim must be at least 2, got 1: two units carry a number")
    if options.update == "continuum" and (options.rounding, options.state_dtype) != (
        "nearest",
        None,
    ):
        raise ValueError(
            'rounding and state_dtype are of update="adamw" alone, got '
            f"{options.rounding!r} and {options.state_dtype}"
        )


def check_count(name: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise ValueError(f"{name} must be whole numbers of at least 1, got {x!r}")


def check_members(groups: Iterable[dict[str, Any]]) -> None:
    """Parameters that one device's controller can serve, in groups of names of their own."""
    names, devices = [], set()
    for group in groups:
        depth = group["depth"]
        if isinstance(depth, bool) or not isinstance(depth, Real) or not 0.0 <= float(depth) <= 1.0:
            raise ValueError(f"depth must be from 0 to 1, got {depth!r}")
        names.append(group["name"])
        for p in group["params"]:
            if is_distributed(p) or p.is_complex():
                what = "a DTensor" if is_distributed(p) else f"one of {p.dtype}"
                raise TypeError(f"parameters must be real tensors of one process, got {what}")
            devices.add(p.device)
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"parameters must be on one device, got {found}")
    if len(set(names)) < len(names):
        raise ValueError(f"groups must have names of their own, got {names}")


def check_names_of_state(
    wanted: str, states: Iterable[Any], needed: Sequence[str], allowed: Sequence[str]
) -> None:
    """The state of each parameter, which may be empty."""
    for number, state in enumerate(states):
        if not state:
            continue
        if not set(needed) <= set(state) <= set(allowed):
            raise ValueError(
                f"the {wanted} must have {', '.join(needed)}, got {listed(state)} of parameter "
                f"{number}"
            )
        for name, x in state.items():
            if name != "step" and not isinstance(x, Tensor):
                raise ValueError(f"{name} of parameter {number} must be a tensor, got {told(x)}")


def check_like(name: str, x: Any, wanted: Any) -> None:
    """A piece of a state dict that has the names, lengths and shapes of another: of an AdamW in its
    place those that it takes, and of a function those that it lets pass.
    """
    if isinstance(wanted, AdamW):
        check_adamw(name, x, wanted)
    elif isinstance(wanted, dict):
        if not isinstance(x, Mapping) or set(x) != set(wanted):
            raise ValueError(f"{name} must have {listed(wanted)}, got {told(x)}")
        for key, mine in wanted.items():
            check_like(f"{name}.{key}", x[key], mine)
    elif isinstance(wanted, list):
        check_list(name, x, len(wanted))
        for number, (each, mine) in enumerate(zip(x, wanted, strict=True)):
            check_like(f"{name}[{number}]", each, mine)
    elif isinstance(wanted, Tensor):
        if not isinstance(x, Tensor) or x.shape != wanted.shape:
            raise ValueError(f"{name} must be a tensor of {list(wanted.shape)}, got {told(x)}")
    elif isinstance(wanted, int):
        if isinstance(x, bool) or not isinstance(x, int) or x < 0:
            raise ValueError(f"{name} must be a whole number of at least 0, got {told(x)}")
    elif callable(wanted):
        wanted(name, x)
    elif x is not None:
        raise ValueError(f"{name} must be None, got {told(x)}")


def check_adamw(name: str, x: Any, optimizer: AdamW) -> None:
    """A state dict that the optimizer would take, of parameters of its own."""
    wanted = f"{name} must be the state dict of an AdamW over parameters like the optimizer's"
    if not isinstance(x, Mapping) or not {"state", "param_groups"} <= set(x):
        raise ValueError(f"{wanted}, got {told(x)}")
    try:
        checked = optimizer._checked(optimizer._completed(dict(x)))
        states = [state for _, state in optimizer._states_of(checked)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{wanted}, got one with this fault: {error}") from error
    needed = "step", "exp_avg", "exp_avg_sq"
    check_names_of_state(f"state in {name}", states, needed, needed)


def check_numbers(ps: Sequence[Tensor], name: str, x: Any) -> None:
    """What the last step took of AdamW's parameters."""
    if not isinstance(x, Mapping) or set(x) != {"gradients", "numbers"}:
        raise ValueError(f"{name} must have gradients, numbers, got {told(x)}")
    gradients, numbers = x["gradients"], x["numbers"]
    if gradients is None and numbers is None:
        return
    check_list(f"{name}.gradients", gradients, len(ps))
    for dtype in gradients:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name}.gradients must be floating dtypes or None, got {told(dtype)}")
    if numbers is not None:
        like = torch.empty(len(ps), STEP_NUMBERS, device="meta")
        check_like(f"{name}.numbers", numbers, like)


def check_directions(ps: Sequence[Tensor], name: str, x: Any) -> None:
    """How the last step moved a continuum's parameters."""
    if not isinstance(x, Mapping) or set(x) != {"directions"}:
        raise ValueError(f"{name} must have directions, got {told(x)}")
    check_list(f"{name}.directions", x["directions"], len(ps))
    for number, (p, d) in enumerate(zip(ps, x["directions"], strict=True)):
        if d is not None:
            check_like(f"{name}.directions[{number}]", d, p)


def check_previous(name: str, x: Any) -> None:
    """What an element network gave before, of as many elements as it was trained on."""
    if x is not None and not (isinstance(x, Tensor) and x.ndim == 1):
        raise ValueError(f"{name} must be None or a tensor of one axis, got {told(x)}")


def check_list(name: str, x: Any, length: int) -> None:
    if not isinstance(x, (list, tuple)) or len(x) != length:
        came = f"{len(x)}" if isinstance(x, (list, tuple)) else told(x)
        raise ValueError(f"{name} must be a list of {length}, got {came}")


def listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"


def told(x: Any) -> str:
    """What came, in few words."""
    if isinstance(x, Tensor):
        return f"one of {list(x.shape)} in {x.dtype}"
    return listed(x) if isinstance(x, Mapping) else repr(x)
