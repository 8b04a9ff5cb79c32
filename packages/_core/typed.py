"""Types that torch leaves open, for type checkers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def called_as(forward: Method) -> Callable[[Callable[..., Any]], Method]:
    """Gives a module's ``__call__`` the type of its ``forward``; torch's own returns Any."""
    return lambda call: forward
