"""Libraries that only an extra of this distribution brings."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def imported(library: str, *, extra: str, purpose: str) -> Any:
    """The library, imported now.

    Raises:
        RuntimeError: it is not installed; says which extra brings it.
    """
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise RuntimeError(
            f"{purpose} need {library}, which is not installed: "
            f'pip install "./integration[{extra}]" brings it'
        ) from error
