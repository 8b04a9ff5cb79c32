"""The program ``fusewright-train``: one subcommand per model."""

from __future__ import annotations

import typer

from .generate_command import generate_text
from .hybrid_command import hybrid
from .titan_mac_command import titan_mac
from .transformer_np_command import negative_log_likelihood, transformer_np

__all__ = ["app", "negative_log_likelihood"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """Train a fusewright model. Training runs without any flag, on data of its own."""


app.command("transformer-np")(transformer_np)
app.command("titan-mac")(titan_mac)
app.command("hybrid")(hybrid)
app.command("generate")(generate_text)
