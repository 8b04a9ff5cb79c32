"""``python -m fusewright_models``: the program ``fusewright-train``, as torchrun starts it."""

from __future__ import annotations

from .cli import app

if __name__ == "__main__":
    app(prog_name="fusewright-train")
