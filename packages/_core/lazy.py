"""Modules that are imported at the first use of one of their names: the kernels, which need triton.

A launch module names its kernels so, for the interpreter and for an editor::

    if TYPE_CHECKING:
        from . import kernels
    else:
        kernels = lazy_module(__package__, "kernels")
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for a module until it is imported, and forwards every name of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # An inspection of modules asks for these, and must not import triton.
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazy_module(package: str | None, name: str) -> LazyModule:
    """The module ``name`` of ``package``, not imported yet."""
    return LazyModule(f"{package}.{name}")
