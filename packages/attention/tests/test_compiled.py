"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each", capability)
    for kernel in (
        "streaming_forward_kernel",
        "streaming_dq_kernel",
        "streaming_dkdv_kernel",
        "window_forward_kernel",
        "window_dq_kernel",
        "window_dkdv_kernel",
        "single_tile_forward_kernel",
        "single_tile_backward_kernel",
        "add_chunks_kernel",
        "rotary_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_tables_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_line", capability)
