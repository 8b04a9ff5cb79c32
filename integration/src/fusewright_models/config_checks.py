"""What the shapes of all models are held to."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


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
