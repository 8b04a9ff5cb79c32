"""The kernels of groups' learning rates compile for every supported card, without a spill."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import SHARED_KIB, compiled_in_a_process

HERE = pathlib.Path(__file__).parent / "controlled"


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_one_launch_of_every_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "one_of_each", capability)
    for kernel in ("_group_squares", "_group_dots", "_control"):
        assert f"{kernel}_kernel" in printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_kind_of_launch_compiles_without_a_spill(capability):
    compiled_in_a_process(HERE, "every_kind", capability)
