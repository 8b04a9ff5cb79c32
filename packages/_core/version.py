"""Versions: of a package of ours, and of triton."""

from __future__ import annotations

import re
from importlib import import_module, metadata


def installed_version(package: str) -> str:
    """The version of the distribution of ``package``, its import name; "0+source" for a source tree
    that is not installed.
    """
    try:
        return metadata.version(package.replace(".", "-").replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "0+source"


def triton_version() -> tuple[int, ...]:
    """Such as (3, 7, 1): by triton itself, since its distribution has several names."""
    version: str = import_module("triton").__version__
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
