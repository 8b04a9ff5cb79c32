"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_update_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each_update", capability)
    for kernel in (
        "round_weights_kernel",
        "transpose_kernel",
        "hidden_kernel",
        "residual_kernel",
        "slope_kernel",
        "gradients_kernel",
        "add_splits_kernel",
        "step_kernel",
        "inner_products_kernel",
        "cotangents_kernel",
        "p_bar_kernel",
        "e_bar_kernel",
        "z_bar_kernel",
        "dk_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_line_of_the_update_tables_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_update", capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_kernel_of_the_scan_compiles_and_fits_in_shared_memory(capability):
    """They spill still, docs/decisions/0005 says how much."""
    compiled_in_a_process(HERE, "every_scan", capability, may_spill=True)


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_read_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each_read", capability)
    for kernel in ("read_kernel", "read_backward_kernel", "read_sum_kernel"):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_read_kernel_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_read", capability)


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_input_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each_input", capability)
    for kernel in (
        "memory_input_kernel",
        "memory_input_backward_kernel",
        "add_parts_kernel",
        "finite_tokens_kernel",
        "kept_tokens_kernel",
        "gated_tokens_kernel",
        "gated_tokens_backward_kernel",
        "count_tokens_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_input_kernel_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_input", capability)
