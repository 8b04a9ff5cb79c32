"""What the tests and benchmarks of the fusewright packages share. Private: no package depends on it
at run time.

A name is imported when it is first asked for: pytest's process that only hands tests to others
loads the plugin, too, and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case
    from .graphs import capture, no_synchronisation
    from .yardstick import Yardstick, assert_within

__all__ = ["Case", "Yardstick", "assert_within", "capture", "no_synchronisation"]

MODULES = {"Case": "cases", "capture": "graphs", "no_synchronisation": "graphs"}
MODULES |= {"Yardstick": "yardstick", "assert_within": "yardstick"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{MODULES[name]}", __name__), name)
