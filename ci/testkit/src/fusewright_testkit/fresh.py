"""Run code in a process of its own that has imported torch, and of ours what tests name alone.

Importing torch takes seconds. The fork server of ``multiprocessing`` imports it once, and each
piece of code runs in a fork of that server.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback

# Seconds after which a compiler hangs.
PATIENCE = 1200
# The second is what the first gradient imports. Tests may add what all of theirs import.
PRELOADED = ["torch", "torch.fx.experimental.symbolic_shapes"]


def run_python(code: str) -> str:
    """Run code as a program would; returns what it prints.

    Its environment and import path are those that this process had at the first call.

    Raises:
        AssertionError: the code raised, took twenty minutes, or its process died; the message is
            what it wrote.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as errors:
        process = context.Process(target=execute, args=(code, out.name, errors.name))
        process.start()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode == 0, out.read() + errors.read()
        return out.read()


def execute(code: str, out: str, errors: str) -> None:
    """Run code with the standard streams in files."""
    for stream, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
