"""Every kernel compiles for every supported card, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each", capability)
    for kernel in (
        "_scores_kernel",
        "_scores_dq_kernel",
        "_scores_dk_kernel",
        "_select_kernel",
        "_sparse_forward_kernel",
        "_sparse_dq_kernel",
        "_sparse_dkdv_kernel",
        "_add_parts_kernel",
        "_members_kernel",
        "_keys_of_tiles_kernel",
        "_queries_of_tiles_kernel",
        "_union_forward_kernel",
        "_union_dq_kernel",
        "_union_dkdv_kernel",
        "_target_kernel",
        "_divergence_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_tables_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_line", capability)
