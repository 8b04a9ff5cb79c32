"""What is wanted of DeepNestedOptimizer's arguments; nothing is touched before it is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch

from ._backends import Backend, check_backend
from ._checks import check_options
from ._members import is_distributed

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
