"""The program ``fusewright-train``: one subcommand per model."""

from __future__ import annotations

import typer

from .generate import generate_text
from .hybrid import train_hybrid
from .titan_mac import train_titan_mac
from .transformer_np import train_transformer_np

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """Train a fusewright model. Training runs without any flag, on data of its own."""


app.command("transformer-np")(train_transformer_np)
app.command("titan-mac")(train_titan_mac)
app.command("hybrid")(train_hybrid)
app.command("generate")(generate_text)
