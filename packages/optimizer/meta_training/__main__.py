"""``python -m meta_training --out weights.pt``: see the package's docstring."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from fusewright.optimizer.common.placement import current

from . import __doc__ as description
from .pairs import Settings
from .training import run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m meta_training", description=(description or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--every", type=int, default=300, help="updates between two trials")
    parser.add_argument("--problems", type=int, default=16, help="of each held-out task")
    parser.add_argument("--held-out-steps", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in Settings._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args(arguments))
    if options["out"].suffix == ".csv":
        parser.error(f"--out must not end in .csv, where the rows go; got {options['out']}")
    if options["every"] < 1:
        parser.error(f"--every must be at least 1; got {options['every']}")
    settings = Settings(**{name: options.pop(name) for name in Settings._fields})
    path, device = options.pop("out"), torch.device(options.pop("device"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with current(device):
        run(path, settings, device, **options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
