"""The version of a package."""

from __future__ import annotations

from importlib import metadata


def installed_version(package: str) -> str:
    """The version of the distribution of ``package``, its import name; "0+source" for a source tree
    that is not installed.
    """
    try:
        return metadata.version(package.replace(".", "-").replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "0+source"
