"""The fields of a run: what config.json holds and what --resume takes up again."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

LARGEST_SEED = 2**63 - 1


def check_fields(run: Any) -> None:
    """Refuse what a hand that edited config.json may have put into a run's dataclass.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field is none of its literals, or ``seed`` is out of range.
    """
    kinds = get_type_hints(type(run))
    for field in fields(run):
        _check_field(field.name, getattr(run, field.name), kinds[field.name])
    if not 0 <= run.seed <= LARGEST_SEED:
        raise ValueError(f"seed must be 0 to {LARGEST_SEED}; got {run.seed}")


def _check_field(name: str, value: Any, kind: Any) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {get_args(kind)}; got {value!r}")
        return
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    # JSON writes 1.0 as 1, too; True is an int to Python.
    wanted = (float, int) if kind is float else kinds
    if type(value) not in wanted:
        names = " or ".join("None" if each is NoneType else each.__name__ for each in kinds)
        raise TypeError(f"{name} must be {names}; got {value!r}")
