"""Options of a command from the fields of a run's settings: what config.json holds and --resume
takes up.

A field's annotation says what typer is to know of its option; without the option, the run's preset
or the field's own default decides. The same annotation bounds what a file may say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from functools import partial, wraps
from inspect import Parameter, Signature, get_annotations
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from ..choices import FORMER

LARGEST_SEED = 2**63 - 1
# More than any machine holds; larger counts would overflow somewhere.
LARGEST_COUNT = 2**48

_HINTS: dict[type, Mapping[str, Any]] = {}

# One for each group of options in the help.
of_data = partial(typer.Option, rich_help_panel="Data")
of_model = partial(typer.Option, rich_help_panel="Model")
of_training = partial(typer.Option, rich_help_panel="Optimization")
of_devices = partial(typer.Option, rich_help_panel="Devices and speed")
of_folder = partial(typer.Option, rich_help_panel="Run folder and progress")


def takes(kind: type, **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command of an option for each field of a run's settings, its own fields before those that
    it inherits, and of ``more``; it is called with those that are given.
    """
    known = list(options_of(kind))
    parameters = [*known, *(_option(name, x) for name, x in more.items()), *_former(known)]

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def given(**flags: Any) -> None:
            said = {name: x for name, x in flags.items() if x is not None}
            # typer's bounds let pass what is not finite, and nothing is imported yet.
            for each in parameters:
                with refusals():
                    check_bounds(each.name, said.get(each.name), *_parts(each.annotation))
            command(**_by_new_names(said))

        given.__annotations__ = {each.name: each.annotation for each in parameters}
        given.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return given

    return taking


def options_of(kind: type) -> Iterator[Parameter]:
    """What typer makes an option of, for each field of a dataclass."""
    hints = hints_of(kind)
    names = (name for each in kind.__mro__ for name in get_annotations(each))
    return (_option(name, hints[name]) for name in dict.fromkeys(names) if name in hints)


def flag(name: str) -> str:
    """Of the setting of that name."""
    return f"--{name.replace('_', '-')}"


def hints_of(kind: type) -> Mapping[str, Any]:
    """The annotations of a dataclass's fields, which Python would evaluate again at each call."""
    if kind not in _HINTS:
        hints = get_type_hints(kind, include_extras=True)
        _HINTS[kind] = {field.name: hints[field.name] for field in fields(kind)}
    return _HINTS[kind]


def _option(name: str, hint: Any) -> Parameter:
    wanted, *told = _parts(hint)
    annotation = Annotated[wanted | None, *told]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _former(known: list[Parameter]) -> Iterator[Parameter]:
    """The options of former names, which the help does not show."""
    by_name = {each.name: each for each in known}
    for old, new in FORMER.items():
        if new in by_name:
            wanted, info = get_args(by_name[new].annotation)
            info = copy(info)
            info.hidden = True
            yield by_name[new].replace(name=old, annotation=Annotated[wanted, info])


def _by_new_names(flags: dict[str, Any]) -> dict[str, Any]:
    for old in FORMER.keys() & flags.keys():
        new = FORMER[old]
        if new in flags:
            raise typer.BadParameter(f"{flag(old)} is the former name of {flag(new)}: give one")
        typer.echo(f"{flag(old)} is the former name of {flag(new)}, and goes on working", err=True)
        flags[new] = flags.pop(old)
    return flags


def check_fields(settings: Any) -> None:
    """Refuse what a flag or a file may have put into a run's settings.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field is none of its literals, not finite or out of its bounds.
    """
    names = hints_of(type(settings))
    check_values(type(settings), {name: getattr(settings, name) for name in names})


def check_values(kind: type, values: Mapping[str, Any]) -> None:
    """Likewise some of them, by name, before there are settings of the kind."""
    hints = hints_of(kind)
    for name, value in values.items():
        wanted, *told = _parts(hints[name])
        _check_kind(name, value, wanted)
        check_bounds(name, value, *told)


def check_bounds(name: str, value: Any, *told: Any) -> None:
    """Refuse a number that is not finite or out of the bounds of its option.

    Args:
        name: of the setting.
        value: of any type.
        told: typer's word of the option, if there is one.

    Raises:
        ValueError: as above.
    """
    if type(value) not in (int, float):
        return
    infos = [each for each in told if isinstance(each, OptionInfo)]
    least, most = (infos[0].min, infos[0].max) if infos else (None, None)
    if most is None and type(value) is int and value > LARGEST_COUNT:
        most = LARGEST_COUNT
    above = least is None or value >= least
    below = most is None or value <= most
    if above and below and math.isfinite(value):
        return
    wanted = [] if least is None else [f"at least {_said(least)}"]
    if most is not None:
        wanted.append(f"at most {_said(most)}")
    elif type(value) is float:
        wanted.append("finite")
    raise ValueError(f"{name} must be {' and '.join(wanted)}; got {value}")


def _said(bound: float) -> str:
    return f"{bound:g}" if type(bound) is float else str(bound)


@contextmanager
def refusals() -> Iterator[None]:
    """A value that cannot be is the caller's to mend: one sentence, no traceback."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _parts(hint: Any) -> tuple[Any, ...]:
    """A type, and what is told of it."""
    return get_args(hint) if get_origin(hint) is Annotated else (hint,)


def _check_kind(name: str, value: Any, kind: Any) -> None:
    if value is None and NoneType in get_args(kind):
        return
    # Beside None a literal is one of a union's.
    literals = [each for each in (kind, *get_args(kind)) if get_origin(each) is Literal]
    if literals:
        if value not in get_args(literals[0]):
            raise ValueError(f"{name} must be one of {get_args(literals[0])}; got {value!r}")
        return
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    # JSON writes 1.0 as 1, too; True is an int to Python.
    wanted = (float, int) if kind is float else kinds
    if type(value) not in wanted:
        names = " or ".join("None" if each is NoneType else each.__name__ for each in kinds)
        raise TypeError(f"{name} must be {names}; got {value!r}")
