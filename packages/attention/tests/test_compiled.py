"""Every kernel compiles for every supported card, without a spill and within its shared memory."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from fusewright_testkit.compiled import SHARED_KIB

HERE = pathlib.Path(__file__).parent


def compile_for(capability: int, launches: str) -> str:
    """What the testkit prints, from a process whose triton is not the interpreter."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), *sys.path]))
    environment.pop("TRITON_INTERPRET", None)
    environment["FUSEWRIGHT_CAPABILITY"] = str(capability)
    environment["FUSEWRIGHT_SHARED_KIB"] = str(SHARED_KIB[capability])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fusewright_testkit.compiled", f"launches:{launches}"),
            *("--capability", str(capability), "--check"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_one_launch_of_every_kernel_compiles_without_a_spill(capability):
    printed = compile_for(capability, "one_of_each")
    for kernel in (
        "_streaming_forward_kernel",
        "_streaming_dq_kernel",
        "_streaming_dkdv_kernel",
        "_single_tile_forward_kernel",
        "_single_tile_backward_kernel",
        "_add_chunks_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_tables_compiles_without_a_spill(capability):
    compile_for(capability, "every_line")
