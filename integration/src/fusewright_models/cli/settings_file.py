"""Settings in a file: TOML that says what flags say, or the config.json of a run."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..choices import FORMER
from .options import check_values, hints_of
from .settings import Settings

# What config.json says beside the settings.
BESIDE = {"model", "torch"}


def read_settings(
    kind: type[Settings], file: Path, *, later: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the file says, by name; what it leaves out is the preset's, as with flags.

    Args:
        kind: of the settings.
        file: as above.
        later: settings that runs of before do not have, and what these did: what the config.json of
            one says by leaving them out.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, of another model, or has a name or a value that no setting
            has.
    """
    text = file.read_bytes()
    what = "JSON" if file.suffix == ".json" else "TOML"
    try:
        found = json.loads(text) if what == "JSON" else tomllib.loads(text.decode())
    except ValueError as error:
        raise ValueError(f"wanted settings in {file}; got no {what}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"wanted settings by name in {file}; got a {type(found).__name__}")
    model = found.get("model", kind.model_name)
    if model != kind.model_name:
        raise ValueError(f"wanted settings of {kind.model_name} in {file}; got those of {model}")
    named = by_new_names({name: x for name, x in found.items() if name not in BESIDE})
    if later is not None and found.keys() >= BESIDE:
        named = {name: x for name, x in later.items() if name in hints_of(kind)} | named
    for name in named:
        if name not in hints_of(kind):
            raise ValueError(f"{file}: no setting is called {name}{_meant(name, hints_of(kind))}")
    # TOML has no null: what is left open is left out there.
    said = {name: value for name, value in named.items() if value is not None}
    try:
        check_values(kind, said)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return said


def by_new_names(settings: dict[str, Any]) -> dict[str, Any]:
    """The same, of runs of before too."""
    return {FORMER.get(name, name): value for name, value in settings.items()}


def _meant(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; {close[0]} is" if close else ""
