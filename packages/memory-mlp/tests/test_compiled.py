"""Every kernel compiles for every supported card, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_update_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each_update", capability)
    for kernel in (
        "_round_weights_kernel",
        "_turn_kernel",
        "_hidden_kernel",
        "_residual_kernel",
        "_slope_kernel",
        "_gradients_kernel",
        "_add_splits_kernel",
        "_step_kernel",
        "_inner_products_kernel",
        "_cotangents_kernel",
        "_p_bar_kernel",
        "_e_bar_kernel",
        "_z_bar_kernel",
        "_dk_kernel",
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
    for kernel in ("_read_kernel", "_read_backward_kernel", "_read_sum_kernel"):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_read_kernel_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_read", capability)


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_input_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each_input", capability)
    for kernel in (
        "_memory_input_kernel",
        "_memory_input_backward_kernel",
        "_add_shares_kernel",
        "_finite_tokens_kernel",
        "_kept_tokens_kernel",
        "_gated_tokens_kernel",
        "_gated_tokens_backward_kernel",
        "_count_tokens_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_input_kernel_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_input", capability)
