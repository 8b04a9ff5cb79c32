"""Every kernel compiles for every supported GPU, within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", QUICK)
def test_one_launch_of_every_kernel_compiles(capability):
    """On Hopper, which the tables are for, without a spill."""
    may_spill = capability != 90
    printed = compiled_in_a_process(HERE, "one_of_each", capability, may_spill=may_spill)
    for kernel in (
        "prepare_kernel",
        "states_kernel",
        "outputs_kernel",
        "local_kernel",
        "state_gradients_kernel",
        "inputs_kernel",
        "through_kernel",
        "step_kernel",
        "convolution_kernel",
        "convolution_backward_kernel",
        "gated_norm_kernel",
        "gated_norm_backward_kernel",
    ):
        assert kernel in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("launches", ["every_launch", "every_exact_launch"])
def test_every_launch_compiles_and_fits_in_shared_memory(launches, capability):
    compiled_in_a_process(HERE, launches, capability, may_spill=True)
