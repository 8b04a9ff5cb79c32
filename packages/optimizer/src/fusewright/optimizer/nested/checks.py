"""Checks of DeepNestedOptimizer's arguments, and of the state that it loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._core.backends import Backend, check_backend
from .._core.checks import check_option, checked_count, checked_number
from ..adamw.adamw import AdamW
from ..common.checks import check_plain_number, check_storage, checked_clipping
from ..common.placement import is_distributed

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
COUNTS = (
    "meta_update_freq",
    "controller_hidden_dim",
    "controller_num_layers",
    "controller_update_freq",
    "momentum_num_layers",
)


def check_nested(options: Options) -> None:
    check_backend(options.backend)
    checked_clipping(options.max_grad_norm, None)
    check_storage(options.state_dtype, options.rounding, options.seed)
    for name, choices in CHOICES.items():
        check_option(name, getattr(options, name), choices)
    for name in COUNTS:
        checked_count(name, getattr(options, name))
    # Two units carry a number through a layer.
    checked_count("momentum_hidden_dim", options.momentum_hidden_dim, lowest=2)
    check_plain_number("meta_lr", options.meta_lr)
    if not options.frequencies:
        raise ValueError("frequencies must be of one level at least, got none")
    for frequency in options.frequencies:
        checked_count("frequencies", frequency)
    storage = options.rounding, options.state_dtype
    if options.update == "continuum" and storage != ("nearest", None):
        raise ValueError(
            'rounding and state_dtype are of update="adamw" alone, got '
            f"{options.rounding!r} and {options.state_dtype}"
        )


def check_members(groups: Iterable[dict[str, Any]], options: Options) -> None:
    """The parameters must be real and on one device, the groups must have names of their own."""
    explicit = options.mode == "explicit" and options.meta == "hypergradient"
    names, devices = [], set()
    for group in groups:
        checked_number("depth", group["depth"], 0.0, 1.0)
        names.append(group["name"])
        for p in group["params"]:
            if p.is_complex():
                raise TypeError(f"parameters must be real, got one of {p.dtype}")
            if is_distributed(p) and (explicit or options.update == "continuum"):
                raise TypeError(
                    'parameters must be of one process for update="continuum", and for '
                    'hypergradients in mode="explicit", got a DTensor'
                )
            devices.add(p.device)
    if len(devices) > 1:
        raise ValueError(
            f"parameters must be on one device, got {', '.join(sorted(map(str, devices)))}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"groups must have names of their own, got {names}")


def check_names_of_state(
    what: str, states: Iterable[Any], needed: Sequence[str], allowed: Sequence[str]
) -> None:
    """The state of each parameter, which may be empty, must be tensors of these names."""
    for number, state in enumerate(states):
        if not state:
            continue
        if not set(needed) <= set(state) <= set(allowed):
            raise ValueError(
                f"the {what} must have {', '.join(needed)}, got {described(state)} of parameter "
                f"{number}"
            )
        for name, x in state.items():
            if name != "step" and not isinstance(x, Tensor):
                raise ValueError(
                    f"{name} of parameter {number} must be a tensor, got {described(x)}"
                )


def check_decoupled(group: dict[str, Any]) -> None:
    """A group whose decay is AdamW's, or which has none."""
    decay = group["weight_decay"]
    if not group["decoupled_weight_decay"] and (isinstance(decay, Tensor) or decay != 0.0):
        raise ValueError(
            "decoupled_weight_decay must be True, got "
            f"{group['decoupled_weight_decay']!r} with weight_decay={decay!r}"
        )


def check_plain(group: dict[str, Any]) -> None:
    """A group without AdamW's options that the optimizer's groups do not have."""
    for name in ("amsgrad", "maximize"):
        if group.get(name, False):
            raise ValueError(f"{name} must be False, got {group[name]!r}")


class AnyOf(tuple):
    """Alternatives to ``check_like``; the last one's error is raised."""


def check_like(name: str, x: Any, wanted: Any) -> None:
    """A piece of a state dict must be as ``wanted``, by its type:

    * a dict or a list: the same names or length, and each piece as its own;
    * a tensor, or a torch.Size, where -1 is any length: a tensor of that shape;
    * a dtype: a floating dtype;
    * an int: a whole number;
    * an AdamW: a state dict that it takes;
    * ``AnyOf``: as one of them;
    * None: None.
    """
    if isinstance(wanted, AnyOf):
        *others, last = wanted
        for other in others:
            try:
                return check_like(name, x, other)
            except ValueError:
                pass
        check_like(name, x, last)
    elif isinstance(wanted, AdamW):
        check_adamw(name, x, wanted)
    elif isinstance(wanted, dict):
        if not isinstance(x, Mapping) or set(x) != set(wanted):
            raise ValueError(f"{name} must have {described(wanted)}, got {described(x)}")
        for key, piece in wanted.items():
            check_like(f"{name}.{key}", x[key], piece)
    elif isinstance(wanted, list):
        if not isinstance(x, (list, tuple)) or len(x) != len(wanted):
            length = len(x) if isinstance(x, (list, tuple)) else described(x)
            raise ValueError(f"{name} must be a list of {len(wanted)}, got {length}")
        for number, (each, piece) in enumerate(zip(x, wanted, strict=True)):
            check_like(f"{name}[{number}]", each, piece)
    elif isinstance(wanted, (Tensor, torch.Size)):
        shape = list(wanted.shape if isinstance(wanted, Tensor) else wanted)
        fits = isinstance(x, Tensor) and x.ndim == len(shape)
        if not fits or any(n not in (m, -1) for m, n in zip(x.shape, shape, strict=True)):
            raise ValueError(f"{name} must be a tensor of {shape}, got {described(x)}")
    elif isinstance(wanted, torch.dtype):
        if not isinstance(x, torch.dtype) or not x.is_floating_point:
            raise ValueError(f"{name} must be a floating dtype, got {described(x)}")
    elif isinstance(wanted, int):
        checked_count(name, x, lowest=0)
    elif x is not None:
        raise ValueError(f"{name} must be None, got {described(x)}")


def check_adamw(name: str, x: Any, optimizer: AdamW) -> None:
    """A state dict that the optimizer would take."""
    wanted = f"{name} must be the state dict of an AdamW over parameters like the optimizer's"
    if not isinstance(x, Mapping) or not {"state", "param_groups"} <= set(x):
        raise ValueError(f"{wanted}, got {described(x)}")
    try:
        checked = optimizer._checked(optimizer._completed(dict(x)))
        states = [state for _, state in optimizer._states_of(checked)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{wanted}, got one with this fault: {error}") from error
    needed = "step", "exp_avg", "exp_avg_sq"
    check_names_of_state(f"state in {name}", states, needed, needed)


def described(x: Any) -> str:
    """A wrong value in few words."""
    if isinstance(x, Tensor):
        return f"one of {list(x.shape)} in {x.dtype}"
    return ", ".join(map(str, x)) or "nothing" if isinstance(x, Mapping) else repr(x)
