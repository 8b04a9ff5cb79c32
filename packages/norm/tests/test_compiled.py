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
        "_norm_forward_kernel",
        "_norm_forward_wide_kernel",
        "_norm_backward_kernel",
        "_norm_backward_small_kernel",
        "_norm_backward_wide_kernel",
        "_weight_parts_kernel",
        "_add_parts_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_tables_compiles_without_a_spill(capability):
    compile_for(capability, "every_line")
