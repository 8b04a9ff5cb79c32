"""What all models are held to: their shapes, their backends, the tokens that they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from fusewright.attention import Backend
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BACKENDS = get_args(Backend)


def check_config(
    config: Any, *, from_zero: Collection[str] = (), above_one: Collection[str] = ()
) -> None:
    """Refuse fields of a config's dataclass that are none of their kind: sizes of 1 and more,
    numbers of 0 and more, switches and names.

    Args:
        config: of int, ``int | None``, float, bool and Literal fields.
        from_zero: sizes that may be 0.
        above_one: numbers that have to be above 1.

    Raises:
        TypeError: a size is no int, a number no number, a switch no bool.
        ValueError: one is out of its range, or a name is none of its literals.
    """
    kinds = get_type_hints(type(config))
    for field in fields(config):
        name, value, kind = field.name, getattr(config, field.name), kinds[field.name]
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {get_args(kind)}; got {value!r}")
        elif kind is bool:
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False; got {value!r}")
        elif kind is float:
            _check_number(name, value, above_one=name in above_one)
        elif value is not None or kind is int:
            _check_size(name, value, least=0 if name in from_zero else 1)


def _check_size(name: str, value: Any, *, least: int) -> None:
    # True is an int to Python.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def _check_number(name: str, value: Any, *, above_one: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {value!r}")
    if not (value > 1.0 if above_one else value >= 0.0) or math.isinf(value):
        least = "above 1" if above_one else "at least 0"
        raise ValueError(f"{name} must be {least} and finite; got {value}")


def check_head_width(config: Any, name: str, attention: Callable[[Tensor], Any]) -> None:
    """Ask the attention, which alone knows what heads it takes; nothing is computed.

    Args:
        config: of ``heads`` and of the width of that name.
        name: of the width.
        attention: of queries that are keys and values too.

    Raises:
        ValueError: it does not take heads of that width.
    """
    width = getattr(config, name)
    try:
        attention(torch.empty(1, 1, 1, width // config.heads, device="meta"))
    except ValueError as error:
        raise ValueError(
            f"{name} must be heads times a width that the attention takes; got {name} {width}, "
            f"heads {config.heads}: {error}"
        ) from error


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}; got {backend!r}")


def check_tokens(tokens: Tensor, device: torch.device, *, least: int = 0) -> None:
    """Refuse what a model on this device cannot read, before anything is computed.

    Args:
        tokens: ``[B, T]``; ``[B, T + 1]`` where a row is to have ``least`` of them.

    Raises:
        TypeError: they are no tensor of integers.
        ValueError: their shape or device is another.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"wanted tokens as a tensor; got {type(tokens).__name__}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"wanted tokens in int64 or int32; got {tokens.dtype}")
    if tokens.ndim != 2 or tokens.shape[1] < least:
        wanted = "[B, T]" if not least else f"[B, T + 1], at least {least} in a row"
        raise ValueError(f"wanted tokens {wanted}; got {list(tokens.shape)}")
    if tokens.device != device:
        raise ValueError(
            f"wanted tokens on the model's device, {device}; got them on {tokens.device}"
        )


def check_targets(targets: Tensor, tokens: Tensor) -> None:
    """Refuse targets that are not one for each token, before anything is computed.

    Raises:
        TypeError: they are no tensor of integers.
        ValueError: their shape or device is not the tokens'.
    """
    if not isinstance(targets, Tensor):
        raise TypeError(f"wanted targets as a tensor; got {type(targets).__name__}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"wanted targets in int64 or int32; got {targets.dtype}")
    if targets.shape != tokens.shape:
        raise ValueError(
            f"wanted a target for each token, {list(tokens.shape)}; got {list(targets.shape)}"
        )
    if targets.device != tokens.device:
        raise ValueError(f"wanted targets on {tokens.device}, as tokens; got {targets.device}")


def check_synchronised(model: nn.Module) -> None:
    """Refuse to compute what the wrapper that adds up gradients of several processes does not see:
    a method of a module that was wrapped, which trains on its own and says nothing.

    Raises:
        RuntimeError: gradients would stay this process's.
    """
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and torch.is_grad_enabled()):
        return
    # A private name: without it, models that call this within another's forward are refused.
    active = getattr(DistributedDataParallel, "_get_active_ddp_module", lambda: None)
    if group.get_world_size() == 1 or active() is not None:
        return
    # A model that fully_shard has taken, which changes its class, has hooks that see the call; its
    # parameters are whole where a forward pass has gathered them.
    if hasattr(model, "set_reshard_after_backward"):
        return
    learned = [x for x in model.parameters() if x.requires_grad]
    # DTensors know by themselves what is to be added up.
    if not all(hasattr(x, "full_tensor") for x in learned):
        name = type(model).__name__
        raise RuntimeError(
            f"wanted a loss that {group.get_world_size()} processes add up the gradients of: call "
            f"what wraps the {name}, such as DistributedDataParallel, with its targets; got a call "
            "of the model inside, whose gradients would stay this process's"
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What products are computed in there; None where nothing says but their operands."""
    # Autocast knows no meta tensors.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
