"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", QUICK)
def test_launches_of_the_presets_compile_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "streams_of_hybrids", capability)
    for kernel in ("read", "write", "write_backward", "gates_backward", "read_backward"):
        assert printed.count(f"stream_{kernel}_kernel") == 3


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_launch_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "streams_of_all_numbers", capability)
