"""What the subcommand does that writes the report of a run."""

from __future__ import annotations

from pathlib import Path

import typer

from ..training import RunFolder
from ..training.reporting.report import REPORT, write_report
from .commands import usage_errors


def report_run(run: Path) -> None:
    """Write the report into that run's folder, and print where it is.

    Raises:
        typer.BadParameter: it holds no run, or a damaged one.
    """
    with usage_errors():
        write_report(RunFolder(run))
    typer.echo(f"the report is in {run / REPORT}")
