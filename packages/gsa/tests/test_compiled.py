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
        "scores_kernel",
        "scores_dq_kernel",
        "scores_dk_kernel",
        "select_kernel",
        "sparse_forward_kernel",
        "sparse_dq_kernel",
        "sparse_dkdv_kernel",
        "add_parts_kernel",
        "members_kernel",
        "keys_of_tiles_kernel",
        "queries_of_tiles_kernel",
        "union_forward_kernel",
        "union_dq_kernel",
        "union_dkdv_kernel",
        "target_kernel",
        "divergence_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_tables_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_line", capability)
