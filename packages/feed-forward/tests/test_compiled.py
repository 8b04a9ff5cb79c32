"""Every kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import QUICK, SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", QUICK)
def test_every_kernel_compiles_in_every_form_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each", capability)
    for name in ("silu", "silu_linear"):
        for kernel in (f"{name}_kernel", f"{name}_backward_kernel"):
            assert f" {kernel} " in printed
    if capability == 90:
        assert printed.count(" hopper_silu_kernel ") == 2
        assert printed.count(" hopper_silu_backward_kernel ") == 1
    for kernel in ("silu_mul_kernel", "silu_mul_backward_kernel"):
        assert f"{kernel} " in printed
        # Elements in one run, and rows of 5504 counted in vectors of 16.
        for form in ("cols=0", "cols=344"):
            assert any(kernel in line and form in line for line in printed.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_form_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_form", capability)
