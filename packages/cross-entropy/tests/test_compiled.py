"""The kernel compiles for every supported GPU, without a spill and within its shared memory."""

from __future__ import annotations

import pathlib

import pytest
from fusewright_testkit.compiled import GPUS, compiled_in_a_process

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("capability", GPUS)
def test_kernel_compiles_without_a_spill(capability):
    printed = compiled_in_a_process(HERE, "softmax_gradients", capability)
    assert printed.count("softmax_gradient_kernel") == 4
