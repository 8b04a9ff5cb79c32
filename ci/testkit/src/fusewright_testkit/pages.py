"""Pages of the documentation whose code runs, and that show what it printed.

The fenced blocks of a page run in their order, in one namespace and one folder:

    ```python               runs; what it prints is the block of text behind it
    ```sh                   each line is a command of a program that the caller hands in
    ```python title="F"     the contents of the file F, in whatever language; written there
    ```text                 what the block before it printed

Code that is indented by four blanks is shown alone. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FENCE = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<body>.*?)^```$', re.M | re.DOTALL
)
# A program takes its arguments; one that fails raises.
Programs = Mapping[str, Callable[[list[str]], Any]]


def python_blocks(text: str) -> list[str]:
    """The code of a page, in its order."""
    return [block["body"] for block in FENCE.finditer(text) if block["language"] == "python"]


def ran(text: str, programs: Programs, name: str = "page") -> str:
    """A page as it reads with what its code prints now; the code runs in the current folder.

    Args:
        text: of the page.
        programs: by the first word of a command.
        name: of the page, for tracebacks.

    Raises:
        ValueError: a command is of no such program.
    """
    known: dict[str, Any] = {"__name__": "__main__"}
    parts, end = [], 0
    blocks = list(FENCE.finditer(text))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.start() < end or block["language"] == "text":
            continue
        parts.append(text[end : block.end()])
        end = block.end()
        shown = None
        if following and following["language"] == "text":
            between = text[end : following.start()]
            shown = following if between.strip() == "" else None
        if block["file"]:
            path = Path(block["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["body"])
            continue
        if block["language"] == "python":
            # Tracebacks name the lines of the page.
            line = text.count("\n", 0, block.start("body"))
            printed = said(exec, compile("\n" * line + block["body"], name, "exec"), known)
        elif block["language"] == "sh":
            printed = "".join(said(run_command, line, programs) for line in commands(block["body"]))
        else:
            continue
        if shown:
            end = shown.end()
        # Of a command what the page does not show may be what a machine measured.
        if printed and (shown or block["language"] == "python"):
            parts.append(f"\n\n```text\n{printed}```")
    return "".join([*parts, text[end:]])


def commands(body: str) -> list[str]:
    """The lines of a block, put together where they go on."""
    lines = body.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def run_command(line: str, programs: Programs) -> None:
    program, *arguments = shlex.split(line)
    if program not in programs:
        raise ValueError(f"wanted a command of {', '.join(programs) or 'no program'}; got {line!r}")
    programs[program](arguments)


def said(call: Callable[..., Any], *arguments: Any) -> str:
    """What a call prints, without blanks at the ends of lines."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call(*arguments)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
